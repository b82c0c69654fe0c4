"""One generation with one cache in a process of its own, and the comparison of two such runs.

A process per cache keeps the figures apart: memory that one run leaves behind is never counted for the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer
from transformers.utils import logging

from .chat import chat_turns
from .config import DiffKVConfig
from .integration.cache import DiffKVCache
from .integration.errors import HandOverError
from .peak import PeakMemory
from .report import plot_levels

DYNAMIC, DIFFKV = "DynamicCache", "DiffKV"
# What a user can cause; anything else is a defect and keeps its traceback.
EXPECTED = (ValueError, OSError, MemoryError, NotImplementedError, HandOverError, torch.OutOfMemoryError)
WARM_UP_TOKENS = 3
# Ctrl-C reaches both processes; the one that waits says so, this one ends without a word
NEW_PROCESS = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "runpy.run_module('hf_diffkv.compare', run_name='__main__')"
)


class RunError(Exception):
    """A run that could not be made; the message says why in one line."""


@dataclass(frozen=True)
class Job:
    """Everything one run needs.

    Attributes:
        turns: the prompt, then what the user adds after each answer.
        chat: whether the turns are messages to a chat model.
        max_new_tokens: tokens generated per turn.
        config: fields of `DiffKVConfig` (DiffKV only).
        picture: where to plot the levels; None for no picture.
        stream: whether the text goes to stdout while it is generated.
    """

    cache: str
    model: str
    turns: list[str]
    max_new_tokens: int
    config: dict[str, Any]
    dtype: str
    device: str
    seed: int
    sample: bool
    chat: bool = False
    picture: str | None = None
    stream: bool = False


@dataclass(frozen=True)
class Run:
    """What one run did.

    Attributes:
        generated: token ids of every turn.
        cache_bytes: what the cache really holds; payload_bytes: codes and window alone (DiffKV only).
        peak_bytes: highest memory of the process or device; above_model_bytes: the same less what the loaded model
            took; peak_source: how they were measured. None where the platform cannot tell.
        prompt_seconds: time to the first token of the first turn.
        tokens_per_second: of decoding, first tokens of turns left out; None if there was nothing else.
        levels: tokens per level over layers, heads and requests (DiffKV only); layers: the same per layer and head.
    """

    cache: str
    text: str
    generated: list[list[int]]
    prompt_tokens: int
    seen_tokens: int
    cache_bytes: int
    payload_bytes: int | None
    peak_bytes: int | None
    above_model_bytes: int | None
    peak_source: str
    prompt_seconds: float
    tokens_per_second: float | None
    levels: dict[str, int] | None = None
    layers: list[dict[str, Any]] | None = None
    note: str | None = None


def run_in_fresh_process(job: Job) -> Run:
    """Runs `job` in a new Python process, which writes to this one's stdout and stderr.

    Raises:
        RunError: the run failed for a reason that a user can act on, or the process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_path, run_path = Path(folder, "job.json"), Path(folder, "run.json")
        job_path.write_text(json.dumps(dataclasses.asdict(job)))
        # at the end, so that whatever the caller put first stays first
        package = str(Path(__file__).resolve().parents[1])
        paths = [path for path in (os.environ.get("PYTHONPATH"), package) if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        sys.stdout.flush()
        command = [sys.executable, "-c", NEW_PROCESS, str(job_path), str(run_path)]
        code = subprocess.run(command, env=environment).returncode
        if not run_path.exists():
            reason = "was killed, most likely for lack of memory" if code == -9 else f"ended with exit code {code}"
            raise RunError(f"the {job.cache} run {reason}.")
        result = json.loads(run_path.read_text())
    if "error" in result:
        raise RunError(f"{job.cache}: {result['error']}")
    return Run(**result)


def execute(job: Job) -> Run:
    """Runs `job` in this process."""
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    dtype = job.dtype if job.dtype == "auto" else getattr(torch, job.dtype)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).to(job.device).eval()
    turns = chat_turns(tokenizer, job.turns) if job.chat else job.turns
    prompt = tokenizer(turns[0], return_tensors="pt", add_special_tokens=not job.chat).input_ids.to(job.device)
    _warm_up(model, prompt, job)
    peak = PeakMemory(torch.device(job.device))
    cache = _new_cache(model, job)
    streamer = _TimedStreamer(tokenizer, job)
    torch.manual_seed(job.seed)
    ids, generated = prompt, []
    for number, turn in enumerate(turns):
        if number:
            added = tokenizer(turn, return_tensors="pt", add_special_tokens=False).input_ids.to(job.device)
            # the model may have ended its answer by itself
            ended = job.chat and torch.equal(ids[:, -1:], added[:, :1])
            ids = torch.cat([ids, added[:, int(ended) :]], dim=1)
            streamer.say(f"\n> {job.turns[number]}\n" if job.chat else turn)
        known = ids.shape[1]
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=job.max_new_tokens,
            do_sample=job.sample,
            streamer=streamer,
        )
        generated.append(ids[0, known:].tolist())
    peak_bytes, above = peak.read()
    streamer.close()
    held, note = _held(cache, job)
    return Run(
        cache=job.cache,
        text=tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True),
        generated=generated,
        prompt_tokens=prompt.shape[1],
        seen_tokens=cache.get_seq_length(),
        peak_bytes=peak_bytes,
        above_model_bytes=above,
        peak_source=peak.source,
        prompt_seconds=streamer.prompt_seconds,
        tokens_per_second=streamer.tokens_per_second,
        note=note,
        **held,
    )


