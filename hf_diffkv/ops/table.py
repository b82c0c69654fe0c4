"""Table of the ops' implementations.

Each op has an implementation in plain PyTorch, the reference, and may have others: Triton kernels and native code. An
implementation handles everything its backend is chosen for, if necessary through the reference. A backend without its
own implementation uses the reference's, or one composed of other ops. To add an op or a backend, add it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from ..pages import LayerRows, PageLayout, TierLayout
from .backend import KERNELS, NATIVE, REFERENCE, choose, takes_latents, without_autocast


def _of_all(folder: str, op: str) -> dict[str, str]:
    """Returns the places of an op that every backend implements in its own file of a folder."""
    files = {REFERENCE: "reference", NATIVE: "native", KERNELS: "launch"}
    return {backend: f"{folder}.{file}:{op}" for backend, file in files.items()}


# for each op, where its implementations are; modules are imported when their backend is first used
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "append_token": _of_all("append", "append_token"),
    "append_and_attend": {NATIVE: "decode_attention.native:append_and_attend"},
    "compact_windows": _of_all("compact", "compact_windows"),
    "decode_attention": _of_all("decode_attention", "decode_attention"),
    # other backends keep no buffers from step to step
    "allocate_scratch": {KERNELS: "decode_attention.scratch:Scratch.allocate"},
    "prefill_attention": {
        REFERENCE: "prefill_attention.cpu:prefill_attention",
        KERNELS: "prefill_attention.launch:prefill_attention",
    },
    "store_tokens": _of_all("quantize", "store_tokens"),
    "load_tokens": _of_all("quantize", "load_tokens"),
    "move_tokens": _of_all("quantize", "move_tokens"),
    "round_keys": _of_all("rounding", "round_keys"),
    "second_moment": {REFERENCE: "rounding.moments:second_moment", KERNELS: "rounding.launch:second_moment"},
    "feedback_of": {REFERENCE: "rounding.moments:feedback_of", KERNELS: "rounding.launch:feedback_of"},
    "rotate": {REFERENCE: "rotation:rotate", KERNELS: "rotation_kernel:rotate"},
}
# stands in for `append_and_attend` where a backend lacks it; the first argument is the backend's ops
COMPOSED = "decode_attention.reference:append_and_attend"


@dataclass(frozen=True)
class Ops:
    """Implementations of all ops, chosen for one device, dtype and pair of tiers.

    Attributes:
        backend: one of `ops.backend.BACKENDS`.
        guarded: whether they turn autocast off while they run.
        append_token: appends the newest token of every request to its window, rotated (append/reference.py).
        append_and_attend: appends a token and attends from it, both in the model's form
            (decode_attention/reference.py).
        compact_windows: compacts the rows whose windows are overfull (compact/reference.py).
        decode_attention: attends from one new token per request and updates the sums (decode_attention/reference.py).
        allocate_scratch: allocates buffers for `decode_attention` (decode_attention/scratch.py); None if it needs none.
        prefill_attention: attends from several new tokens (prefill_attention/reference.py).
        store_tokens, load_tokens, move_tokens: quantise tokens into pages, read them back and copy them
            (quantize/reference.py).
        round_keys: rounds keys for the queries that read them (rounding/reference.py).
        second_moment, feedback_of: moment of queries, and the feedback that rounds keys for them (rounding/moments.py).
        rotate: rotates channels and subtracts an offset (rotation.py).
    """

    backend: str
    guarded: bool
    append_token: Callable[..., torch.Tensor | None]
    append_and_attend: Callable[..., torch.Tensor]
    compact_windows: Callable[..., None]
    decode_attention: Callable[..., torch.Tensor]
    allocate_scratch: Callable[..., Any] | None
    prefill_attention: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    store_tokens: Callable[..., None]
    load_tokens: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    move_tokens: Callable[..., None]
    round_keys: Callable[..., torch.Tensor]
    second_moment: Callable[..., torch.Tensor]
    feedback_of: Callable[..., torch.Tensor]
    rotate: Callable[..., torch.Tensor]


def ops_for(device: torch.device, dtype: torch.dtype, *tiers: TierLayout) -> Ops:
    """Returns the ops for a model of `dtype` on `device` with pages of `tiers`; `use_backend` overrides the choice.

    Under autocast, they run without it.
    """
    return ops_of(choose(device, dtype, *tiers), torch.is_autocast_enabled(device.type))


def ops_for_rows(rows: LayerRows) -> Ops:
    """Returns the ops for these rows."""
    return ops_for(rows.device, rows.dtype, *rows.tiers)


def latent_ops(ops: Ops, layout: PageLayout) -> Ops:
    """Returns the replacement for `ops` in layers that cache latents (docs/latent.md); prompts use no kernels."""
    if ops.backend != KERNELS:
        return ops
    plain = ops_of(REFERENCE, ops.guarded)
    return replace(ops, prefill_attention=plain.prefill_attention) if takes_latents(layout) else plain


@cache
def ops_of(backend: str, guarded: bool = False) -> Ops:
    """Returns the ops of a backend; `guarded` ones run without autocast."""
    found = {name: _found(places, backend, guarded) for name, places in IMPLEMENTATIONS.items()}
    ops = Ops(backend, guarded, **found)
    if ops.append_and_attend is None:
        ops = replace(ops, append_and_attend=partial(_load(COMPOSED), ops))
    return ops


def _found(places: dict[str, str], backend: str, guarded: bool) -> Any:
    place = places.get(backend, places.get(REFERENCE))
    if place is None:
        return None
    return without_autocast(_load(place)) if guarded else _load(place)


def _load(place: str) -> Any:
    module, name = place.split(":")
    return attrgetter(name)(import_module(f".{module}", __package__))
