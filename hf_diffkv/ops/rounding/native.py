"""Rounds keys in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.library import DTYPES, Rounding, address, call, side_of, unit_stride
from ...pages import TierLayout


def round_keys(key: Tensor, row: Tensor, feedback: Tensor, tier: TierLayout) -> Tensor:
    """Rounds keys as `reference.round_keys` does, in float32.

    Raises:
        ValueError: shapes of tensors do not fit.
        CorruptMemoryError: a row has no feedback.
    """
    count, dim = key.shape
    if dim != tier.key_dim or row.shape != (count,) or feedback.shape[1:] != (dim, dim):
        raise ValueError(
            f"key {tuple(key.shape)}, row {tuple(row.shape)} and feedback {tuple(feedback.shape)} must be "
            f"[n, {tier.key_dim}], [n] and [rows, {tier.key_dim}, {tier.key_dim}]."
        )
    key = unit_stride(key if key.dtype in DTYPES else key.float())
    row, feedback = row.contiguous(), feedback.float().contiguous()
    rounded = torch.empty(count, dim, dtype=torch.float32, device=key.device)
    block = Rounding(side=side_of(tier, "key"), count=count, key_stride=key.stride(0), rows=feedback.shape[0])
    block.key, block.row, block.feedback, block.rounded = (address(x) for x in (key, row, feedback, rounded))
    block.source, block.threads = DTYPES[key.dtype], torch.get_num_threads()
    call("round", block)
    return rounded
