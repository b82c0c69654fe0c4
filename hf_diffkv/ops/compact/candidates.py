"""The oldest token of every window, which is the next to leave."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...pages import LayerRows
from ...pages.rows import slots_of


class Candidates(NamedTuple):
    """One of each row.

    Attributes:
        key, value: [rows, dim] in the model's dtype.
        score: float32 [rows]. position: int64 [rows].
        leaving: bool [rows], which rows have a candidate.
        length: int64 [rows], real tokens seen.
    """

    key: Tensor
    value: Tensor
    score: Tensor
    position: Tensor
    leaving: Tensor
    length: Tensor


def candidates(rows: LayerRows, leaving: Tensor) -> Candidates:
    """Of windows from which a token leaves, bool [batch]."""

    def of_rows(each: Tensor) -> Tensor:
        # of a single request a reshape would be a view without strides, which kernels do not read
        return each[:, None].expand(-1, rows.heads).contiguous().view(-1)

    slot = slots_of(rows.window_start, rows.sink_end, rows.sink_slots, rows.slots)
    slot = slot[:, None, None].expand(-1, rows.heads, 1)
    key, value = (
        window.gather(2, slot[..., None].expand(-1, -1, -1, window.shape[3])).view(rows.count, -1)
        for window in (rows.window_key, rows.window_value)
    )
    score = rows.window_score.gather(2, slot).view(-1)
    return Candidates(key, value, score, *map(of_rows, (rows.window_start, leaving, rows.length)))
