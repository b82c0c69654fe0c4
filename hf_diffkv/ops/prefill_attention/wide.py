"""Leaves heads that are too wide for the kernels to PyTorch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..backend import KERNELS, is_forced
from ..softmax import Softmax
from . import cpu, launch

# tiles of wider heads would not fit a GPU's registers
KERNEL_HEAD_DIM = 512


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attends from new tokens; arguments and results as in the reference.

    Raises:
        ValueError: heads are too wide, and `use_backend` forces the kernels.
    """
    widest = max(key.shape[-1], value.shape[-1])
    if widest <= KERNEL_HEAD_DIM:
        return launch.prefill_attention(query, key, value, softmax, **options)
    if is_forced(KERNELS):
        raise ValueError(f"the kernels take head dimensions up to {KERNEL_HEAD_DIM}, not {widest}.")
    return cpu.prefill_attention(query, key, value, softmax, **options)
