"""Measures the time per generated token of several caches, in turn so that other load affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_diffkv.compat import passing
from hf_diffkv.evaluation.errors import unknown
from hf_diffkv.evaluation.methods import ELSEWHERE
from hf_diffkv.evaluation.session import Session

from .methods import METHODS, Method, get_method
from .methods.transformers_caches import STATIC, StaticMethod

# first steps, which set up kernels and thread pools
WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """Times of one cache.

    Attributes:
        name: label of the method.
        prompt_seconds: seconds for the whole prompt, in one forward.
        ms_per_token: median of the steps.
        ms_quartiles: first and third quartile of the steps.
        bytes: memory of the cache after the prompt.
    """

    name: str
    prompt_seconds: float
    ms_per_token: float
    ms_quartiles: tuple[float, float]
    bytes: int


def timed_method(name: str, tokens: int) -> Method:
    """Makes the method `name`, or `static`, for `tokens` tokens. Raises `EvaluationError` if there is none."""
    if name == STATIC:
        return StaticMethod(tokens)
    family = name.partition(":")[0]
    if family not in (*METHODS.names(), *ELSEWHERE):
        raise unknown("cache", family, [STATIC, *METHODS.names()])
    return get_method(name)


def time_steps(
    model: Any,
    methods: Sequence[Method],
    ids: Sequence[int],
    steps: int,
    report: Callable[[str], None] = lambda message: None,
) -> list[Timing]:
    """Times every method on the same prompt and the tokens after it.

    Args:
        model: loaded model.
        methods: methods to time.
        ids: token ids of the prompt, then of `WARM_UP + steps` tokens.
        steps: number of timed steps.
        report: function that gets progress messages.
    """
    prompt, rest = list(ids[: -WARM_UP - steps]), list(ids[-WARM_UP - steps :])
    sessions, prompt_seconds, held = [], [], []
    for method in methods:
        report(f"{method.label}: reading {len(prompt):,} tokens")
        session = Session(model, method)
        prompt_seconds.append(_timed(session, prompt))
        sessions.append(session)
        held.append(session.held().bytes)
    report(f"{steps} steps of each, in turn")
    seconds: list[list[float]] = [[] for _ in methods]
    for token in rest:
        for session, times in zip(sessions, seconds):
            times.append(_timed(session, [token]))
    found = []
    for method, prompt_time, size, times in zip(methods, prompt_seconds, held, seconds):
        times = [1e3 * second for second in times[WARM_UP:]]
        first, _, third = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        found.append(Timing(method.label, prompt_time, statistics.median(times), (first, third), size))
    return found


@torch.no_grad()
def _timed(session: Session, ids: list[int]) -> float:
    """Returns the seconds of one forward, without switching the attention implementation."""
    device = session.model.device
    arguments = {
        "input_ids": torch.tensor([ids], device=device),
        "position_ids": torch.arange(session.seen, session.seen + len(ids), device=device)[None],
    }
    with session.method.attached(session.model, session.cache):
        _wait(device)
        started = time.perf_counter()
        session.model(**arguments, **passing(session.cache), use_cache=True, logits_to_keep=1)
        _wait(device)
        taken = time.perf_counter() - started
    session.ids += ids
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
