"""The structs of `abi.h`, field for field."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ..pages import PageLayout, TierLayout

MAX_TIERS = 4
ABI_VERSION = 6
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """Fields by type, each a string of names, in the order given."""
    types = {"pointer": _pointer, "int": _int, "long": _long, "float": _float}
    return [(name, types[kind.rstrip("0123456789")]) for kind, names in kinds.items() for name in names.split()]


class Side(ctypes.Structure):
    """Keys or values of one tier."""

    _fields_ = _fields(int="bits groups dim row offset metadata_offset metadata_bytes")


class Tier(ctypes.Structure):
    _fields_ = [
        *(("key", Side), ("value", Side)),
        *_fields(int="capacity score_offset position_offset score_bytes position_bytes"),
    ]


class Format(ctypes.Structure):
    """A `PageLayout` and the model's dtype."""

    _fields_ = [*_fields(long="page_bytes", int="dtype tiers"), ("tier", Tier * MAX_TIERS)]


class Rows(ctypes.Structure):
    """Pages, table and counts."""

    _fields_ = [
        *_fields(pointer="pages", long="page_count", pointer2="table"),
        ("count", _pointer * MAX_TIERS),
        *_fields(long="width"),
    ]


class Step(ctypes.Structure):
    """One new token per request."""

    _fields_ = [
        ("format", Format),
        ("rows", Rows),
        *_fields(
            pointer="window_key window_value window_score window_start length sink_end",
            long="batch heads group slots sink_slots",
            pointer2="key value",
            long2="key_batch key_head value_batch value_head",
            pointer3="key_offset invalid valid query",
            long3="query_batch query_head",
            pointer4="output sinks received",
            long4="received_stride",
            float="limit scaling softcap",
            int="fold hold exact threads rotate",
        ),
    ]


class Compaction(ctypes.Structure):
    """A round of compaction."""

    _fields_ = [
        ("format", Format),
        ("rows", Rows),
        *_fields(
            long="row_count heads slots sink_slots window",
            pointer="key value score position length leaving high_threshold low_threshold ring state flag advance",
            pointer2="feedback layer head",
            long2="layer_rows model_heads threads",
        ),
    ]


class Transfer(ctypes.Structure):
    """Tokens by page and slot."""

    _fields_ = [
        ("format", Format),
        *_fields(
            pointer="pages",
            long="page_count count",
            pointer2="page slot to_page to_slot key value",
            long2="key_stride value_stride",
            pointer3="score position",
            int="source threads",
        ),
    ]


class Rounding(ctypes.Structure):
    """Keys to be rounded."""

    _fields_ = [
        ("side", Side),
        *_fields(pointer="key row feedback rounded", long="count key_stride rows", int="source threads"),
    ]


class Strided(ctypes.Structure):
    """[batch, heads, tokens, dim]."""

    _fields_ = _fields(pointer="data", long="batch head token")


class Prompt(ctypes.Structure):
    """Many new tokens per request."""

    _fields_ = [
        *_fields(pointer="stored", long="batch heads group length before stored_tokens key_dim value_dim"),
        *((name, Strided) for name in ("query", "key", "value", "past_key", "past_value")),
        *_fields(
            pointer="past_valid valid mask",
            long="mask_batch",
            pointer2="sinks output received",
            long2="observed",
            float="scaling softcap",
            int="dtype threads",
        ),
    ]


def abi() -> int:
    """What `diffkv_abi` returns of a library built from these structs."""
    number = ABI_VERSION
    for struct in (Step, Compaction, Transfer, Prompt, Rounding):
        number = number * 31 + ctypes.sizeof(struct)
    return number


@cache
def format_of(layout: PageLayout, dtype: torch.dtype) -> Format:
    """The format of pages that hold keys and values of `dtype`; blocks take copies of it."""
    tiers = (layout.high, layout.low)
    return Format(layout.page_bytes, DTYPES[dtype], len(tiers), (Tier * MAX_TIERS)(*map(_tier, tiers)))


def format_of_tier(tier: TierLayout, dtype: torch.dtype) -> Format:
    """The same where only tokens of one tier are looked at."""
    return Format(tier.page_bytes, DTYPES[dtype], 1, (Tier * MAX_TIERS)(_tier(tier)))


def side_of_keys(tier: TierLayout) -> Side:
    """The keys' part of a tier."""
    return Side(
        *(tier.k_bits, tier.k_groups, tier.key_dim, tier.key_row),
        *(tier.key_offset, tier.key_metadata_offset, tier.key_metadata),
    )


def _tier(tier: TierLayout) -> Tier:
    value = Side(
        *(tier.v_bits, tier.v_groups, tier.value_dim, tier.value_row),
        *(tier.value_offset, tier.value_metadata_offset, tier.value_metadata),
    )
    numbers = (tier.score_offset, tier.position_offset, tier.score_bytes, tier.position_bytes)
    return Tier(side_of_keys(tier), value, tier.capacity, *numbers)