def _new_cache(model: Any, job: Job) -> Any:
    if job.cache == DYNAMIC:
        return DynamicCache(config=model.config)
    return DiffKVCache(model.config, DiffKVConfig.from_dict(job.config))


def _warm_up(model: Any, prompt: torch.Tensor, job: Job) -> None:
    """First calls pay for kernels and thread pools; they must not fall into the measured time."""
    config = DiffKVConfig.from_dict(job.config) if job.cache == DIFFKV else DiffKVConfig()
    window = config.window + config.sinks
    ids = prompt[:, -(window + 16) :]
    mask = torch.ones_like(ids)
    cache = _new_cache(model, job)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=WARM_UP_TOKENS, do_sample=False)


def _held(cache: Any, job: Job) -> tuple[dict[str, Any], str | None]:
    """The part of a `Run` that describes what the cache holds, and a note where the picture is missing."""
    if job.cache == DYNAMIC:
        tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return {"cache_bytes": sum(t.numel() * t.element_size() for t in tensors), "payload_bytes": None}, None
    report = cache.memory()
    note = None
    if job.picture:
        try:
            plot_levels(cache, job.picture)
        except ImportError as error:
            note = f"no picture: {error}"
    held = {
        "cache_bytes": report.bytes + report.other_bytes,
        "payload_bytes": report.payload_bytes + report.other_bytes,
        "levels": report.tokens,
        "layers": [dataclasses.asdict(layer) for layer in report.layers],
    }
    return held, note


class _TimedStreamer(TextStreamer):
    """Notes when each token arrived; prints the text, or a progress bar where the text is not wanted.

    `generate()` hands over each token on the host, so the clock also covers the device's work.
    """

    def __init__(self, tokenizer: Any, job: Job) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.printing = job.stream
        total = len(job.turns) * job.max_new_tokens
        self.bar = None if job.stream else tqdm(total=total, unit="token", desc=job.cache, leave=False, disable=None)
        self.arrivals: list[list[float]] = []
        self.started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        if self.next_tokens_are_prompt:
            self.arrivals.append([])
            if len(self.arrivals) == 1:
                self.started = now
        else:
            self.arrivals[-1].append(now)
            if self.bar is not None:
                self.bar.update(1)
        super().put(value)

    def say(self, text: str) -> None:
        """Shows what the user added."""
        if self.printing:
            print(text, end="", flush=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.printing:
            print(text, end="", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    @property
    def prompt_seconds(self) -> float:
        return self.arrivals[0][0] - self.started

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(times[-1] - times[0] for times in self.arrivals if times)
        tokens = sum(len(times) - 1 for times in self.arrivals if times)
        return tokens / seconds if tokens else None


def _main(job_path: str, run_path: str) -> None:
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    job = Job(**json.loads(Path(job_path).read_text()))
    try:
        result = dataclasses.asdict(execute(job))
    except EXPECTED as error:
        result = {"error": " ".join(str(error).split()) or type(error).__name__}
    Path(run_path).write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
