"""Ops as a store chooses them (`ops_for`), for tests without a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_diffkv.ops.table import ops_for, ops_for_rows
from hf_diffkv.pages import TierLayout


def _for_rows(name: str) -> Callable[..., Any]:
    """Returns an op whose first argument is `LayerRows`."""
    return lambda rows, *args, **options: getattr(ops_for_rows(rows), name)(rows, *args, **options)


def _for_tensor(name: str) -> Callable[..., Any]:
    """Returns an op that does not depend on tiers, whose first argument is a tensor."""
    return lambda tensor, *args, **options: getattr(ops_for(tensor.device, tensor.dtype), name)(
        tensor, *args, **options
    )


append_token, compact_windows = map(_for_rows, ("append_token", "compact_windows"))
prefill_attention, rotate = _for_tensor("prefill_attention"), _for_tensor("rotate")
second_moment, feedback_of = _for_tensor("second_moment"), _for_tensor("feedback_of")


def store_tokens(pages: Tensor, tier: TierLayout, *args: Any) -> None:
    ops_for(pages.device, args[-1], tier).store_tokens(pages, tier, *args)


def load_tokens(pages: Tensor, tier: TierLayout, *args: Any) -> tuple[Tensor, Tensor]:
    return ops_for(pages.device, args[-1], tier).load_tokens(pages, tier, *args)


def move_tokens(pages: Tensor, tier: TierLayout, *args: Any) -> None:
    ops_for(pages.device, args[-1], tier).move_tokens(pages, tier, *args[:-1])
