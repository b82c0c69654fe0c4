"""What the ahead-of-time report compiles of the prompt attention kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton.language as tl

from ...config import Precision
from ...memory import PageLayout
from ..variant import TARGETS, KernelVariant
from .columns import column_scores, past_scores
from .kernels import flash_forward, row_extents
from .past_kernel import past_forward
from .tiles import (
    TRITON_DTYPES,
    Tile,
    column_tile,
    dot_dtype,
    extent_block,
    forward_tile,
    padded,
    past_constants,
    past_dot,
    past_tile,
)

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# optional arguments by what asks for them; {} stands for the type of the inputs
FORWARD_FEATURES = {
    "padding": {"valid": "*u8", "extents": "*i32"},
    "past": {"past_key": "*{}", "past_value": "*{}", "past_valid": "*u8", "past_extents": "*i32"},
    "stored": {"partial_output": "*fp32", "partial_peak": "*fp32", "partial_total": "*fp32"},
    "mask": {"allowed": "*u8"},
    "sinks": {"sinks": "*{}"},
    "softcap": {"cap": "fp32"},
}
COLUMN_FEATURES = {
    "padding": {"key_valid": "*u8", "extents": "*i32"},
    "past": {"key_valid": "*u8", "key_extents": "*i32"},
    "mask": {"allowed": "*u8"},
    "softcap": {"cap": "fp32"},
    "window": {"window": "i32"},
}
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
# where a past is read; the other arguments are by kernel
STORED_TYPES = {
    **dict.fromkeys(("high_count", "low_count", "page_table", "extents"), "*i32"),
    **dict.fromkeys(("window_start", "past_length", "sink_end"), "*i64"),
    **dict.fromkeys(("partial_output", "partial_peak", "partial_total", "lse", "received"), "*fp32"),
    **dict.fromkeys(("scale", "cap"), "fp32"),
    "pages": "*u8",
}


def variants() -> list[KernelVariant]:
    """Every kernel with the tiles of every target, for the common types and features."""
    found = [
        KernelVariant(
            name="row_extents",
            kernel=row_extents,
            signature={"valid": "*u8", "extents": "*i32", "behind": "*i32", "length": "i32", "window": "i32"},
            constexprs={"WINDOW": True, "BLOCK": extent_block(4096)},
            num_warps=4,
        )
    ]
    for target in TARGETS:
        for dtype, dim, features in SHIPPED:
            if "window" not in features:
                found.append(_forward(target, dtype, dim, features))
            if "stored" not in features:
                found.append(_columns(target, dtype, dim, features))
        for (name, high, low), dtype, dim, features in STORED:
            layout = PageLayout.build(high, low, dim, dim, dtype.itemsize)
            for variant in (_past_forward, _past_scores):
                found.append(variant(target, name, layout, dtype, features))
    for (name, high, low), dtype, dim, features in STORED:
        # what has tiles of its own there
        layout = PageLayout.build(high, low, dim, dim, dtype.itemsize)
        found.append(_past_forward("sm_100", name, layout, dtype, features))
    return found


def _forward(target: str, dtype: torch.dtype, dim: int, features: Iterable[str]) -> KernelVariant:
    name = NAMES[dtype]
    signature = dict.fromkeys(("query", "key", "value", "output"), f"*{name}") | {"lse": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(("length", "past_length", "splits", "group"), "i32")
    strides = [f"{x}_{axis}" for x in ("query", "key", "value", "output") for axis in ("batch", "head", "token")]
    signature |= dict.fromkeys((*strides, "allowed_batch", "allowed_query"), "i32")
    optional, absent = _options(FORWARD_FEATURES, features, name)
    tile = forward_tile(target, dtype, dim, dim, masked="mask" in features)
    return KernelVariant(
        name="-".join(("flash_forward", name, f"d{dim}", *features, target)),
        kernel=flash_forward,
        signature=signature | optional,
        constexprs=absent | _constants(tile, dtype, dim) | {"VALUE_DIM": dim, "VALUE_WIDTH": padded(dim)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(target,),
    )


def _columns(target: str, dtype: torch.dtype, dim: int, features: Iterable[str]) -> KernelVariant:
    name = NAMES[dtype]
    signature = dict.fromkeys(("query", "key"), f"*{name}") | {"lse": "*fp32", "received": "*fp32", "scale": "fp32"}
    lengths = ("length", "key_length", "received_offset", "received_length", "group", "heads", "kv_heads")
    strides = [f"{x}_{axis}" for x in ("query", "key") for axis in ("batch", "head", "token")]
    signature |= dict.fromkeys((*lengths, *strides, "allowed_batch", "allowed_query"), "i32")
    optional, absent = _options(COLUMN_FEATURES, features, name)
    if "past" in features:
        # the mask is among the new tokens only
        optional.pop("allowed", None)
        absent["allowed"] = None
    absent["behind"] = None
    if {"padding", "window"} <= set(features):
        optional["behind"] = "*i32"
        del absent["behind"]
    tile = column_tile(target, dtype, dim)
    return KernelVariant(
        name="-".join(("column_scores", name, f"d{dim}", *features, target)),
        kernel=column_scores,
        signature=signature | optional,
        constexprs=absent | _constants(tile, dtype, dim) | {"PAST": "past" in features, "WINDOW": "window" in features},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(target,),
    )


def _past_forward(
    target: str, name: str, layout: PageLayout, dtype: torch.dtype, features: Iterable[str]
) -> KernelVariant:
    tile = past_tile(target, dtype, layout)
    constants = past_constants(layout, dtype, target)
    constants["query"] = NAMES[past_dot(layout, dtype)]
    return _stored("past_forward", past_forward, target, name, layout, dtype, features, tile, constants)


def _past_scores(
    target: str, name: str, layout: PageLayout, dtype: torch.dtype, features: Iterable[str]
) -> KernelVariant:
    tile = column_tile(target, dtype, layout.high.key_dim)
    constants = past_constants(layout, dtype, target) | {"DOT": dot_dtype(dtype, target)}
    constants |= {"WINDOW": "window" in features, "query": NAMES[dtype]}
    return _stored("past_scores", past_scores, target, name, layout, dtype, features, tile, constants)


def _stored(
    kernel: str,
    function: Any,
    target: str,
    precisions: str,
    layout: PageLayout,
    dtype: torch.dtype,
    features: Iterable[str],
    tile: Tile,
    constants: dict[str, object],
) -> KernelVariant:
    """A kernel that reads a past: types by argument name, i32 where nothing else is said."""
    name = NAMES[dtype]
    types = STORED_TYPES | dict.fromkeys(("window_key", "window_value"), f"*{name}")
    types["query"] = "*" + constants.pop("query")
    constants = constants | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    constants |= {"extents": None} if "padding" not in features else {}
    constants |= {"cap": None} if "softcap" not in features else {}
    arguments = function.arg_names
    constexprs = {argument: value for argument, value in constants.items() if argument in arguments}
    return KernelVariant(
        name="-".join((kernel, precisions, name, f"d{layout.high.key_dim}", *features, target)),
        kernel=function,
        signature={a: types.get(a, "i32") for a in arguments if a not in constexprs},
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=(target,),
    )


def _options(
    table: dict[str, dict[str, str]], features: Iterable[str], name: str
) -> tuple[dict[str, str], dict[str, None]]:
    """Types of the optional arguments that are there, and None for the others."""
    present = {x: type_.format(name) for feature in features for x, type_ in table.get(feature, {}).items()}
    return present, {x: None for group in table.values() for x in group if x not in present}


def _constants(tile: Tile, dtype: torch.dtype, dim: int) -> dict[str, int | tl.dtype]:
    blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return blocks | {"DOT": TRITON_DTYPES[dtype], "KEY_DIM": dim, "KEY_WIDTH": padded(dim)}
