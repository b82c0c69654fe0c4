"""Compaction behind generated tokens: rounds of Algorithm 1 over all rows of a store.

The policy sets their thresholds. Nothing is read by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.backend import NATIVE
from ..ops.compact import compact_step
from ..policy import StepRows, relative_thresholds
from . import native
from .forms import center_rows, is_pinned, pin_candidates
from .state import Store


def compacts_after_step(store: Store, steps: int = 1) -> bool:
    """Whether a compaction is due once `steps` more steps have run."""
    return store.steps_since_compaction + steps >= store.config.compaction_interval


def settle(store: Store) -> None:
    """Runs the compaction of the last step, if it is still to be done."""
    if store.compaction_due:
        compact(store)
        compaction_done(store)


def compaction_done(store: Store) -> None:
    """Notes that the compaction that was due has run."""
    store.compaction_due = False
    store.steps_since_compaction = 0


def compact(store: Store) -> None:
    """The device's part of a compaction: as many rounds as tokens left the windows."""
    if store.centers_soon:
        center_rows(store)
    for _ in range(store.config.compaction_interval):
        compact_round(store)


def compact_round(store: Store) -> None:
    """Sends the oldest token of every window that holds too many through Algorithm 1."""
    in_native_code, feedback = store.backend() == NATIVE, store.model_feedback
    if store.layout.selects:
        pin_candidates(store)
        state = _step_rows(store)
        high, low = _thresholds(store, state)
    else:
        high, low = store.all_rows().alpha_high, None
    if in_native_code:
        native.compact(store, high, low, feedback)
    else:
        leaving = store.length - store.window_start > store.config.window
        options = {"bounds": store.all_bounds, "flag": store.flag, "feedback": feedback}
        compact_step(store.all_rows(), leaving.view(-1), high, low, **options)


def _step_rows(store: Store) -> StepRows:
    """Views of the store's own tensors, which follow it; nothing is computed."""
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
    """High and low threshold of every row, float32 [layers, batch, heads]."""
    given = store.policy.thresholds(state)
    if store.config.max_bytes is not None and store.policy.sets_thresholds:
        given = tuple(map(torch.maximum, given, relative_thresholds(state)))
    if store.config.protected_layers:
        protected = _protected(store)
        given = tuple(torch.where(protected, *pair) for pair in zip(relative_thresholds(state), given))
    pinned = is_pinned(store, state.candidate)
    if pinned is not None:
        # from 0 on it is high, and no victim is below
        given = tuple(threshold.masked_fill(pinned, 0.0) for threshold in given)
    return tuple(threshold.expand(store.high_count.shape) for threshold in given)


def _protected(store: Store) -> Tensor:
    """bool [layers, 1, 1]: where the policy has no say."""
    count, index = store.config.protected_layers, store.layer_index[:, None, None]
    return (index < count) | (index >= store.total_layers - count)
