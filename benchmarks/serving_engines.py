"""Trace and engines of the serving benchmark, with Transformers' pages and compressed pages of equal bytes."""

from __future__ import annotations

import copy
import math
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints

from hf_diffkv import DiffKVConfig

# tokens per page of Transformers' cache: small, so that little of it is wasted; the default is 256
PAGE_TOKENS = 32
PAGED = "Transformers, paged"
NAMES = (PAGED, "DiffKV, default", "DiffKV, 22 %")
# standard deviation of log-normal lengths
SIGMA = 0.35
PATIENCE = 900


@dataclass(frozen=True)
class Request:
    """A request that arrives `at` seconds after the first, with `ids` as prompt, and generates `new_tokens` tokens."""

    at: float
    ids: list[int]
    new_tokens: int


def trace(
    vocabulary: int, requests: int, prompt: tuple[int, int], answer: tuple[int, int], gap: float
) -> list[Request]:
    """Draws chat-like requests, with exponential gaps and log-normal lengths.

    The same arguments give the same requests.

    Args:
        vocabulary: number of ids from which random tokens are drawn.
        prompt, answer: shortest and median length in tokens; the longest is twice the median.
        gap: mean seconds between two arrivals.
    """
    rng = random.Random(0)

    def length(shortest: int, median: int) -> int:
        return min(max(round(median * math.exp(rng.gauss(0, SIGMA))), shortest), 2 * median)

    made, at = [], 0.0
    for _ in range(requests):
        ids = [rng.randrange(3, vocabulary) for _ in range(length(*prompt))]
        made.append(Request(at, ids, length(*answer)))
        at += rng.expovariate(1 / gap)
    return made


def dense_bytes(model: PreTrainedModel) -> int:
    """Bytes per token in a cache of the model's dtype."""
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * config.head_dim * model.dtype.itemsize


def configuration(model: PreTrainedModel, name: str) -> DiffKVConfig:
    """Returns the configuration for one of `NAMES`, except the first, which has none."""
    ratio = {"target_ratio": 0.22} if name == NAMES[2] else {}
    return DiffKVConfig.for_model(model, **ratio)


def manager(model: PreTrainedModel, name: str, max_bytes: int, longest: int, max_batch_tokens: int) -> Any:
    """Returns an unstarted Transformers manager that uses the cache `name`, one of `NAMES`.

    Args:
        max_bytes: bytes for the whole cache: pages, and for DiffKV also windows, tables and scratch memory.
        longest: tokens of the longest request.
    """
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = ContinuousBatchingConfig(max_batch_tokens=max_batch_tokens, max_requests_per_batch=64)
    if name == PAGED:
        # two of its blocks are never handed out
        blocks = max_bytes // (PAGE_TOKENS * dense_bytes(model)) - 2
        options.page_size, options.num_blocks = PAGE_TOKENS, blocks
    else:
        generation.cache_implementation = "diffkv"
        generation.cache_config = {**configuration(model, name).to_dict(), "max_bytes": max_bytes}
    hints = WorkloadHints(max_prompt_length=longest - 1, max_generated_length=1)
    return model.init_continuous_batching(generation, options, hints)


def held_bytes(running: Any) -> int:
    """Returns the peak bytes of a running manager's cache."""
    if hasattr(running, "memory"):
        return running.memory().peak_bytes
    return running.batch_processor.cache.cache_tensor.nbytes


def run(running: Any, requests: list[Request]) -> dict[str, Any]:
    """Sends `requests` to a manager at their times, and waits for all answers.

    Returns:
        The maximum and mean number of requests that held memory during a forward, tokens generated per second from the
        first arrival to the last answer, that time, the processor time, and bytes.

    Raises:
        RuntimeError: a request failed or did not finish.
    """
    in_flight: list[tuple[float, int]] = []
    step = running._generation_step

    def counted() -> None:
        began = time.perf_counter()
        step()
        in_flight.append((time.perf_counter() - began, len(running.batch_processor.scheduler.active_requests)))

    running._generation_step = counted
    running.start()
    try:
        started, left, answers = time.perf_counter(), list(requests), []
        worked = time.process_time()
        while len(answers) < len(requests):
            passed = time.perf_counter() - started
            while left and left[0].at <= passed:
                request = left.pop(0)
                running.add_request(request.ids, max_new_tokens=request.new_tokens)
            answer = running.get_result(timeout=0.02)
            if answer is not None:
                if answer.error is not None:
                    raise RuntimeError(answer.error)
                answers.append(answer)
            if passed > PATIENCE or not running.is_running():
                raise RuntimeError(f"{len(requests) - len(answers)} requests did not come to their end.")
        seconds = max(answer.lifespan[1] for answer in answers) - started
        worked = time.process_time() - worked
        size = held_bytes(running)
    finally:
        running.stop()
    wall = sum(taken for taken, _ in in_flight)
    return {
        "most": max(count for _, count in in_flight),
        "mean": sum(taken * count for taken, count in in_flight) / wall,
        "tokens_per_second": sum(len(answer.generated_tokens) for answer in answers) / seconds,
        "seconds": seconds,
        "processor_seconds": worked,
        "bytes": size,
    }


def first_token(running: Any, ids: list[int]) -> float:
    """Seconds from adding a request to its first token, after a short request has warmed up a manager."""
    running.start()
    try:
        seconds = 0.0
        for prompt in (ids[:64], ids):
            began = time.perf_counter()
            running.add_request(prompt, max_new_tokens=1)
            answer = running.get_result(timeout=PATIENCE)
            seconds = time.perf_counter() - began
            if answer is None or answer.error is not None:
                raise RuntimeError("no first token" if answer is None else answer.error)
    finally:
        running.stop()
    return seconds


@torch.no_grad()
def check_lossless(model: PreTrainedModel) -> None:
    """Exits unless an engine with a lossless cache produces the same text as `generate()`, in float32."""
    exact = copy.deepcopy(model).float()
    prompts = [request.ids for request in trace(model.config.vocab_size, 3, (20, 60), (1, 1), 1.0)]
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=8)
    expected = [exact.generate(torch.tensor([ids]), config)[0, len(ids) :].tolist() for ids in prompts]
    config.cache_implementation = "diffkv"
    config.cache_config = {**DiffKVConfig.lossless().to_dict(), "max_bytes": 4 * 200 * dense_bytes(exact)}
    outputs = exact.generate_batch(prompts, config, ContinuousBatchingConfig(max_batch_tokens=64))
    if [output.generated_tokens for output in outputs.values()] != expected:
        raise SystemExit("a lossless cache does not say what generate() says; nothing is timed.")
