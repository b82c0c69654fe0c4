"""Stores for tests, with layers of one shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import KVHeads, PromptAttention, StepAttention, Store, begin_forward, move_rows, prepare_rows


def new_store(config: DiffKVConfig, layers: int, batch: int, *heads: object, **sizes: object) -> Store:
    """Returns a store. `heads` are fields of `KVHeads`; dtype and device default to float32 on a CPU."""
    rest = (torch.float32, torch.device("cpu"))[len(heads) - 3 :]
    return Store(config, layers, batch, KVHeads(*heads, *rest), **sizes)


def begin(store: Store, tokens: int, valid: Tensor | None = None) -> None:
    """Begins a forward of new tokens, some of which may be padding."""
    begin_forward(store, tokens)
    store.padding.append(tokens, valid)


def attend_prompt(
    store: Store,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Stores several new tokens and returns their output."""
    return PromptAttention(store, layer, key, value, valid, mask).attend(query, softmax)


def attend_step(
    store: Store,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    valid: Tensor | None = None,
) -> Tensor:
    """Stores the newest token of every request and returns its output."""
    return StepAttention(store, layer, key, value, valid).attend(query, softmax)


def attend(store: Store, layer: int, states: Iterable[Tensor], softmax: Softmax, valid: Tensor | None = None) -> Tensor:
    """Attends with query, key and value: as a step for one token after others, else as a prompt or turn."""
    query, key, value = states
    if query.shape[2] == 1 and store.seen > 1:
        return attend_step(store, layer, query, key, value, softmax, None if valid is None else valid[:, 0])
    return attend_prompt(store, layer, query, key, value, softmax, valid)


def select_rows(store: Store, index: Tensor) -> None:
    """Request i becomes the former request index[i]."""
    prepare_rows(store, index)
    move_rows(store, index)
