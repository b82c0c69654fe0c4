"""Triton kernel that rotates tokens in one launch. Tiles are [tokens, planes, WIDTH], as in `quantize/kernels.py`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rotation
from .backend import device_of, unit_stride
from .quantize.kernels import stored_bits, tile_dims
from .quantize.launch import NUM_WARPS, TILE_ELEMENTS, TRITON_DTYPES, dot_dtype

# channels multiplied at a time
INNER = 32
# wider tiles need twice the warps, or they would spill kilobytes
WIDEST_OF_FEW_WARPS = 256
# from this size up, a program would read a megabyte of signs for its few tokens
MATRIX_PRODUCT_DIM = 512


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Returns float32 `x` rounded to the model's dtype."""
    bits = stored_bits(x, DTYPE)
    if DTYPE == tl.bfloat16:
        out = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        out = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        out = x
    return out


@triton.jit
def rotated_tile(rows, active, matrix, inner_stride, column_stride, ROOT: tl.constexpr, DIM: tl.constexpr,
                 BITS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, OPERAND: tl.constexpr):  # fmt: skip
    """Rotates tokens; returns a float32 tile and each token's sum of squares, float32 [tokens].

    Args:
        rows: pointers to the tokens, [tokens].
        matrix: float32 [DIM, DIM] with entries -1 / ROOT, 0 and 1 / ROOT, with the given strides.
        OPERAND: dtype in which signs and elements are multiplied; it must hold both exactly.
    """
    dim, exists = tile_dims(DIM, BITS, WIDTH)
    PLANES: tl.constexpr = dim.shape[1]
    column = tl.reshape(dim, (PLANES * WIDTH,))
    there = tl.reshape(exists, (PLANES * WIDTH,))
    product = tl.zeros((rows.shape[0], PLANES * WIDTH), tl.float32)
    squares = tl.zeros((rows.shape[0],), tl.float32)
    for first in tl.static_range(0, DIM, INNER):
        lane = first + tl.arange(0, INNER)
        raw = tl.load(rows[:, None] + lane[None, :], mask=active[:, None] & (lane < DIM)[None, :], other=0.0)
        raw = raw.to(tl.float32)
        squares += tl.sum(raw * raw, 1)
        pointer = matrix + lane[:, None] * inner_stride + column[None, :] * column_stride
        signs = tl.load(pointer, mask=(lane < DIM)[:, None] & there[None, :], other=0.0) * ROOT
        product = tl.dot(raw.to(OPERAND), signs.to(OPERAND), product, input_precision="ieee")
    return tl.reshape(product * (1.0 / ROOT), (rows.shape[0], PLANES, WIDTH)), squares


@triton.jit(
    do_not_specialize=[
        *("heads", "tokens", "inner_stride", "column_stride"),
        *("batch_stride", "head_stride", "token_stride"),
    ]
)
def rotate_kernel(
    tensor, matrix, offset, output, heads, tokens, inner_stride, column_stride, batch_stride, head_stride, token_stride,
    ROOT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, DTYPE: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates BLOCK tokens of one head. Grid: (cdiv(tokens, BLOCK), heads, batch).

    Args:
        tensor: [batch, heads, tokens, DIM], with the given strides.
        output: contiguous [batch, heads, tokens, DIM].
        offset: offset to subtract, float32 [batch * heads, DIM], or None.
    """
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = batch * heads + head
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    rows = tensor + batch * batch_stride + head * head_stride + token.to(tl.int64) * token_stride
    x, _ = rotated_tile(rows, there, matrix, inner_stride, column_stride, ROOT, DIM, 16, WIDTH, INNER, OPERAND)
    dim, exists = tile_dims(DIM, 16, WIDTH)
    if offset is not None:
        x -= tl.load(offset + row * DIM + dim, mask=exists, other=0.0)
    bits = stored_bits(x, DTYPE)
    pointer = output.to(tl.pointer_type(bits.dtype)) + (row * tokens + token)[:, None, None] * DIM + dim
    tl.store(pointer, bits, mask=there[:, None, None] & exists)


def rotate(tensor: Tensor, matrix: Tensor | None, offset: Tensor | None = None) -> Tensor:
    """Rotates as `rotation.rotate` does, in one launch; leaves float64, and offsets without a matrix, to PyTorch."""
    if matrix is None or tensor.dtype == torch.float64:
        return rotation.rotate(tensor, matrix, offset)
    batch, heads, tokens, dim = tensor.shape
    if dim >= MATRIX_PRODUCT_DIM and offset is None and tensor.dtype != torch.float32:
        return _multiply(tensor, transposed=matrix.stride(0) < matrix.stride(1))
    output = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if output.numel() == 0:
        return output
    tensor, block = unit_stride(tensor), block_tokens(dim)
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        rotate_kernel[(triton.cdiv(tokens, block), heads, batch)](
            tensor,
            matrix,
            None if offset is None else offset.contiguous(),
            output,
            heads,
            tokens,
            *matrix.stride(),
            *tensor.stride()[:3],
            ROOT=root(dim),
            DIM=dim,
            WIDTH=triton.next_power_of_2(dim),
            INNER=INNER,
            DTYPE=TRITON_DTYPES[tensor.dtype],
            OPERAND=dot_dtype(tensor.dtype, device_of(tensor.device).target),
            BLOCK=block,
            num_warps=NUM_WARPS if dim <= WIDEST_OF_FEW_WARPS else 2 * NUM_WARPS,
        )
    return output


def _multiply(tensor: Tensor, transposed: bool) -> Tensor:
    """Rotates by a matrix product with signs, which 16-bit numbers hold exactly, and rounds once."""
    dim = tensor.shape[-1]
    signs = _signs(dim, tensor.dtype, tensor.device)
    signs = signs.mT if transposed else signs
    rows = tensor.reshape(-1, dim)
    return torch.addmm(rows.new_zeros(dim), rows, signs, beta=0, alpha=1 / root(dim)).view(tensor.shape)


@cache
@torch.inference_mode(False)
def _signs(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `rotation_matrix` times `root`, whose elements are -1, 0 and 1."""
    return (rotation.rotation_matrix(dim, torch.float64, device) * root(dim)).round().to(dtype)


def block_tokens(widest: int) -> int:
    """Returns the tokens per tile of `widest` channels: enough for matrix products, few enough for registers."""
    return max(16, min(64, TILE_ELEMENTS // triton.next_power_of_2(widest)))


def root(dim: int) -> float:
    """Returns the factor that turns a rotation's entries into signs; see `ops/rotation.py`."""
    return float(dim & -dim) ** 0.5
