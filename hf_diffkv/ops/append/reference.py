"""Appending in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...pages.window import slots_of


def append_token(
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    length: Tensor,
    invalid: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    limit: float,
    valid: Tensor | None = None,
    sink_end: Tensor | None = None,
    sink_slots: int = 0,
) -> None:
    """Writes one token per request into its slot of the window and counts it.

    Args:
        window_key, window_value: [batch, heads, slots, dim], changed in place.
        window_score: float32 [batch, heads, slots]; the token's is set to zero.
        length: int64 [batch], tokens so far; counted up.
        invalid: bool [], set where a real token has a key or value that is NaN or beyond `limit`.
        key, value: [batch, heads, dim].
        limit: largest magnitude that can be stored.
        valid: bool [batch], where the token is real; nothing changes elsewhere. None where all are.
        sink_end, sink_slots: int64 [batch], where tokens stand in the window (pages/window.py); None without sinks.
    """
    batch = torch.arange(length.shape[0], device=length.device)
    slot = slots_of(length, sink_end, sink_slots, window_key.shape[2])
    finite = (key.abs().amax((1, 2)) <= limit) & (value.abs().amax((1, 2)) <= limit)
    finite = (finite if valid is None else finite | ~valid).all()
    score = torch.zeros((), device=length.device)
    if valid is not None:
        key = torch.where(valid[:, None, None], key, window_key[batch, :, slot])
        value = torch.where(valid[:, None, None], value, window_value[batch, :, slot])
        score = torch.where(valid[:, None], score, window_score[batch, :, slot])
    window_key[batch, :, slot] = key
    window_value[batch, :, slot] = value
    window_score[batch, :, slot] = score
    invalid |= ~finite
    length += 1 if valid is None else valid
