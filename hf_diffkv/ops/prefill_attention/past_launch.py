"""Launchers of the prompt kernels that read what is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..backend import device_of
from ..quantize.launch import TRITON_DTYPES, dot_dtype
from .columns import past_scores
from .past import StoredPast
from .past_kernel import past_forward
from .tiles import past_constants, past_dot, past_tile, strides

# programs that fill a large device a few times over
MANY_PROGRAMS = 1024
PROGRAMS_PER_PROCESSOR = 4
# a split is at least so long
MIN_SPLIT_TOKENS = 512
MAX_SPLITS = 64


@dataclass(frozen=True)
class Partials:
    """Softmax states of all queries after each split of what is stored.

    Attributes:
        output: float32 [splits, batch * kv_heads, Q * group, value_dim].
        peak, total: float32 [splits, batch * kv_heads, Q * group].
    """

    output: Tensor
    peak: Tensor
    total: Tensor

    @property
    def splits(self) -> int:
        return self.output.shape[0]


def past_state(past: StoredPast, common: dict[str, object], target: str) -> Partials:
    """Attends what is stored from all queries.

    Args:
        common: arguments shared with the other launches; query [batch, query_heads, Q, key_dim].
        target: of the device, see `ops/backend.py`.
    """
    query, group = common["query"], common["group"]
    batch, query_heads, length, _ = query.shape
    kv_heads, value_dim = query_heads // group, past.window_value.shape[-1]
    tile = past_tile(target, query.dtype, past.layout)
    blocks = triton.cdiv(length * group, tile.block_m)
    splits = choose_splits(blocks * batch * kv_heads, past.tokens, device_of(query.device).processors)

    def buffer(*shape: int) -> Tensor:
        rows = batch * kv_heads, length * group
        return torch.empty(splits, *rows, *shape, dtype=torch.float32, device=query.device)

    partials = Partials(buffer(value_dim), buffer(), buffer())
    # converted here, since the kernel would hold what it converts in registers
    query = query.to(past_dot(past.layout, query.dtype))
    common = common | {"query": query} | strides("query", query)
    past_forward[(blocks, splits, batch * kv_heads)](
        window_value=past.window_value,
        partial_output=partials.output,
        partial_peak=partials.peak,
        partial_total=partials.total,
        kv_heads=kv_heads,
        **common,
        **_stored(past),
        **past_constants(past.layout, query.dtype, target),
        **tile.options(),
    )
    return partials


def score_past(past: StoredPast, common: dict[str, object], target: str) -> None:
    """Adds to `received` what the stored tokens get; `common` as above, with the tile of `column_scores`."""
    query, group = common["query"], common["group"]
    batch, query_heads = query.shape[:2]
    # each level ends in a block of its own
    blocks = triton.cdiv(past.tokens, common["BLOCK_N"]) + 2
    heads = heads_per_program(blocks * batch * common["kv_heads"], group)
    constants = past_constants(past.layout, query.dtype, target)
    constants["DOT"] = dot_dtype(query.dtype, target)
    names = ("HIGH", "LOW", "KEY_WIDTH", "KEY_PARTS", "DOT", "MODE")
    past_scores[(blocks, query_heads // heads, batch)](
        heads=heads, **common, **_stored(past), **{name: constants[name] for name in names}
    )


def heads_per_program(programs: int, group: int) -> int:
    """Query heads a scoring program walks: its whole group, loading keys once, where that leaves enough programs."""
    return group if programs >= MANY_PROGRAMS else 1


def choose_splits(programs: int, tokens: int, processors: int) -> int:
    """Splits of what is stored that fill a device of so many processors, none of them short."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, programs)
    return max(1, min(wanted, tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


def check_past(past: StoredPast, query: Tensor, kv_heads: int, value_dim: int) -> None:
    """Raises `ValueError` for a past the kernels cannot read in place."""
    batch, _, _, key_dim = query.shape
    heads, slots, dtype = (batch, kv_heads), past.window_key.shape[2], past.window_key.dtype
    if dtype not in TRITON_DTYPES:
        raise ValueError(f"past.window_key must be one of {list(TRITON_DTYPES)}, not {dtype}.")
    stored_dims = past.layout.high.key_dim, past.layout.high.value_dim
    if stored_dims != (key_dim, value_dim):
        raise ValueError(f"past has head dimensions {stored_dims}, the new tokens {(key_dim, value_dim)}.")
    expected = {
        "pages": (torch.uint8, (past.pages.shape[0], past.layout.page_bytes)),
        "page_table": (torch.int32, (*heads, past.page_table.shape[-1])),
        "high_count": (torch.int32, heads),
        "low_count": (torch.int32, heads),
        "window_key": (dtype, (*heads, slots, key_dim)),
        "window_value": (dtype, (*heads, slots, value_dim)),
        "window_start": (torch.int64, (batch,)),
        "length": (torch.int64, (batch,)),
    }
    if past.sink_end is not None:
        expected["sink_end"] = (torch.int64, (batch,))
    for name, (dtype, shape) in expected.items():
        tensor = getattr(past, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"past.{name} must be contiguous {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}."
            )
        if tensor.device != query.device:
            raise ValueError(f"past.{name} is on {tensor.device}, the query on {query.device}.")


def _stored(past: StoredPast) -> dict[str, object]:
    return {
        "pages": past.pages,
        "page_table": past.page_table,
        "high_count": past.high_count,
        "low_count": past.low_count,
        "window_key": past.window_key,
        "window_start": past.window_start,
        "past_length": past.length,
        "sink_end": past.sink_end,
        "table_width": past.page_table.shape[-1],
        "slots": past.window_key.shape[2],
        "sink_slots": past.sink_slots,
    }
