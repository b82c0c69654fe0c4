"""Stored tokens of several rows, written and read back by hand (`hand_pages`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hand_pages import HandStore
from torch import Tensor

from hf_diffkv.config import Precision
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import HIGH, LOW, EarlierTokens, PageLayout

K8V4, K4V2 = Precision(8, 4), Precision(4, 2)


def hand_past(
    high_tokens: list[list[int]],
    low_tokens: list[list[int]],
    window: list[int],
    *,
    high: Precision = K8V4,
    low: Precision = K4V2,
    key_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    slots: int = 24,
    seed: int = 0,
    **numbers: int,
) -> tuple[EarlierTokens, Tensor, Tensor, Tensor]:
    """A past with this many tokens ([batch][kv_heads], window [batch]) on scattered pages, and its keys and values.

    Everything that holds no token is poisoned: 0xFF in pages, NaN in windows.

    Returns:
        The past, then decoded keys and values float64 [batch, kv_heads, P, dim] by rank, NaN after a row's last, and
        bool [batch, kv_heads, P].
    """
    rng = np.random.default_rng(seed)
    value_dim = value_dim or key_dim
    batch, heads = len(window), len(high_tokens[0])
    layout = PageLayout.build(high, low, key_dim, value_dim, dtype.itemsize, **numbers)
    counts = (sum(high_tokens, []), sum(low_tokens, []))
    store = HandStore(layout, *counts, dtype, seed)
    start = 5 + 7 * torch.arange(batch)
    length = start + torch.tensor(window)
    shape = (batch, heads, slots)
    window_key = torch.full((*shape, key_dim), math.nan, dtype=dtype)
    window_value = torch.full((*shape, value_dim), math.nan, dtype=dtype)
    longest = max(a + b + window[row // heads] for row, (a, b) in enumerate(zip(*counts)))
    key = torch.full((batch, heads, longest, key_dim), math.nan, dtype=torch.float64)
    value = torch.full((batch, heads, longest, value_dim), math.nan, dtype=torch.float64)
    valid = torch.zeros(batch, heads, longest, dtype=torch.bool)

    def draw(dim: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(dim)).to(dtype)

    for row in range(batch * heads):
        request, head = divmod(row, heads)
        rank = 0
        for tier in (HIGH, LOW):
            for index in range(counts[tier][row]):
                store.write(tier, row, index, draw(key_dim), draw(value_dim), 1.0, index)
                stored = store.read(tier, row, index)
                key[request, head, rank], value[request, head, rank] = map(torch.from_numpy, stored[:2])
                rank += 1
        for token in range(int(start[request]), int(length[request])):
            k, v = draw(key_dim), draw(value_dim)
            window_key[request, head, token % slots], window_value[request, head, token % slots] = k, v
            key[request, head, rank], value[request, head, rank] = k.double(), v.double()
            rank += 1
        valid[request, head, :rank] = True
    rows = store.rows(heads, window_key, window_value, window_start=start, length=length)
    return EarlierTokens(rows, longest), key, value, valid


def attend_prompt(
    op: Callable[..., tuple[Tensor, Tensor | None]],
    *states: Tensor,
    scaling: float,
    past: EarlierTokens | None = None,
    significance: bool = True,
    observation_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls `prefill_attention` with options that `dense` of test_prefill_attention_reference.py also takes.

    Args:
        states: query, key, value.
        options: options of `Softmax` and of the op, and `past_key`, `past_value`, `past_valid` of exact tokens after
            the past.
    """
    softmax = Softmax(scaling, *(options.pop(name, None) for name in ("softcap", "sinks")))
    exact = {name: options.pop(f"past_{name}", None) for name in ("key", "value", "valid")}
    past = replace(EarlierTokens() if past is None else past, **exact)
    return op(*states, softmax, past=past, observed=observation_window if significance else 0, **options)
