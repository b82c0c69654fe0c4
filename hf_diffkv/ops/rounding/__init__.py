"""Rounding of keys for the queries that will read them, before keys are quantised into pages.

The queries' moments (`second_moment`, `feedback_of`) are computed in plain PyTorch here, or by kernels on supported
GPUs.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...pages import TierLayout
from ..backend import KERNELS, NATIVE, choose, compute_dtype, use_kernels, without_autocast
from ..rotation import tokens_at_once
from . import native, reference
from .reference import DAMPING, LARGEST_BITS, ModelFeedback

__all__ = ["LARGEST_BITS", "ModelFeedback", "feedback_of", "round_keys", "second_moment"]


@without_autocast
def second_moment(query: Tensor, heads: int, valid: Tensor | None = None) -> Tensor:
    """Returns the sum of q q^T over the queries of a forward.

    Args:
        query: query states of the model, [batch, query_heads, tokens, dim].
        heads: number of KV heads; consecutive query heads share one.
        valid: True for queries that count, bool [batch, tokens]; None if all do.

    Returns:
        Second moment, [batch * heads, dim, dim] in the compute dtype.
    """
    launch = _launch(query)
    if launch is not None:
        return launch.second_moment(query, heads, valid)
    dtype = compute_dtype(query.dtype)
    batch, _, tokens, dim = query.shape
    moment = query.new_zeros(batch * heads, dim, dim, dtype=dtype)
    step = tokens_at_once(query)
    for start in range(0, tokens, step):
        part = query[:, :, start : start + step].to(dtype)
        if valid is not None:
            part = part.masked_fill(~valid[:, None, start : start + step, None], 0.0)
        part = part.reshape(batch * heads, -1, dim)
        moment.baddbmm_(part.mT, part)
    return moment


@without_autocast
def feedback_of(moment: Tensor, matrix: Tensor | None = None) -> Tensor:
    """Returns the feedback matrix M^T of every row, [rows, dim, dim], with ones on the diagonal (`reference.py`).

    Args:
        moment: result of `second_moment`, [rows, dim, dim].
        matrix: rotation of keys and queries (`rotate`), [dim, dim] of the same dtype; None for unrotated keys.
    """
    launch = _launch(moment)
    if launch is not None:
        return launch.feedback_of(moment, matrix)
    if matrix is not None:
        moment = matrix.mT @ moment @ matrix
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)
    identity = torch.eye(moment.shape[1], dtype=moment.dtype, device=moment.device)
    # without queries there is no feedback
    damped = moment + torch.where(mean > 0, DAMPING * mean, 1.0)[:, None, None] * identity
    factor, failed = torch.linalg.cholesky_ex(damped)
    factor = (factor / factor.diagonal(dim1=1, dim2=2)[:, None]).mT
    return torch.where((failed == 0)[:, None, None], factor, identity).contiguous()


def _launch(tensor: Tensor) -> ModuleType | None:
    """Returns the kernels' module if it supports such queries or moments, otherwise None."""
    if tensor.dtype == torch.float64 or not use_kernels(tensor.device, tensor.dtype):
        return None
    from . import launch

    return launch if tensor.shape[-1] <= launch.LARGEST_DIM else None


@without_autocast
def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """Rounds keys as `reference.round_keys`; returns keys of tiers with more than `LARGEST_BITS` bits unchanged."""
    if tier.k_bits > LARGEST_BITS or key.shape[0] == 0:
        return key
    backend = choose(key.device, key.dtype, tier)
    if backend == KERNELS:
        from . import launch

        return launch.round_keys(key, row, feedback, tier)
    return (native if backend == NATIVE else reference).round_keys(key, row, feedback, tier)
