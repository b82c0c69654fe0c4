"""Keys rounded for the queries that read them, in plain PyTorch.

A logit changes by q . e where a key changes by e, so what counts is not e . e but the mean of (q . e)^2, which is e H e
with H the mean of q q^T. Written as H = M D M^T, with M of ones on the diagonal and zeros above it, and D diagonal, it
is the sum over channels k of D_k (e_k + sum over j > k of M_jk e_j)^2. So channels are rounded one after the other, the
last first, each to the code that is nearest to its element less what the errors of those behind it add (LDLQ of QuIP,
NeurIPS 2023, which is what GPTQ, ICLR 2023, does to weights; here queries take the place of a layer's inputs).

Scales and zero points are those of the element as it is. Codes follow from what comes out: it holds the least and the
largest element of every group as they were, and elsewhere what its codes decode to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...pages import TierLayout
from ..backend import compute_dtype
from ..quantize.reference import scale_and_zero_of

# H gets this share of its mean diagonal, so that directions no query has yet pointed to count as well
DAMPING = 0.1
# with more a key is near enough
LARGEST_BITS = 6


@dataclass(frozen=True, eq=False)
class ModelFeedback:
    """What `feedback_of` gives for each head of a model, whatever a request asks, and which of these heads some rows
    have.

    Attributes:
        matrix: bfloat16 [model_layers, model_heads, dim, dim], contiguous; shared by all that reads it.
        layer, head: int64 [layers] and [heads], which of them rows have that are [layers, batch, heads].

    Raises:
        ValueError: a matrix of another form.
    """

    matrix: Tensor
    layer: Tensor
    head: Tensor

    def __post_init__(self) -> None:
        matrix = self.matrix
        square = matrix.ndim == 4 and matrix.shape[2] == matrix.shape[3] and matrix.is_contiguous()
        if not square or matrix.dtype != torch.bfloat16:
            raise ValueError(
                f"matrix must be contiguous bfloat16 [layers, heads, dim, dim], not {matrix.dtype} "
                f"{list(matrix.shape)}."
            )

    @property
    def matrices(self) -> Tensor:
        """Those of all heads, [model_layers * model_heads, dim, dim]."""
        return self.matrix.flatten(0, 1)

    def of_rows(self, rows: int) -> Tensor:
        """Which of `matrices` each of so many rows has, int64 [rows]."""
        place = self.layer[:, None] * self.matrix.shape[1] + self.head
        batch = rows // place.numel()
        return place[:, None].expand(-1, batch, -1).reshape(-1)


def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """What keys are to be quantised as.

    Args:
        key: [n, dim] as the store holds them.
        row: int64 [n], of the request and head that each belongs to.
        feedback: [rows, dim, dim] from `feedback_of`, or `ModelFeedback.matrices`.
        tier: the format they are to be stored in, of at most `LARGEST_BITS`.

    Returns:
        [n, dim] in the dtype of the computation.
    """
    dtype = compute_dtype(key.dtype)
    groups, levels = tier.k_groups, 2**tier.k_bits - 1
    grouped = key.float().unflatten(-1, (groups, -1))
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    step, zero = scale_and_zero_of(low, high, tier.k_bits, tier.key_metadata)
    step, zero, low, high = (part.to(dtype).expand_as(grouped).flatten(1) for part in (step, zero, low, high))
    # a scale of 0 has code 0 alone
    top = torch.where(step == 0, 0.0, levels)
    step = torch.where(step == 0, 1.0, step)
    exact = key.float().to(dtype)
    least, most = (((end - zero) / step).round().clamp(min=0).minimum(top) for end in (low, high))
    # the ends of the range have one code
    is_low, is_high = exact == low, exact == high
    most, least = torch.where(is_low, least, most), torch.where(is_high & ~is_low, most, least)
    # of what the codes decode to
    error, decoded = torch.zeros_like(exact), torch.empty_like(exact)
    for channel in reversed(range(exact.shape[1])):
        x, behind = exact[:, channel], slice(channel + 1, None)
        target = x - (error[:, behind] * feedback[row, channel, behind]).sum(1)
        code = ((target - zero[:, channel]) / step[:, channel]).round()
        code = torch.clamp(code, least[:, channel], most[:, channel])
        decoded[:, channel] = zero[:, channel] + code * step[:, channel]
        error[:, channel] = decoded[:, channel] - x
    return torch.where(is_low | is_high, exact, torch.clamp(decoded, low, high))
