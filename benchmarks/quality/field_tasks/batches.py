"""Answers several cases at once, in one cache of left-padded prompts.

A step of a batch takes little longer than a step of a single request, as long as it mostly reads weights. The batch
ends with its longest answer, so cases of similar length should be batched together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hf_diffkv.compat import passing
from hf_diffkv.evaluation.methods import HeldBytes, Method

from .answers import Answer, options_for
from .cases import Case


def batches_of(cases: Iterable[Case], size: int) -> Iterator[list[Case]]:
    """Divides cases into batches of at most `size`, by length; cases with earlier turns stay alone.

    All cases of a batch have the same limit and ends.
    """
    batch: list[Case] = []
    for case in sorted(cases, key=lambda case: (bool(case.earlier), case.limit, case.ends, case.tokens)):
        alike = batch and (batch[0].limit, batch[0].ends) == (case.limit, case.ends)
        if batch and (len(batch) == size or case.earlier or not alike):
            yield batch
            batch = []
        batch.append(case)
    if batch:
        yield batch


@torch.no_grad()
def answer_together(model: Any, method: Method, cases: Sequence[Case], bytes_per_token: int) -> list[Answer]:
    """Answers cases without earlier turns with one call of `generate()`.

    Each answer gets an equal share of the time, of the cache's bytes, and of a dense cache's bytes for the batch.
    """
    longest, end = max(len(case.ids) for case in cases), cases[0].ends[0]
    padding = [longest - len(case.ids) for case in cases]
    ids = torch.tensor([[end] * pad + list(case.ids) for pad, case in zip(padding, cases)], device=model.device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=model.device)
    cache = method.new_cache(model)
    started = time.perf_counter()
    with method.attached(model, cache):
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=cases[0].limit, **passing(cache), **options_for(cases[0].ends)
        )[:, longest:].tolist()
    seconds, held = time.perf_counter() - started, method.held(cache)
    payload = None if held.payload_bytes is None else held.payload_bytes // len(cases)
    share = HeldBytes(held.bytes // len(cases), payload, held.simulated)
    dense = bytes_per_token * cache.get_seq_length()
    return [
        Answer(_until_end(row, case.ends), share, dense, seconds / len(cases), batch=len(cases))
        for row, case in zip(written, cases)
    ]


def _until_end(ids: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids up to and including the first that ends an answer."""
    count = next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[:count])
