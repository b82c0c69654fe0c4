"""Binding to the native library: loads it, calls it, and mirrors the structs of `abi.h`, where they are documented."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ..pages import LayerRows, PageLayout, TierLayout
from ..pages.inset import FULL_RANGE
from .path import PATH

INSTRUCTIONS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")
MAX_DIM = 512
_ERRORS = {
    1: "an entry of the page table is not a page of the pool",
    2: "a row counts more tokens than its page table has room for",
}
_logger = logging.getLogger("hf_diffkv")
MAX_TIERS = 4
ABI_VERSION = 8
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """Returns ctypes fields in the given order: each keyword is a type, its value a string of names."""
    types = {"pointer": _pointer, "int": _int, "long": _long, "float": _float}
    return [(name, types[kind.rstrip("0123456789")]) for kind, names in kinds.items() for name in names.split()]


class Side(ctypes.Structure):
    _fields_ = _fields(int="bits groups dim row offset metadata_offset metadata_bytes", float="parts shrinkage")


class Tier(ctypes.Structure):
    _fields_ = [
        *(("key", Side), ("value", Side)),
        *_fields(int="capacity score_offset position_offset score_bytes position_bytes"),
    ]


class Format(ctypes.Structure):
    _fields_ = [*_fields(long="page_bytes", int="dtype tiers"), ("tier", Tier * MAX_TIERS)]


class Rows(ctypes.Structure):
    _fields_ = [
        *_fields(pointer="pages", long="page_count", pointer2="table"),
        ("count", _pointer * MAX_TIERS),
        *_fields(long="width"),
    ]


class StepBlock(ctypes.Structure):
    """Decode step with one new token per request; `Step` in abi.h."""

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
            int="fold hold threads rotate absorbed",
        ),
    ]


class Compaction(ctypes.Structure):
    _fields_ = [
        ("format", Format),
        ("rows", Rows),
        *_fields(
            long="row_count heads slots sink_slots window",
            pointer="key value score position length high_threshold low_threshold ring state flag",
            pointer2="feedback layer head",
            long2="layer_rows model_heads threads",
        ),
    ]


class Transfer(ctypes.Structure):
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
    _fields_ = [
        ("side", Side),
        *_fields(pointer="key row feedback rounded", long="count key_stride rows", int="source threads"),
    ]


class Strided(ctypes.Structure):
    _fields_ = _fields(pointer="data", long="batch head token")


class Prompt(ctypes.Structure):
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
    """Returns the number that `diffkv_abi` of a matching library returns."""
    number = ABI_VERSION
    for struct in (StepBlock, Compaction, Transfer, Prompt, Rounding):
        number = number * 31 + ctypes.sizeof(struct)
    return number


@cache
def format_of(layout: PageLayout, dtype: torch.dtype) -> Format:
    """Returns the format of pages that hold keys and values of `dtype`; argument blocks copy it."""
    tiers = (layout.high, layout.low)
    return Format(layout.page_bytes, DTYPES[dtype], len(tiers), (Tier * MAX_TIERS)(*map(_tier, tiers)))


def format_of_tier(tier: TierLayout, dtype: torch.dtype) -> Format:
    """Returns the page format for calls that access only one tier."""
    return Format(tier.page_bytes, DTYPES[dtype], 1, (Tier * MAX_TIERS)(_tier(tier)))


def side_of(tier: TierLayout, name: str) -> Side:
    """Returns the part of a tier for keys or values; `name` is "key" or "value"."""
    numbers = (f"{name[0]}_bits", f"{name[0]}_groups", f"{name}_dim", f"{name}_row")
    numbers += (f"{name}_offset", f"{name}_metadata_offset", f"{name}_metadata")
    return Side(*(getattr(tier, number) for number in numbers), *(tier.value_inset if name == "value" else FULL_RANGE))


def _tier(tier: TierLayout) -> Tier:
    numbers = (tier.score_offset, tier.position_offset, tier.score_bytes, tier.position_bytes)
    return Tier(side_of(tier, "key"), side_of(tier, "value"), tier.capacity, *numbers)


def step_block(rows: LayerRows) -> StepBlock:
    """Creates the argument block of a layer's rows for native code.

    The block stays valid while the tensors stay in place. The address of the pages, which move when their pool grows,
    must be updated.
    """
    block = StepBlock(format=format_of(rows.layout, rows.dtype), batch=rows.batch, heads=rows.heads, slots=rows.slots)
    set_rows(block, rows)
    block.window_key, block.window_value = address(rows.window_key), address(rows.window_value)
    block.window_score, block.window_start = address(rows.window_score), address(rows.window_start)
    block.length, block.sink_end, block.sink_slots = address(rows.length), address(rows.sink_end), rows.sink_slots
    block.invalid = address(rows.invalid)
    return block


def unit_stride(x: Tensor) -> Tensor:
    """Returns `x`, copied if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def set_token(block: StepBlock, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Sets the token that the block appends.

    Args:
        key, value: [batch, heads, dim] or [batch, heads, 1, dim].

    Returns:
        Tensors that must be kept alive until the block has run.
    """
    key, value = unit_stride(key), unit_stride(value)
    block.key, block.value = key.data_ptr(), value.data_ptr()
    block.key_batch, block.key_head = key.stride()[:2]
    block.value_batch, block.value_head = value.stride()[:2]
    return key, value


def set_rows(block: StepBlock | Compaction, rows: LayerRows) -> None:
    """Sets the addresses of pages, page table and counts."""
    pages = rows.pages
    block.rows.pages, block.rows.page_count = address(pages), pages.shape[0]
    block.rows.table, block.rows.width = address(rows.page_table), rows.width
    block.rows.count[0], block.rows.count[1] = map(address, rows.counts)


class CorruptMemoryError(RuntimeError):
    """Raised for an impossible page table entry or count; nothing was read through it, and nothing has changed."""


@cache
def library() -> ctypes.CDLL | None:
    """Loads the library; returns None if there is none for this build of the package, and logs that once."""
    reason = "was not built because the package was installed without a C++ compiler"
    if PATH.is_file():
        try:
            found = ctypes.CDLL(str(PATH))
            found.diffkv_abi.restype = ctypes.c_int64
            if found.diffkv_abi() == abi():
                return _declare(found)
            reason = "is from another build of the package"
        except (OSError, AttributeError) as error:
            reason = f"cannot be loaded ({error})"
    _logger.warning(
        "the native code for CPUs %s; caches on CPUs run in PyTorch, which is slower. Reinstall the package with a "
        "C++ compiler (g++ or clang++).",
        reason,
    )
    return None


def _declare(found: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("step", "compact", "store", "load", "prompt", "round"):
        function = getattr(found, f"diffkv_{name}")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    found.diffkv_instructions.restype = ctypes.c_char_p
    found.diffkv_select.restype, found.diffkv_select.argtypes = ctypes.c_int64, [ctypes.c_char_p]
    return found


def fits(dtype: torch.dtype, *tiers: TierLayout) -> bool:
    """Returns whether native code supports keys and values of `dtype` in pages of `tiers`."""
    if dtype not in DTYPES or any(max(tier.key_dim, tier.value_dim) > MAX_DIM for tier in tiers):
        return False
    return library() is not None


def instructions() -> str | None:
    """Returns the instruction set in use; None without a library."""
    found = library()
    return None if found is None else found.diffkv_instructions().decode()


@contextmanager
def use_instructions(name: str) -> Iterator[None]:
    """Runs native code with one of `INSTRUCTIONS` inside the `with` block, for tests and comparisons.

    Raises:
        ValueError: this processor, or the compiler that built the library, does not support them.
    """
    found, previous = library(), instructions()
    if found is None or not found.diffkv_select(name.encode()):
        raise ValueError(f"instructions {name!r} are not available here.")
    try:
        yield
    finally:
        found.diffkv_select(previous.encode())


def call(name: str, block: ctypes.Structure) -> None:
    """Calls the library's function `diffkv_<name>`.

    Raises:
        CorruptMemoryError: a page table entry or a count is impossible.
        MemoryError: the buffers cannot be allocated.
    """
    status = getattr(library(), f"diffkv_{name}")(ctypes.addressof(block))
    if status in _ERRORS:
        raise CorruptMemoryError(
            f"{_ERRORS[status]}: the cache's memory was overwritten, or the call was given tensors that do not belong "
            "together. Call cache.reset() and start over."
        )
    if status:
        raise MemoryError("there is no memory for the buffers of an attention step.")


def address(tensor: Tensor | None) -> int | None:
    """Returns the address of a tensor's elements; None for None."""
    return None if tensor is None else tensor.data_ptr()
