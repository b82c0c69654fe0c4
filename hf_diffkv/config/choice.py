"""Which configuration a model gets where its user names at most a preset or a ratio."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from . import files, found
from .allocation import HEAD_LADDER, SENSITIVITY, fields_for, ratio_of
from .checks import as_ratio
from .presets import DEFAULT_PRESET, LEVEL_FIELDS, PRESETS, RATIOS, preset_for, preset_named, preset_within
from .sensitivity import MEASURED_FIELDS

# fields of a configuration, and its calibration
Choice = tuple[dict[str, Any], dict[str, Any] | None]


def choose(
    model: Any, model_config: Any, preset: str | None, target_ratio: float | None, given: Collection[str]
) -> Choice:
    """Fields for a model.

    Args:
        model: a loaded model, whose heads may have been measured; else as `model_config`.
        model_config: its configuration, or its name or folder.
        preset: name of one; with measured heads it is a ratio. target_ratio: as of `DiffKVConfig.for_model`.
        given: fields that somebody chooses.

    Raises:
        ValueError: no such preset, both a preset and a ratio, or a ratio that cannot be met.
    """
    if preset is not None and target_ratio is not None:
        raise ValueError(f"preset={preset!r} and target_ratio={target_ratio} are two answers; leave one out.")
    named = None if preset is None else preset_named(preset)
    plain = preset_for(model_config, given)
    if LEVEL_FIELDS & set(given):
        return (named or plain), None
    saved = _saved(model)
    if saved is not None and preset is None and target_ratio is None:
        return saved
    ratio = RATIOS[preset or DEFAULT_PRESET] if target_ratio is None else as_ratio("target_ratio", target_ratio)
    calibration = _measured(model, saved)
    # beyond what all heads take at the most bits of the ladder, one precision for all has more
    if calibration is not None and ratio <= ratio_of(HEAD_LADDER[-1], calibration):
        fields, calibration = fields_for(calibration, ratio)
        return {**MEASURED_FIELDS, **fields}, calibration
    if target_ratio is not None:
        return preset_within(target_ratio, model_config), None
    if calibration is None and (named is not None or plain == PRESETS[DEFAULT_PRESET]):
        found.tell_of_calibration(model)
    return (named or plain), None


def _saved(model: Any) -> Choice | None:
    path = found.beside(model)
    if path is None:
        return None
    try:
        fields, calibration = files.from_text(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return files.completed(fields), calibration


def _measured(model: Any, saved: Choice | None) -> dict[str, Any] | None:
    """A calibration with what the model's heads lose."""
    if saved is not None and saved[1] is not None and SENSITIVITY in saved[1]:
        return saved[1]
    measured = found.measured_of(model)
    return None if measured is None else {SENSITIVITY: measured.to_dict()}
