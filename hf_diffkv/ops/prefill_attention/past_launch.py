"""Launchers of the prompt kernels that read what is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..backend import device_of
from ..quantize.launch import TRITON_DTYPES, dot_dtype
from .columns import past_scores
from .past_kernel import past_forward
from .tiles import past_constants, past_dot, past_tile, strides

# programs that fill a large device a few times over
MANY_PROGRAMS = 1024
PROGRAMS_PER_PROCESSOR = 4
# a split is at least so long
MIN_SPLIT_TOKENS = 512
MAX_PAST_SPLITS = 64


@dataclass(frozen=True)
class PastStates:
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


def past_state(rows: LayerRows, longest: int, common: dict[str, object], target: str) -> PastStates:
    """Attends what is stored from all queries.

    Args:
        longest: tokens of the longest row.
        common: arguments shared with the other launches; query [batch, query_heads, Q, key_dim].
        target: of the device, see `ops/backend.py`.
    """
    query, group = common["query"], common["group"]
    batch, _, length, _ = query.shape
    kv_heads, value_dim = rows.heads, rows.layout.high.value_dim
    tile = past_tile(target, query.dtype, rows.layout)
    blocks = triton.cdiv(length * group, tile.block_m)
    splits = choose_splits(blocks * batch * kv_heads, longest, device_of(query.device).processors)

    def buffer(*shape: int) -> Tensor:
        return torch.empty(splits, batch * kv_heads, length * group, *shape, dtype=torch.float32, device=query.device)

    partials = PastStates(buffer(value_dim), buffer(), buffer())
    # converted here, since the kernel would hold what it converts in registers
    query = query.to(past_dot(rows.layout, query.dtype))
    common = common | {"query": query} | strides("query", query)
    past_forward[(blocks, splits, batch * kv_heads)](
        window_value=rows.window_value,
        partial_output=partials.output,
        partial_peak=partials.peak,
        partial_total=partials.total,
        kv_heads=kv_heads,
        **common,
        **_stored(rows),
        **past_constants(rows.layout, query.dtype, target),
        **tile.options(),
    )
    return partials


def score_past(rows: LayerRows, longest: int, common: dict[str, object], target: str) -> None:
    """Adds to `received` what the stored tokens get; `common` as above, with the tile of `column_scores`."""
    query, group = common["query"], common["group"]
    batch, query_heads = query.shape[:2]
    # each level ends in a block of its own
    blocks = triton.cdiv(longest, common["BLOCK_N"]) + 2
    heads = heads_per_program(blocks * batch * common["kv_heads"], group)
    constants = past_constants(rows.layout, query.dtype, target)
    constants["DOT"] = dot_dtype(query.dtype, target)
    names = ("HIGH", "LOW", "KEY_WIDTH", "KEY_PARTS", "DOT", "MODE")
    past_scores[(blocks, query_heads // heads, batch)](
        heads=heads, **common, **_stored(rows), **{name: constants[name] for name in names}
    )


def heads_per_program(programs: int, group: int) -> int:
    """Query heads a scoring program walks: its whole group, loading keys once, where that leaves enough programs."""
    return group if programs >= MANY_PROGRAMS else 1


def choose_splits(programs: int, tokens: int, processors: int) -> int:
    """Splits of what is stored that fill a device of so many processors, none of them short."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, programs)
    return max(1, min(wanted, tokens // MIN_SPLIT_TOKENS, MAX_PAST_SPLITS))


def check_past(rows: LayerRows, query: Tensor, kv_heads: int, value_dim: int) -> None:
    """Raises `ValueError` for stored tokens that these queries cannot attend to."""
    if rows.dtype not in TRITON_DTYPES:
        raise ValueError(f"window_key must be one of {list(TRITON_DTYPES)}, not {rows.dtype}.")
    stored, needed = (rows.batch, rows.heads), (query.shape[0], kv_heads)
    if stored != needed:
        raise ValueError(f"what is stored has (requests, KV heads) {stored}, the new tokens have {needed}.")
    stored, needed = (rows.layout.high.key_dim, rows.layout.high.value_dim), (query.shape[-1], value_dim)
    if stored != needed:
        raise ValueError(f"what is stored has head dimensions {stored}, the new tokens have {needed}.")
    if rows.device != query.device:
        raise ValueError(f"what is stored is on {rows.device}, the query on {query.device}.")


def _stored(rows: LayerRows) -> dict[str, object]:
    return {
        "pages": rows.pages,
        "page_table": rows.page_table,
        "high_count": rows.high_count,
        "low_count": rows.low_count,
        "window_key": rows.window_key,
        "window_start": rows.window_start,
        "past_length": rows.length,
        "sink_end": rows.sink_end,
        "table_width": rows.width,
        "slots": rows.slots,
        "sink_slots": rows.sink_slots,
    }
