"""Runs a generation with one cache in a separate process, to compare two such runs.

One process per cache keeps the figures separate: memory that one run leaves behind is never counted for the other.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, DynamicCache, TextStreamer

from .. import plot
from ..cache.diffkv_cache import DiffKVCache
from ..cache.errors import HandOverError
from ..compat import passing
from ..config import DiffKVConfig
from ..evaluation.errors import one_line
from ..heads.lookup import HINTS
from ..pages.reserve import NO_MEMORY
from ..replacing import save_text
from .models import hide_progress_bars, model_from
from .peak import PeakMemory
from .saved_talk import write_talk
from .talk import Talk

DYNAMIC, DIFFKV = "DynamicCache", "DiffKV"
# errors that a user can cause; any other error is a defect and keeps its traceback
EXPECTED_ERRORS = (
    ValueError,
    OSError,
    *NO_MEMORY,
    NotImplementedError,
    HandOverError,
    # for missing packages that a model or its weights need
    ImportError,
)
WARM_UP_TOKENS = 3
# number of final characters of a prompt printed before its answer
ECHOED = 60
# exit code of a process ended by SIGPIPE, as shells report it
BROKEN_PIPE = 141
# exit code of a process ended by SIGTERM
TERMINATED = 128 + signal.SIGTERM
# Ctrl-C reaches both processes; the waiting one reports it, this one ends silently
NEW_PROCESS = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "runpy.run_module('hf_diffkv.running.side_by_side', run_name='__main__')"
)


class RunError(Exception):
    """A run failed; the message gives the reason in one line."""


@dataclass(frozen=True)
class Job:
    """Settings of one run.

    Attributes:
        cache: `DYNAMIC` or `DIFFKV`.
        turns: prompt, then the user's text after each answer.
        chat: whether the turns are messages to a chat model.
        max_new_tokens: maximum number of tokens generated per turn.
        config: fields for `DiffKVCache(model, config)` (DiffKV only).
        system: system message of a chat; None leaves it to the template.
        sampling: additional arguments of `generate()`, used if `sample` is True.
        picture: path of a plot of the levels; None for no plot.
        stream: whether to print the text to stdout while it is generated.
        echo: whether to also print the user's text; otherwise newlines separate the answers.
        start: `ids` and `first` of a conversation to continue, as in `Talk`; empty to begin one.
        load_cache: folder of a saved cache that has seen these ids (DiffKV only; others read them again).
        save_cache: folder to save the cache and the conversation to (DiffKV only).
        weights: bits of the weights, one of `WEIGHTS`; None keeps them as saved.
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
    system: str | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    picture: str | None = None
    stream: bool = False
    echo: bool = True
    quiet: bool = False
    start: dict[str, Any] = dataclasses.field(default_factory=dict)
    load_cache: str | None = None
    save_cache: str | None = None
    weights: str | None = None


