"""Configurations of models that cache latents (multi-head latent attention; docs/latent.md).

Each layer has one row: the rotary key of all heads, and the latent. The rotary key is an eighth of the elements or less
and always has 8 bits or more. No large trained one has been measured, so nothing goes below 8 bits by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..heads.allocation import LATENT_LADDER
from ..precision import Precision
from .presets import head_size, one_level

LEAST_KEY_BITS = 8
# precision of the latents by preset name
LATENT_PRESETS = {"quality": "K8V8", "balanced": "K8V8", "small": "K8V6"}
# levels if the user gives only some of them
LATENT_LEVELS: dict[str, Any] = {
    "high": Precision(8, 8),
    "low": Precision(8, 4),
    "alpha_low": 0.0,
    "alpha_high": 1.0,
}


def latent_dims(model_config: Any) -> tuple[int, int] | None:
    """Returns the elements of a rotary key and of a latent; None for models without latents, and for names."""
    if not hasattr(model_config, "get_text_config"):
        return None
    text_config = model_config.get_text_config(decoder=True)
    if not has_latents(text_config):
        return None
    return text_config.qk_rope_head_dim, text_config.kv_lora_rank


def has_latents(text_config: Any) -> bool:
    """Returns whether a model caches latents, judging by the configuration of its text model."""
    return getattr(text_config, "kv_lora_rank", None) is not None


def latent_fields(name: str) -> dict[str, Any]:
    """Returns the config fields that store every latent at the precision `name`."""
    return {**one_level(Precision.parse(name)), "metadata_bits": 16, "window": 32}


def default_levels(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config fields for levels that the user does not give; `high` alone applies to all tokens."""
    if "high" in given and "low" not in given:
        return {"low": given["high"], "alpha_high": 0.0, "alpha_low": 0.0}
    return dict(LATENT_LEVELS)


def latent_ratio(name: str, model_config: Any) -> float:
    """Returns the bytes of a token at the precision `name` over its bytes in the model's dtype."""
    # imported here, as only this needs the page format
    from ..pages.layout import uniform_token_bytes

    dims, element_bytes = latent_dims(model_config) or (0, 0), head_size(model_config)[1]
    return uniform_token_bytes(Precision.parse(name), *dims, element_bytes) / (sum(dims) * element_bytes)


def latent_within(target_ratio: float, model_config: Any) -> dict[str, Any]:
    """Returns config fields that store every latent at the best precision of `LATENT_LADDER` within a ratio.

    Raises:
        ValueError: the smallest precision does not reach the ratio.
    """
    for name in reversed(LATENT_LADDER):
        ratio = latent_ratio(name, model_config)
        if ratio <= target_ratio:
            return latent_fields(name)
    raise ValueError(
        f"target_ratio={target_ratio} is below what {LATENT_LADDER[0]} needs for this model's latents, {ratio:.3f}; "
        "raise it."
    )


def check_precisions(config: Any) -> None:
    """Raises `ValueError` if a `DiffKVConfig` stores rotary keys in less than 8 bits."""
    layers = config.head_precisions or ()
    # layers whose heads have precisions store no tokens at these
    used = [("high", config.high), ("low", config.low)] if not layers or None in layers else []
    used += [("head_precisions", each) for layer in layers for each in layer or () if each is not None]
    used += [("until_full", config.until_full)] if isinstance(config.until_full, Precision) else []
    known = ", ".join(reversed(LATENT_LADDER))
    for name, precision in used:
        if precision.k_bits < LEAST_KEY_BITS:
            raise ValueError(
                f"{name}={precision.full_name}: this model caches latents, whose rotary keys need at least "
                f"{LEAST_KEY_BITS} bits; give every precision as 'K8V8' or another of {known}, or leave them out."
            )
