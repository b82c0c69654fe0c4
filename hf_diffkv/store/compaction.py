"""Compaction after each generated token: Algorithm 1 over all rows of a store.

The policy sets the thresholds. The host reads nothing back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.rotation import center_windows
from ..policy import StepRows, relative_thresholds
from .state import Changing, Store


def settle(store: Store) -> None:
    """Runs the compaction of the last step if it is still pending."""
    if store.compaction_due:
        # a second run would compact what the first has changed
        store.compaction_due = False
        with Changing(store):
            compact(store)


def compact(store: Store) -> None:
    """Runs Algorithm 1 on the device for the oldest token of every overfull window."""
    if store.centers_soon:
        _center_rows(store)
    rows = store.all_rows()
    high, low = _thresholds(store) if store.layout.selects else (rows.alpha_high, None)
    options = {"bounds": store.all_bounds, "flag": store.flag, "feedback": store.model_feedback}
    store.ops.compact_windows(rows, store.config.window, high, low, **options)


def _center_rows(store: Store) -> None:
    """Fixes the key offset of rows whose first token is about to leave the window (transform.py)."""
    rows = store.all_rows()
    due = rows.is_whole() & (rows.length - rows.window_start > store.config.window)
    for layer in store.uncentered:
        due.view(store.length.shape)[layer] = False
    center_windows(rows.window_key, rows.held_tokens() >= 0, rows.key_offset, due)


def _thresholds(store: Store) -> tuple[Tensor, Tensor]:
    """Returns the high and the low threshold of every row, float32 [layers, batch, heads]."""
    state = StepRows(
        store.alpha_high,
        store.alpha_low,
        store.length[..., None],
        store.window_start[..., None],
        store.sink_end[..., None],
        store.high_count,
        store.low_count,
        store.layer_index[:, None, None],
    )
    given = store.policy.thresholds(state)
    if store.config.max_bytes is not None and store.policy.sets_thresholds:
        given = tuple(map(torch.maximum, given, relative_thresholds(state)))
    return tuple(threshold.expand(store.high_count.shape) for threshold in given)
