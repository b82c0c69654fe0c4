"""Compaction after each generated token: Algorithm 1 over all rows of a store.

The policy sets the thresholds. The host reads nothing back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.backend import NATIVE
from ..policy import StepRows, relative_thresholds
from . import native
from .forms import center_rows
from .state import Store


def settle(store: Store) -> None:
    """Runs the compaction of the last step if it is still pending."""
    if store.compaction_due:
        compact(store)
        store.compaction_due = False


def compact(store: Store) -> None:
    """Runs Algorithm 1 on the device for the oldest token of every overfull window."""
    if store.centers_soon:
        center_rows(store)
    in_native_code, feedback = store.ops.backend == NATIVE, store.model_feedback
    if store.layout.selects:
        state = _step_rows(store)
        high, low = _thresholds(store, state)
    else:
        high, low = store.all_rows().alpha_high, None
    if in_native_code:
        native.compact(store, high, low, feedback)
    else:
        leaving = store.length - store.window_start > store.config.window
        options = {"bounds": store.all_bounds, "flag": store.flag, "feedback": feedback}
        store.ops.compact_step(store.all_rows(), leaving.view(-1), high, low, **options)


def _step_rows(store: Store) -> StepRows:
    """Returns views of the store's tensors; nothing is computed."""
    return StepRows(
        store.alpha_high,
        store.alpha_low,
        store.length[..., None],
        store.window_start[..., None],
        store.sink_end[..., None],
        store.high_count,
        store.low_count,
        store.layer_index[:, None, None],
    )


def _thresholds(store: Store, state: StepRows) -> tuple[Tensor, Tensor]:
    """Returns the high and the low threshold of every row, float32 [layers, batch, heads]."""
    given = store.policy.thresholds(state)
    if store.config.max_bytes is not None and store.policy.sets_thresholds:
        given = tuple(map(torch.maximum, given, relative_thresholds(state)))
    return tuple(threshold.expand(store.high_count.shape) for threshold in given)
