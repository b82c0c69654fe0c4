"""Presets by name, and the papers' published thresholds (DiffKV, SOSP 2025) by model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..arguments import similar
from ..precision import Precision

# model name -> (alpha_low, alpha_high); sibling releases (Llama-3.1, distillations) were not calibrated
CALIBRATED: dict[str, tuple[float, float]] = {
    r"(meta-)?llama-?3-8b(-instruct)?(-hf)?": (0.02, 1.0),
    r"(meta-)?llama-?3-70b(-instruct)?(-hf)?": (0.0, 1.0),
    r"qwen2\.5-7b(-instruct)?": (0.04, 0.04),
    r"qwen2\.5-32b(-instruct)?": (0.0, 3.0),
    r"qwq-32b(-preview)?": (0.0, 3.0),
}
SAFE: dict[str, Any] = {"alpha_low": 0.0, "alpha_high": 1.0}
# preset for models without published thresholds, if none of these fields is given
DEFAULT_PRESET = "balanced"
LEVEL_FIELDS = {
    *("high", "low", "alpha_high", "alpha_low", "head_precisions"),
    *("policy", "policy_options"),
}

# the papers quantise these families in groups: 1 at 8 bits, 2 at 4 bits, 4 at 2 bits
GROUPED = re.compile(r"^(qwq|qwen3)\b")
GROUPED_PRECISIONS: dict[str, Any] = {"high": Precision(8, 4, 1, 2), "low": Precision(4, 2, 2, 4)}


def one_level(precision: Precision) -> dict[str, Any]:
    """Returns the config fields that store all tokens at one precision."""
    return {"high": precision, "low": precision, "alpha_high": 0.0, "alpha_low": 0.0}


def _uniform(name: str, **fields: Any) -> dict[str, Any]:
    return {**one_level(Precision.parse(name)), "adaptive_rounding": True, "metadata_bits": 16, **fields}


# one precision for all tokens: on small models this beats two precisions at the same size (docs/quality.md)
PRESETS: dict[str, dict[str, Any]] = {
    "quality": _uniform("K8V4"),
    "balanced": _uniform("K5V4", window=32),
    "small": _uniform("K4V3g2/1", window=32),
}


# bytes of stored tokens over their bytes in the model's dtype, for models with measured heads
RATIOS = {"quality": 0.27, "balanced": 0.235, "small": 0.2025}

# from best to smallest (figures in docs/quality.md)
LADDER = ("K8V8", "K8V4", "K6V4", "K5V4", "K4V4g2/1", "K4V4", "K4V3g2/1", "K4V3", "K4V2")


def preset_within(target_ratio: float, model_config: Any) -> dict[str, Any]:
    """Returns config fields that store every token at the best precision of `LADDER` within a ratio.

    Args:
        target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype, not counting the
            window.
        model_config: Transformers configuration, for the size of a head and of an element.

    Raises:
        ValueError: the smallest precision does not reach the ratio, or `model_config` is not a configuration.
    """
    # imported here, as most importers of this module do not need the page format
    from ..pages.layout import uniform_token_bytes

    head_dim, element_bytes = head_size(model_config)
    for name in LADDER:
        taken = uniform_token_bytes(Precision.parse(name), head_dim, head_dim, element_bytes)
        ratio = taken / (2 * head_dim * element_bytes)
        if ratio <= target_ratio:
            return _uniform(name, window=32)
    raise ValueError(
        f"target_ratio={target_ratio} is below what {LADDER[-1]} needs for heads of size {head_dim}, {ratio:.3f}; "
        "raise it, or choose precisions or a policy yourself."
    )


def head_size(model_config: Any) -> tuple[int, int]:
    """Returns the elements of a head and the bytes of an element. Raises `ValueError` for other objects."""
    if not hasattr(model_config, "get_text_config"):
        raise ValueError("target_ratio needs the size of the model's heads; pass the model or model.config.")
    text_config = model_config.get_text_config(decoder=True)
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return head_dim, getattr(getattr(text_config, "dtype", None), "itemsize", 2)


def preset_named(name: str) -> dict[str, Any]:
    """Returns the config fields of one of `PRESETS`. Raises `ValueError` for other names."""
    if not isinstance(name, str) or name not in PRESETS:
        close = close_preset(name)
        hint = f"did you mean {close!r}? Choose" if close else "choose"
        hint += f" one of {', '.join(map(repr, PRESETS))}"
        if isinstance(name, str) and ("/" in name or os.path.isdir(name)):
            hint += f", or load the configuration saved there: DiffKVConfig.from_pretrained({name!r})"
        raise ValueError(f"there is no preset {name!r}; {hint}.")
    return PRESETS[name]


def close_preset(name: Any) -> str | None:
    """Returns the preset that was probably meant, or None."""
    close = similar(str(name).lower(), PRESETS)
    return close[0] if close else None


def preset_for(model_config: Any, given: Collection[str] = ()) -> dict[str, Any]:
    """Returns the config fields for a model: published ones, or else a preset or thresholds that never prune.

    Args:
        model_config: Transformers configuration, or the name or folder of a model.
        given: names of the fields that the user sets; if one is in `LEVEL_FIELDS`, no preset is used.

    Raises:
        ValueError: `model_config` is neither a configuration nor a possible name of a model.
    """
    if isinstance(model_config, (str, os.PathLike)):
        name = os.fspath(model_config)
        _check_name(name)
    elif hasattr(model_config, "name_or_path"):
        name = model_config.name_or_path
    else:
        raise ValueError(
            f"a {type(model_config).__name__} is not a model; pass the model, model.config, or the model's name or "
            "folder."
        )
    known = published(name or "")
    if known is not None:
        return known
    return SAFE if LEVEL_FIELDS & set(given) else dict(PRESETS[DEFAULT_PRESET])


def published(name: str) -> dict[str, Any] | None:
    """Returns the config fields that the papers publish for a model or its family, or None."""
    name = name.lower().replace("_", "-").rstrip("/").rsplit("/", 1)[-1]
    grouped = GROUPED_PRECISIONS if GROUPED.match(name) else {}
    for pattern, (alpha_low, alpha_high) in CALIBRATED.items():
        if re.fullmatch(pattern, name):
            return {"alpha_low": alpha_low, "alpha_high": alpha_high, **grouped}
    return {**SAFE, **grouped} if grouped else None


def _check_name(name: str) -> None:
    """Raises `ValueError` for a text that cannot be the name of a model."""
    if Path(name).is_dir() or re.fullmatch(r"[^/\s]+/[^/\s]+", name) or published(name) is not None:
        return
    close = close_preset(name)
    hint = f"for a preset write preset={close!r}" if close else "pass the model or model.config"
    raise ValueError(f"{name!r} is not a model: neither a folder nor OWNER/NAME on the Hub; {hint}.")
