"""Which implementation an op runs: Triton kernels on a GPU, the PyTorch reference elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

BACKENDS = ("reference", "kernels")
_forced: str | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs every op on one backend within the block, whatever the device; for tests and comparisons.

    Raises:
        ValueError: `name` is not in `BACKENDS`.
    """
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; use one of {BACKENDS}.")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def use_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ops on keys and values of `dtype` on `device` run the Triton kernels."""
    if _forced is not None:
        return _forced == "kernels"
    return device.type == "cuda" and dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
