"""Launchers of the kernels that round keys."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...pages import TierLayout
from ..backend import device_of, launch, unit_stride
from ..quantize.launch import NUM_WARPS, TILE_ELEMENTS, TRITON_DTYPES, dot_dtype
from . import moments
from .kernels import feedback_kernel, moment_kernel, round_keys_kernel
from .reference import DAMPING

# largest matrix that a program holds in registers, and the warps for it
LARGEST_DIM, MOMENT_WARPS, FEEDBACK_WARPS = 128, 8, 16
# queries per product, and products per program
MOMENT_TOKENS, MOMENT_STEPS = 64, 32


def second_moment(query: Tensor, heads: int, valid: Tensor | None = None) -> Tensor:
    """Returns `moments.second_moment` in float32, in two launches; leaves wider heads and float64 to PyTorch."""
    batch, query_heads, tokens, dim = query.shape
    if query.dtype not in TRITON_DTYPES or dim > LARGEST_DIM:
        return moments.second_moment(query, heads, valid)
    query, group = unit_stride(query), query_heads // heads
    valid = None if valid is None else valid.contiguous().view(torch.uint8)
    parts = triton.cdiv(group * tokens, MOMENT_TOKENS * MOMENT_STEPS)
    moment = torch.empty(batch * heads, parts, dim, dim, dtype=torch.float32, device=query.device)
    given = {"query": query, "valid": valid, "moment": moment}
    given |= {"heads": heads, "group": group, "tokens": tokens, "parts": parts}
    given |= dict(zip(("query_batch", "query_head", "query_token"), query.stride()))
    constants = {
        "DIM": dim,
        "WIDTH": triton.next_power_of_2(max(dim, 16)),
        "OPERAND": dot_dtype(query.dtype, device_of(query.device).target),
        "BLOCK": MOMENT_TOKENS,
        "STEPS": MOMENT_STEPS,
    }
    launch(moment_kernel, (batch * heads, parts), query.device, given, **constants, num_warps=MOMENT_WARPS)
    return moment.sum(1)


def feedback_of(moment: Tensor, matrix: Tensor | None = None) -> Tensor:
    """Returns `moments.feedback_of` in one launch after the rotation; leaves wider heads and float64 to PyTorch."""
    if moment.dtype != torch.float32 or moment.shape[1] > LARGEST_DIM:
        return moments.feedback_of(moment, matrix)
    if matrix is not None:
        moment = matrix.mT @ moment @ matrix
    moment = moment.contiguous()
    feedback = torch.empty_like(moment)
    rows, dim, _ = moment.shape
    given = {"moment": moment, "feedback": feedback}
    constants = {"DAMPING": DAMPING, "DIM": dim, "WIDTH": triton.next_power_of_2(dim), "num_warps": FEEDBACK_WARPS}
    launch(feedback_kernel, (rows,), moment.device, given, **constants)
    return feedback


def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """Rounds keys as `reference.round_keys` does, in float32 and in one launch."""
    count, dim = key.shape
    if dim != tier.key_dim or key.dtype not in TRITON_DTYPES or feedback.shape[1:] != (dim, dim):
        raise ValueError(
            f"key {key.dtype} {tuple(key.shape)} and feedback {tuple(feedback.shape)} must be [n, {tier.key_dim}] of "
            f"{list(TRITON_DTYPES)} and [rows, {tier.key_dim}, {tier.key_dim}]."
        )
    key = unit_stride(key)
    rounded = torch.empty(count, dim, dtype=torch.float32, device=key.device)
    width = triton.next_power_of_2(dim)
    block = max(1, TILE_ELEMENTS // width)
    given = {"key": key, "row": row.contiguous(), "feedback": feedback.float().contiguous(), "rounded": rounded}
    given |= {"count": count, "key_stride": key.stride(0)}
    constants = {"TIER": tier, "WIDTH": width, "BLOCK": block}
    launch(round_keys_kernel, (triton.cdiv(count, block),), key.device, given, **constants, num_warps=NUM_WARPS)
    return rounded
