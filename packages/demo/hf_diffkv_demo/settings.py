"""Settings that the page offers, from the most memory to the least, each with an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_diffkv import DiffKVConfig
from hf_diffkv.config.presets import DEFAULT_PRESET, PRESETS

# default of a model with published thresholds; else the default is a preset
DEFAULT, OWN = "default", "your own"
ADVICE = {"quality": "Loses least.", "balanced": "Use it when in doubt.", "small": "Watch for small slips."}


@dataclass(frozen=True)
class Setting:
    """A configuration and what it is good for."""

    config: DiffKVConfig
    explanation: str


def settings_for(model: Any) -> dict[str, Setting]:
    """Returns the settings by name, for a loaded model or its configuration."""
    default = DiffKVConfig.for_model(model)
    presets = {name: DiffKVConfig.for_model(model, preset=name) for name in PRESETS}
    further = {DEFAULT: Setting(default, f"What `DiffKVCache(model)` uses: {_kept(default)}, {_bits(default)}.")}
    return {
        **(further if default != presets[DEFAULT_PRESET] else {}),
        **{name: Setting(config, _of_preset(name, config)) for name, config in presets.items()},
        "paper": Setting(
            DiffKVConfig.paper(),
            "DiffKV as published, without pruning: tokens that get at least the mean attention have keys in 8 bits and "
            "values in 4, the others 4 and 2.",
        ),
        "pruning": Setting(
            DiffKVConfig.paper(alpha_high=8.0, alpha_low=1.0, window=16),
            "Tokens that get less than the mean attention are pruned before any question is asked. See what breaks: "
            "facts from the prompt can be gone even if the text still reads well.",
        ),
    }


def setting_of_ratio(model: Any, ratio: float) -> Setting:
    """Returns a loaded model's setting for a ratio. Raises `ValueError` if there is none."""
    config = DiffKVConfig.for_model(model, target_ratio=ratio)
    return Setting(config, f"At most {ratio:.1%} of a dense token's bytes: {_kept(config)}, {_bits(config)}.")


def setting_of(preset: str | None, settings: dict[str, Setting]) -> str:
    """Returns the name of a setting: `preset`, or without one what `DiffKVCache(model)` uses."""
    return preset or (DEFAULT if DEFAULT in settings else DEFAULT_PRESET)


def _of_preset(name: str, config: DiffKVConfig) -> str:
    return f"`DiffKVCache(model, {name!r})`: {_kept(config)}, {_bits(config)}. {ADVICE[name]}"


def _kept(config: DiffKVConfig) -> str:
    return "tokens are chosen by the attention they get" if config.selects else "every token is kept"


def _bits(config: DiffKVConfig) -> str:
    """Returns the bits of keys and values, in words."""
    if config.head_precisions is not None:
        return "each head at the precision measured for it"
    if config.selects:
        return f"at {config.high.name} or {config.low.name}"
    return f"keys in {config.high.k_bits} bits and values in {config.high.v_bits}"


OWN_EXPLANATION = "Two levels and pruning by your own thresholds; docs/configuration.md explains each field."
