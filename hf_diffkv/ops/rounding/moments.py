"""Second moments of queries, and the feedback that rounds keys for them, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...pages.rows import compute_dtype
from ..rotation import tokens_at_once
from .reference import DAMPING


def second_moment(query: Tensor, heads: int, valid: Tensor | None = None) -> Tensor:
    """Returns the sum of q q^T over the queries of a forward.

    Args:
        query: query states of the model, [batch, query_heads, tokens, dim].
        heads: number of KV heads; consecutive query heads share one.
        valid: True for queries that count, bool [batch, tokens]; None if all do.

    Returns:
        Second moment, [batch * heads, dim, dim] in the compute dtype.
    """
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


def feedback_of(moment: Tensor, matrix: Tensor | None = None) -> Tensor:
    """Returns the feedback matrix M^T of every row, [rows, dim, dim], with ones on the diagonal (`reference.py`).

    Args:
        moment: result of `second_moment`, [rows, dim, dim].
        matrix: rotation of keys and queries (`rotate`), [dim, dim] of the same dtype; None for unrotated keys.
    """
    if matrix is not None:
        moment = matrix.mT @ moment @ matrix
    mean = moment.diagonal(dim1=1, dim2=2).mean(1)
    identity = torch.eye(moment.shape[1], dtype=moment.dtype, device=moment.device)
    # without queries, there is no feedback
    damped = moment + torch.where(mean > 0, DAMPING * mean, 1.0)[:, None, None] * identity
    factor, failed = torch.linalg.cholesky_ex(damped)
    factor = (factor / factor.diagonal(dim1=1, dim2=2)[:, None]).mT
    return torch.where((failed == 0)[:, None, None], factor, identity).contiguous()