@dataclass(frozen=True)
class FinishedRun:
    """Result of one run.

    Attributes:
        text: all text after the prompt.
        answers: text that the model generated in each turn.
        generated: token ids that the model generated in each turn.
        cache_bytes: memory of the cache.
        dense_bytes: memory of a dense cache of the same tokens (DiffKV only).
        payload_bytes: bytes of codes and window alone (DiffKV only).
        peak_bytes: peak memory of the process or device; None if the platform cannot tell.
        above_model_bytes: peak memory minus the memory of the loaded model; None if the platform cannot tell.
        peak_source: description of the kind of measurement.
        prompt_seconds: time to the first token of the first turn.
        tokens_per_second: decoding speed, not counting the first token of each turn; None if there were no others.
        levels: number of tokens by level over layers, heads and requests (DiffKV only).
        layers: token counts per layer and head (DiffKV only).
        num_layers: number of layers of the cache, compressed or not.
        config: fields of the cache's `DiffKVConfig` (DiffKV only).
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
    dense_bytes: int | None = None
    num_layers: int | None = None
    config: dict[str, Any] | None = None
    answers: list[str] = dataclasses.field(default_factory=list)


def run_in_fresh_process(job: Job) -> FinishedRun:
    """Runs `job` in a new Python process, which writes to this one's stdout and stderr.

    Raises:
        RunError: the run failed for a reason that a user can act on, or the process died.
        BrokenPipeError: the reader of stdout has gone away.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_path, run_path = Path(folder, "job.json"), Path(folder, "run.json")
        save_text(json.dumps(dataclasses.asdict(job)), job_path)
        # appended, so that the caller's paths stay first
        package = str(Path(__file__).resolve().parents[1])
        paths = [path for path in (os.environ.get("PYTHONPATH"), package) if path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        sys.stdout.flush()
        command = [sys.executable, "-c", NEW_PROCESS, str(job_path), str(run_path)]
        with _ending_with_us():
            code = subprocess.run(command, env=environment).returncode
        if code == BROKEN_PIPE:
            raise BrokenPipeError
        if not run_path.exists():
            reason = "was killed, most likely for lack of memory" if code == -9 else f"ended with exit code {code}"
            raise RunError(f"the {job.cache} run {reason}.")
        result = json.loads(run_path.read_text())
    if "error" in result:
        raise RunError(f"{job.cache}: {result['error']}")
    return FinishedRun(**result)


@contextmanager
def _ending_with_us() -> Iterator[None]:
    """Makes SIGTERM raise `SystemExit` within the block, so that `subprocess.run` kills the process it waits for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def execute_here(job: Job) -> FinishedRun:
    """Runs `job` in this process. Raises the errors of `run_in_fresh_process`."""
    try:
        return execute(job)
    except BrokenPipeError:
        raise
    except EXPECTED_ERRORS as error:
        raise RunError(f"{job.cache}: {one_line(error)}") from error


def execute(job: Job) -> FinishedRun:
    """Runs `job` in this process, without converting errors."""
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = model_from(job.model, job.dtype, job.device, job.weights)
    loaded = job.cache == DIFFKV and job.load_cache is not None
    cache = DiffKVCache.from_pretrained(job.load_cache, model) if loaded else _new_cache(model, job)
    talk = Talk(model, tokenizer, cache, chat=job.chat, system=job.system, **job.start)
    before = talk.ids.shape[1]
    prompt = torch.tensor([talk.encode(job.turns[0])], device=job.device)
    _warm_up(model, prompt, job)
    peak = PeakMemory(torch.device(job.device))
    streamer = _TimedStreamer(tokenizer, job)
    # only now, so that progress bars and the log come first
    streamer.say(f"... {job.turns[0][-ECHOED:]}" + ("\n" if job.chat else ""))
    torch.manual_seed(job.seed)
    options = {"max_new_tokens": job.max_new_tokens, "do_sample": job.sample, **(job.sampling if job.sample else {})}
    generated = []
    for number, turn in enumerate(job.turns):
        if number:
            streamer.say(f"\n> {turn}\n" if job.chat else turn)
        generated.append(talk.answer(turn, streamer=streamer, **options))
    peak_bytes, above = peak.read()
    streamer.close()
    if job.save_cache is not None:
        cache.save_pretrained(job.save_cache, model)
        write_talk(Path(job.save_cache), job.model, talk.ids[0].tolist(), talk.first)
    return FinishedRun(
        cache=job.cache,
        text=tokenizer.decode(talk.ids[0, before + prompt.shape[1] :], skip_special_tokens=True),
        answers=[tokenizer.decode(ids, skip_special_tokens=True) for ids in generated],
        generated=generated,
        prompt_tokens=prompt.shape[1],
        seen_tokens=cache.get_seq_length(),
        peak_bytes=peak_bytes,
        above_model_bytes=above,
        peak_source=peak.source,
        prompt_seconds=streamer.prompt_seconds,
        tokens_per_second=streamer.tokens_per_second,
        num_layers=len(cache.layers),
        **_held(cache, job),
    )


def _new_cache(model: Any, job: Job) -> Any:
    if job.cache == DYNAMIC:
        return DynamicCache(config=model.config)
    return DiffKVCache(model, job.config)


def _warm_up(model: Any, prompt: torch.Tensor, job: Job) -> None:
    """Makes the first calls, which set up kernels and thread pools, outside the measured time."""
    cache = _new_cache(model, job)
    config = cache.config if job.cache == DIFFKV else DiffKVConfig()
    window = config.window + config.sinks
    ids = prompt[:, -(window + 16) :]
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=WARM_UP_TOKENS, do_sample=False)


def _held(cache: Any, job: Job) -> dict[str, Any]:
    """Returns the fields of `FinishedRun` about the cache's contents, and draws the plot."""
    if job.cache == DYNAMIC:
        return {"cache_bytes": bytes_of_layers(cache), "payload_bytes": None}
    report = cache.memory()
    note = None
    if job.picture:
        try:
            plot.levels(cache).save(job.picture)
        except ImportError as error:
            note = f"no picture: {error}"
    return {
        "cache_bytes": report.bytes,
        "dense_bytes": report.dense_bytes,
        "payload_bytes": report.payload_bytes,
        "levels": report.tokens,
        "layers": [dataclasses.asdict(layer) for layer in report.layers],
        "config": cache.config.to_dict(),
        "note": note,
    }


def bytes_of_layers(cache: DynamicCache) -> int:
    """Returns the bytes of all layers, linear ones included."""
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


class _TimedStreamer(TextStreamer):
    """Streamer that notes the arrival time of each token, and prints the text or a progress bar.

    `generate()` passes each token on the host, so the times include the device's work.
    """

    def __init__(self, tokenizer: Any, job: Job) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.printing, self.echo, self.ends = job.stream, job.echo, True
        total = len(job.turns) * job.max_new_tokens
        hidden = True if job.stream or job.quiet else None
        self.bar = tqdm(total=total, unit="token", desc=job.cache, leave=False, disable=hidden)
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
            self.bar.update(1)
        super().put(value)

    def say(self, text: str) -> None:
        """Prints the user's text."""
        if self.echo:
            self.write(text)
        elif not self.ends:
            self.write("\n")

    def write(self, text: str) -> None:
        if self.printing and text:
            self.ends = text.endswith("\n")
            print(text, end="", flush=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)

    def close(self) -> None:
        if not self.ends:
            self.write("\n")
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
    job = Job(**json.loads(Path(job_path).read_text()))
    # as in `cli.main`
    sys.stdout.reconfigure(errors="backslashreplace")
    hide_progress_bars(job.quiet)
    getLogger(HINTS).disabled = job.quiet
    try:
        result = dataclasses.asdict(execute(job))
    except BrokenPipeError:
        # the reader of the text has closed the pipe
        os._exit(BROKEN_PIPE)
    except EXPECTED_ERRORS as error:
        result = {"error": one_line(error)}
    try:
        save_text(json.dumps(result), run_path)
    except OSError as error:
        sys.exit(f"the figures of a run cannot be stored: {error}; set TMPDIR to another folder.")


if __name__ == "__main__":
    _main(*sys.argv[1:])
