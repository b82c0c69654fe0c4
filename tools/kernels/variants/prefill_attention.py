"""Variants of the prompt attention kernels for the ahead-of-time report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.prefill_attention.launch import prefill_attention, row_extents_of
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import EarlierTokens, PageLayout
from tools.kernels.record import record
from tools.kernels.rows import given_rows
from tools.kernels.variant import TARGETS, KernelVariant

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# (dtype, head_dim, features)
SHIPPED = (
    (torch.bfloat16, 64, ("padding",)),
    (torch.bfloat16, 80, ("padding",)),
    (torch.bfloat16, 128, ()),
    (torch.bfloat16, 128, ("padding",)),
    (torch.float16, 128, ("padding",)),
    (torch.bfloat16, 128, ("padding", "past")),
    (torch.bfloat16, 128, ("padding", "stored")),
    (torch.bfloat16, 128, ("padding", "mask")),
    (torch.bfloat16, 128, ("padding", "softcap", "sinks")),
    (torch.bfloat16, 128, ("padding", "window")),
    (torch.bfloat16, 256, ("padding",)),
    (torch.bfloat16, 256, ("padding", "past", "mask")),
    (torch.bfloat16, 256, ("padding", "stored", "mask")),
    (torch.bfloat16, 512, ("padding",)),
    (torch.bfloat16, 512, ("padding", "stored")),
    (torch.bfloat16, 512, ("padding", "past", "mask")),
    (torch.bfloat16, 512, ("padding", "stored", "mask")),
    (torch.float32, 128, ("padding",)),
)
K8V4_K4V2 = ("K8V4-K4V2", Precision(8, 4), Precision(4, 2))
# (precisions, dtype, head_dim, features)
STORED = (
    *((K8V4_K4V2, torch.bfloat16, dim, ("padding",)) for dim in (64, 80, 96, 128, 256, 512)),
    (K8V4_K4V2, torch.bfloat16, 128, ()),
    (K8V4_K4V2, torch.bfloat16, 128, ("padding", "softcap")),
    (K8V4_K4V2, torch.bfloat16, 128, ("padding", "window")),
    (K8V4_K4V2, torch.float16, 128, ("padding",)),
    (K8V4_K4V2, torch.float32, 128, ("padding",)),
    (("K8V8", Precision(8, 8), Precision(8, 8)), torch.bfloat16, 128, ("padding",)),
    (("K16V16", Precision(16, 16), Precision(16, 16)), torch.bfloat16, 128, ("padding",)),
    (("K16V16", Precision(16, 16), Precision(16, 16)), torch.bfloat16, 256, ("padding",)),
    (("K16V16", Precision(16, 16), Precision(16, 16)), torch.bfloat16, 512, ("padding",)),
    *((("K6V4-K5V3", Precision(6, 4), Precision(5, 3)), torch.bfloat16, dim, ("padding",)) for dim in (64, 128)),
    (("K4V3-K3V2", Precision(4, 3), Precision(3, 2)), torch.bfloat16, 128, ("padding",)),
    (("K16V8-K2V1", Precision(16, 8), Precision(2, 1)), torch.bfloat16, 128, ("padding",)),
    (("K8V4-K4V2-g4", Precision(8, 4, 4, 4), Precision(4, 2, 4, 4)), torch.bfloat16, 128, ("padding",)),
)
BATCH, KV_HEADS, GROUP, TOKENS, SLOTS, SINK_SLOTS, WIDTH = 2, 2, 2, 32, 16, 4, 8
# padding is examined in pieces, which have this size in all longer prompts
EXTENT_TOKENS = 1024


def variants() -> list[KernelVariant]:
    """Returns every kernel with each target's tiles, for the common types and features."""
    found = record(_extents)
    for target in TARGETS:
        for dtype, dim, features in SHIPPED:
            wanted = ["flash_forward"] * ("window" not in features) + ["column_scores"] * ("stored" not in features)
            suffix = "-".join((NAMES[dtype], f"d{dim}", *features, target))
            layout = PageLayout.build(*K8V4_K4V2[1:], dim, dim, dtype.itemsize) if "stored" in features else None
            found += _first(wanted, suffix, target, dtype, dim, features, layout)
        for stored in STORED:
            found += _stored(("past_forward", "past_scores"), target, *stored)
    for stored in STORED:
        # variants with tiles of their own on this target
        found += _stored(("past_forward",), "sm_100", *stored)
    return found


def _stored(
    wanted: Sequence[str],
    target: str,
    precisions: tuple[str, Precision, Precision],
    dtype: torch.dtype,
    dim: int,
    features: Sequence[str],
) -> list[KernelVariant]:
    name, high, low = precisions
    suffix = "-".join((name, NAMES[dtype], f"d{dim}", *features, target))
    layout = PageLayout.build(high, low, dim, dim, dtype.itemsize)
    return _first(wanted, suffix, target, dtype, dim, features, layout)


def _first(
    wanted: Sequence[str],
    suffix: str,
    target: str,
    dtype: torch.dtype,
    dim: int,
    features: Sequence[str],
    layout: PageLayout | None,
) -> list[KernelVariant]:
    """Returns the first launch of each wanted kernel; for `column_scores` this is the launch over a dense past."""
    recorded = record(_attend, dtype, dim, features, layout, targets=(target,))
    first = {variant.name: variant for variant in reversed(recorded)}
    return [first[name].named(f"{name}-{suffix}") for name in wanted]


def _attend(dtype: torch.dtype, dim: int, features: Sequence[str], layout: PageLayout | None) -> None:
    """Launches a prompt over a past stored in `layout`, if one is given."""
    rows = BATCH, KV_HEADS
    new = torch.empty(*rows, TOKENS, dim, dtype=dtype)
    there = torch.empty(*rows, TOKENS, dtype=torch.bool)
    options = {
        "padding": {"valid": there[:, 0].contiguous()},
        "mask": {"mask": torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)},
        "window": {"observed": SLOTS},
    }
    chosen = {name: value for feature in features for name, value in options.get(feature, {}).items()}
    sinks = torch.empty(KV_HEADS * GROUP, dtype=dtype) if "sinks" in features else None
    softmax = Softmax(1.0, 1.0 if "softcap" in features else None, sinks)
    exact = {"key": new, "value": new, "valid": there} if "past" in features else {}
    past = EarlierTokens(**_stored_rows(layout, dtype), **exact)
    query = torch.empty(BATCH, KV_HEADS * GROUP, TOKENS, dim, dtype=dtype)
    prefill_attention(query, new, new, softmax, past=past, **chosen)


def _stored_rows(layout: PageLayout | None, dtype: torch.dtype) -> dict[str, object]:
    if layout is None:
        return {}
    rows = BATCH, KV_HEADS
    window = torch.empty(*rows, SLOTS, layout.high.key_dim, dtype=dtype)
    table = torch.empty(*rows, WIDTH, dtype=torch.int32)
    held = given_rows(layout, window, window, page_table=table, sink_slots=SINK_SLOTS)
    return {"rows": held, "stored": TOKENS}


def _extents() -> None:
    row_extents_of(torch.empty(BATCH, EXTENT_TOKENS, dtype=torch.uint8), SLOTS)
