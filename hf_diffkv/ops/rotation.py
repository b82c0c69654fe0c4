"""Rotation of keys and values by a Hadamard matrix with random signs.

It spreads outlier channels over all channels, so that few bits suffice (QuaRot, NeurIPS 2024; SAW-INT4 does the
same for KV caches).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..pages.rows import compute_dtype
from .backend import without_autocast

# elements converted to float32 at a time
FLOAT_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class Rotation:
    """Contiguous matrices that rotate keys (and queries) and values, arguments of `rotate`."""

    key: Tensor | None = None
    value: Tensor | None = None


NO_ROTATION = Rotation()


@cache
@torch.inference_mode(False)
def rotation_matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an orthonormal matrix [dim, dim]: `x @ matrix` rotates, `y @ matrix.mT` rotates back.

    It first applies a sign to each channel, then Sylvester's Hadamard matrix to each block of channels; the size of a
    block is the largest power of two that divides `dim`. The matrix must never change, because saved caches depend on
    it. It is created once per process and device, for all caches.
    """
    size = dim & -dim
    block = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], dim=1), torch.cat([block, -block], dim=1)])
    matrix = torch.block_diag(*[block * size**-0.5] * (dim // size))
    signs = torch.tensor(_signs(dim), dtype=torch.float64, device="cpu")
    return (signs[:, None] * matrix).to(dtype=dtype, device=device)


def _signs(count: int) -> list[float]:
    """Returns signs from the top bits of a linear congruential generator (Knuth's MMIX constants) that starts at 1."""
    state, signs = 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        signs.append(1.0 if state >> 63 else -1.0)
    return signs


def rotate(tensor: Tensor, matrix: Tensor | None, offset: Tensor | None = None) -> Tensor:
    """Returns tensor @ matrix - offset, rounded once.

    Args:
        tensor: tensor to rotate, [batch, heads, tokens, dim].
        matrix: `rotation_matrix` or its transpose, in the compute dtype; None leaves the channels unchanged.
        offset: offset to subtract, [batch, heads, dim] in the compute dtype; None subtracts nothing.
    """
    if matrix is None and offset is None:
        return tensor
    if tensor.numel() <= FLOAT_ELEMENTS:
        return _rotate(tensor, matrix, offset)
    step = tokens_at_once(tensor)
    rotated = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for start in range(0, tensor.shape[2], step):
        part = slice(start, start + step)
        rotated[:, :, part] = _rotate(tensor[:, :, part], matrix, offset)
    return rotated


def tokens_at_once(tensor: Tensor) -> int:
    """Returns the number of tokens of [batch, heads, tokens, dim] to convert to float32 at a time."""
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
    """Subtracts the mean key of rows that are entirely in the window from their keys, and adds it to their offset.

    Args:
        window_key: keys of the windows, [..., batch, heads, slots, dim], updated in place.
        held: True for slots that hold a token, bool [..., batch, slots].
        offset: offsets of the keys, [..., batch, heads, dim] in the compute dtype, updated in place.
        due: True for requests to centre, bool [..., batch]; the others do not change.
    """
    keys = window_key.to(offset.dtype)
    mean = keys.masked_fill(~held[..., None, :, None], 0.0).sum(-2) / held.sum(-1).clamp(min=1)[..., None, None]
    mean = torch.where(due[..., None, None], mean, 0.0)
    offset += mean
    window_key.copy_(keys - mean[..., None, :])
