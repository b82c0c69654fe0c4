"""What the page offers to choose from, from the most memory to the least, each with what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_diffkv import DiffKVConfig

DEFAULT, OWN = "default", "your own"
# what presets are called on the page, where they are not the default
NAMES = {"quality": "gentle", "balanced": "balanced", "small": "small"}


@dataclass(frozen=True)
class Setting:
    """A configuration and what it is good for."""

    config: DiffKVConfig
    explanation: str


def settings_for(model: Any) -> dict[str, Setting]:
    """The settings by name, for a loaded model or its configuration."""
    quality, balanced, small = (DiffKVConfig.for_model(model, preset=name) for name in NAMES)
    default = DiffKVConfig.for_model(model)
    further = {"balanced": Setting(balanced, f"`preset='balanced'`: every token is kept, {_bits(balanced)}.")}
    return {
        "gentle": Setting(
            quality, f"`preset='quality'`: every token is kept, {_bits(quality)}. Take it when in doubt."
        ),
        DEFAULT: Setting(default, f"What `DiffKVCache(model)` takes: {_kept(default)}, {_bits(default)}."),
        **(further if balanced != default else {}),
        "small": Setting(small, f"`preset='small'`: every token is kept, {_bits(small)}. Look for small slips."),
        "paper": Setting(
            DiffKVConfig.paper(),
            "DiffKV as published, without pruning: tokens that get at least the mean attention have keys in 8 bits and "
            "values in 4, the others 4 and 2.",
        ),
        "brutal": Setting(
            DiffKVConfig.paper(alpha_high=8.0, alpha_low=1.0, window=16),
            "Tokens that get less than the mean attention are pruned, before anybody asks for them. See what breaks: "
            "facts of the prompt can be gone where the text still reads well.",
        ),
    }


def setting_of(preset: str | None, settings: dict[str, Setting]) -> str:
    """The setting that a preset is; the default without one."""
    return NAMES[preset] if preset and NAMES[preset] in settings else DEFAULT


def _kept(config: DiffKVConfig) -> str:
    return "tokens are chosen by the attention they get" if config.selects else "every token is kept"


def _bits(config: DiffKVConfig) -> str:
    """Bits of keys and values, in words."""
    if config.head_precisions is not None:
        return "each head in the bits that were measured for it"
    if config.selects:
        return f"at {config.high.name} or {config.low.name}"
    return f"keys in {config.high.k_bits} bits and values in {config.high.v_bits}"


OWN_EXPLANATION = "Two levels and pruning by thresholds of your own; see the README for what each field means."
