"""Chooses a model's configuration if the user gives at most a preset or a ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..arguments import as_ratio
from ..heads import lookup
from ..heads.allocation import HEAD_LADDER, SENSITIVITY, fields_for, ratio_of
from ..heads.sensitivity import MEASURED_FIELDS
from . import files
from .latent import LATENT_PRESETS, default_levels, latent_dims, latent_fields, latent_within
from .presets import DEFAULT_PRESET, LEVEL_FIELDS, PRESETS, RATIOS, preset_for, preset_named, preset_within
from .until_full import AUTO

# fields of a configuration, and its calibration
Choice = tuple[dict[str, Any], dict[str, Any] | None]


def choose(
    model: Any,
    model_config: Any,
    preset: str | None,
    target_ratio: float | None,
    given: Mapping[str, Any],
    check: Callable[[dict[str, Any]], Any],
) -> Choice:
    """Chooses the fields of a model's configuration.

    Args:
        model: loaded model, whose heads may have been measured; otherwise the same as `model_config`.
        model_config: the model's configuration, name or folder.
        preset: name of a preset, which stands for a ratio if heads have been measured.
        target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype, or None.
        given: fields that the user sets.
        check: function that raises `ValueError` for invalid fields in a file.

    Raises:
        ValueError: the preset does not exist, a preset and a ratio are both given, or the ratio cannot be met.
    """
    if preset is not None and target_ratio is not None:
        raise ValueError(
            f"preset={preset!r} and target_ratio={target_ratio} both choose the precisions; leave one out."
        )
    named = None if preset is None else preset_named(preset)
    plain = preset_for(model_config, given)
    latent = latent_dims(model_config) is not None
    if LEVEL_FIELDS & set(given):
        return (default_levels(given) if latent else named or plain), None
    saved = _saved(model, check)
    if saved is not None and preset is None and target_ratio is None:
        return saved
    if latent:
        return _of_latents(model, model_config, preset, target_ratio, given, saved)
    ratio = RATIOS[preset or DEFAULT_PRESET] if target_ratio is None else as_ratio("target_ratio", target_ratio)
    calibration = _measured(model, saved)
    # above the ratio of the ladder's highest precision, one precision for all heads can use more bits
    if calibration is not None and ratio <= ratio_of(HEAD_LADDER[-1], calibration):
        return _within(ratio, calibration, given)
    if target_ratio is not None:
        return preset_within(target_ratio, model_config), None
    if calibration is None and (named is not None or plain == PRESETS[DEFAULT_PRESET]):
        lookup.suggest_calibration(model)
    return (named or plain), None


def _of_latents(
    model: Any,
    model_config: Any,
    preset: str | None,
    target_ratio: float | None,
    given: Mapping[str, Any],
    saved: Choice | None,
) -> Choice:
    """Chooses for a model that caches latents, where measured rows count only for a given ratio."""
    if target_ratio is None:
        return latent_fields(LATENT_PRESETS[preset or DEFAULT_PRESET]), None
    ratio, calibration = as_ratio("target_ratio", target_ratio), _measured(model, saved)
    return (latent_within(ratio, model_config), None) if calibration is None else _within(ratio, calibration, given)


def _within(ratio: float, calibration: dict[str, Any], given: Mapping[str, Any]) -> Choice:
    """Returns the precisions of lowest predicted loss within a ratio."""
    budget = given.get("max_bytes") is not None and given.get("until_full", AUTO) is not None
    fields, calibration = fields_for(calibration, ratio, until_full=budget)
    return {**MEASURED_FIELDS, **fields}, calibration


def _saved(model: Any, check: Callable[[dict[str, Any]], Any]) -> Choice | None:
    """Reads the configuration saved with a model. Errors name the file, which the user may not know about."""
    path = lookup.saved_config_of(model)
    if path is None:
        return None
    try:
        fields, calibration = files.from_text(path.read_bytes())
        check(fields)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return files.completed(fields), calibration


def _measured(model: Any, saved: Choice | None) -> dict[str, Any] | None:
    """Returns a calibration with the measured loss of the model's heads, or None."""
    if saved is not None and saved[1] is not None and SENSITIVITY in saved[1]:
        return saved[1]
    measured = lookup.measured_of(model)
    return None if measured is None else {SENSITIVITY: measured.to_dict()}
