"""Rotated keys and values: a Hadamard matrix with random signs spreads what a few channels hold over all of them, so
that few bits do (QuaRot, NeurIPS 2024; KV caches rotated likewise by SAW-INT4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .backend import compute_dtype, use_kernels, without_autocast

# elements at a time of what is computed in float32
FLOAT_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class Rotation:
    """The matrices that keys (and queries) and values are rotated with, contiguous, as `rotate` takes them."""

    key: Tensor
    value: Tensor


@cache
@torch.inference_mode(False)
def rotation_matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Orthonormal [dim, dim]: `x @ matrix` rotates, `y @ matrix.mT` rotates back.

    Sylvester's Hadamard matrices of the largest power of two that divides `dim`, one for each block of so many
    channels, behind a sign for each channel. It is the same everywhere: saved caches depend on it. Made once per
    process and device, for all caches.
    """
    size = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], dim=1), torch.cat([block, -block], dim=1)])
    matrix = torch.block_diag(*[block * size**-0.5] * (dim // size))
    signs = torch.tensor(_signs(dim), dtype=torch.float64, device="cpu")
    return (signs[:, None] * matrix).to(dtype=dtype, device=device)


def _signs(count: int) -> list[float]:
    """The top bits of a linear congruential generator (the constants are Knuth's, MMIX) that starts at 1."""
    state, signs = 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        signs.append(1.0 if state >> 63 else -1.0)
    return signs


@without_autocast
def rotate(tensor: Tensor, matrix: Tensor | None, offset: Tensor | None = None) -> Tensor:
    """tensor @ matrix - offset, rounded once.

    Args:
        tensor: [batch, heads, tokens, dim].
        matrix: a `rotation_matrix` or its transpose, in the dtype of the computation; None leaves channels as they are.
        offset: [batch, heads, dim] likewise; None is zero.
    """
    if matrix is None and offset is None:
        return tensor
    if matrix is not None and tensor.dtype != torch.float64 and use_kernels(tensor.device, tensor.dtype):
        from . import rotation_kernel

        return rotation_kernel.rotate(tensor, matrix, offset)
    if tensor.numel() <= FLOAT_ELEMENTS:
        return _rotate(tensor, matrix, offset)
    step = tokens_at_once(tensor)
    rotated = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for start in range(0, tensor.shape[2], step):
        part = slice(start, start + step)
        rotated[:, :, part] = _rotate(tensor[:, :, part], matrix, offset)
    return rotated


def tokens_at_once(tensor: Tensor) -> int:
    """How many tokens of [batch, heads, tokens, dim] are to be computed with in float32 at a time."""
    return max(1, FLOAT_ELEMENTS // max(1, tensor[:, :, :1].numel()))


def _rotate(tensor: Tensor, matrix: Tensor | None, offset: Tensor | None) -> Tensor:
    rotated = tensor.to(compute_dtype(tensor.dtype))
    if matrix is not None:
        rotated = torch.matmul(rotated, matrix)
    if offset is not None:
        rotated = rotated - offset[:, :, None]
    return rotated.to(tensor.dtype)


@without_autocast
def center_windows(window_key: Tensor, held: Tensor, offset: Tensor, due: Tensor) -> None:
    """Takes the mean off all keys of rows that are in the window as a whole, and adds it to their offset.

    Args:
        window_key: [..., batch, heads, slots, dim], changed in place.
        held: bool [..., batch, slots], where a token stands.
        offset: [..., batch, heads, dim] in the dtype of the computation, changed in place.
        due: bool [..., batch], requests this is for; the others stay as they are.
    """
    keys = window_key.to(offset.dtype)
    mean = keys.masked_fill(~held[..., None, :, None], 0.0).sum(-2) / held.sum(-1).clamp(min=1)[..., None, None]
    mean = torch.where(due[..., None, None], mean, 0.0)
    offset += mean
    window_key.copy_(keys - mean[..., None, :])
