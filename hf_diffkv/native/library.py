"""Loads the native library where it was built, and calls it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ..pages import TierLayout
from . import structs
from .path import PATH

INSTRUCTIONS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")
MAX_DIM = 512
_ERRORS = {
    1: "an entry of the page table is no page of the pool",
    2: "a row counts more tokens than its page table has room for",
}
_logger = logging.getLogger("hf_diffkv")


class CorruptMemoryError(RuntimeError):
    """Page table or counts that cannot be; nothing was read from there, and nothing has changed."""


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None where there is none for this build of the package, which is logged once."""
    reason = "was not built, as the package was installed without a C++ compiler"
    if PATH.is_file():
        try:
            found = ctypes.CDLL(str(PATH))
            found.diffkv_abi.restype = ctypes.c_int64
            if found.diffkv_abi() == structs.abi():
                return _declare(found)
            reason = "is of another build of the package"
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
    """Whether there is native code for keys and values of `dtype`, stored as `tiers` say."""
    if dtype not in structs.DTYPES or any(max(tier.key_dim, tier.value_dim) > MAX_DIM for tier in tiers):
        return False
    return library() is not None


def instructions() -> str | None:
    """The instruction set that runs; None without a library."""
    found = library()
    return None if found is None else found.diffkv_instructions().decode()


@contextmanager
def use_instructions(name: str) -> Iterator[None]:
    """Runs native code with one of `INSTRUCTIONS` within the block, for tests and comparisons.

    Raises:
        ValueError: this processor, or the compiler that built the library, does not have them.
    """
    found, previous = library(), instructions()
    if found is None or not found.diffkv_select(name.encode()):
        raise ValueError(f"instructions {name!r} are not available here.")
    try:
        yield
    finally:
        found.diffkv_select(previous.encode())


def call(name: str, block: ctypes.Structure) -> None:
    """Calls `diffkv_<name>`.

    Raises:
        CorruptMemoryError: page table or counts that cannot be.
        MemoryError: there is no memory for buffers.
    """
    check(getattr(library(), f"diffkv_{name}")(ctypes.addressof(block)))


def check(status: int) -> None:
    """Raises what a call's result says, see `call`."""
    if status == 0:
        return
    if status in _ERRORS:
        raise CorruptMemoryError(
            f"{_ERRORS[status]}: the cache's memory was overwritten, or the call was given tensors that do not belong "
            "together. Call cache.reset() and start over."
        )
    raise MemoryError("there is no memory for the buffers of an attention step.")


def with_rows(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor, or a copy of it, with the elements of its last dim side by side; and its strides."""
    strides = tensor.stride()
    if strides[-1] == 1:
        return tensor, strides
    tensor = tensor.contiguous()
    return tensor, tensor.stride()


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's elements are."""
    return None if tensor is None else tensor.data_ptr()
