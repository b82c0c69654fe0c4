"""Rounding of keys for the queries that read them, in plain PyTorch.

If a key changes by e, a logit changes by q . e. The error to minimise is therefore not e . e but the mean of
(q . e)^2, which is e H e, where H is the mean of q q^T. With H = M D M^T, where M has ones on the diagonal and zeros
above it and D is diagonal, it equals the sum over channels k of D_k (e_k + sum over j > k of M_jk e_j)^2. Channels are
therefore rounded one by one, from last to first, each to the code nearest to its element minus the errors fed back from
later channels. This is LDLQ from QuIP (NeurIPS 2023), which GPTQ (ICLR 2023) applies to weights; here queries take the
place of a layer's inputs.

Scales and zero points are those of the unrounded key. The result keeps the smallest and the largest element of every
group unchanged and has decoded codes elsewhere, so quantising it yields these codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...pages import TierLayout
from ...pages.rows import compute_dtype
from ..quantize.reference import scale_and_zero_of

# share of H's mean diagonal added to it, so that directions without queries count too
DAMPING = 0.1
# keys with more bits are precise enough without it
LARGEST_BITS = 6


@dataclass(frozen=True, eq=False)
class ModelFeedback:
    """Feedback matrices of a model's heads, independent of the request, and the heads that some rows belong to.

    Attributes:
        matrix: result of `feedback_of` for each head, contiguous bfloat16 [model_layers, model_heads, dim, dim]; shared
            by all readers.
        layer, head: model index of the layers, int64 [layers], and of the heads, int64 [heads], of rows
            [layers, batch, heads].

    Raises:
        ValueError: the matrix has the wrong shape or dtype, or is not contiguous.
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
        """Matrices of all heads, [model_layers * model_heads, dim, dim]."""
        return self.matrix.flatten(0, 1)

    def of_rows(self, rows: int) -> Tensor:
        """Returns the index into `matrices` of each of `rows` rows, int64 [rows]."""
        place = self.layer[:, None] * self.matrix.shape[1] + self.head
        batch = rows // place.numel()
        return place[:, None].expand(-1, batch, -1).reshape(-1)


def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """Rounds keys for quantisation.

    Args:
        key: keys in the store's form, [n, dim].
        row: row (request and head) of each key, int64 [n].
        feedback: result of `feedback_of`, [rows, dim, dim], or `ModelFeedback.matrices`.
        tier: layout that the keys will be stored in, of at most `LARGEST_BITS` bits.

    Returns:
        Keys to quantise, [n, dim] in the compute dtype.
    """
    dtype = compute_dtype(key.dtype)
    groups, levels = tier.k_groups, 2**tier.k_bits - 1
    grouped = key.float().unflatten(-1, (groups, -1))
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    step, zero = scale_and_zero_of(low, high, tier.k_bits, tier.key_metadata)
    step, zero, low, high = (part.to(dtype).expand_as(grouped).flatten(1) for part in (step, zero, low, high))
    # a scale of 0 has the single code 0
    top = torch.where(step == 0, 0.0, levels)
    step = torch.where(step == 0, 1.0, step)
    exact = key.float().to(dtype)
    least, most = (((end - zero) / step).round().clamp(min=0).minimum(top) for end in (low, high))
    # the ends of the range have one possible code
    is_low, is_high = exact == low, exact == high
    most, least = torch.where(is_low, least, most), torch.where(is_high & ~is_low, most, least)
    # error of the decoded codes
    error, decoded = torch.zeros_like(exact), torch.empty_like(exact)
    for channel in reversed(range(exact.shape[1])):
        x, behind = exact[:, channel], slice(channel + 1, None)
        target = x - (error[:, behind] * feedback[row, channel, behind]).sum(1)
        code = ((target - zero[:, channel]) / step[:, channel]).round()
        code = torch.clamp(code, least[:, channel], most[:, channel])
        decoded[:, channel] = zero[:, channel] + code * step[:, channel]
        error[:, channel] = decoded[:, channel] - x
    return torch.where(is_low | is_high, exact, torch.clamp(decoded, low, high))
