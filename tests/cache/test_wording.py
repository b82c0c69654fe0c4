"""What `str(cache.memory())` says about tokens: per token, as precisions, and as shares if there are levels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runs import model_of, started

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.report import LayerReport, MemoryReport
from hf_diffkv.cache.wording import kept_in_words

WINDOW = 8


def said(config: DiffKVConfig, length: int = 200) -> str:
    return str(started(model_of("llama"), (length,), config).cache.memory())


def test_one_precision_has_no_levels() -> None:
    config = DiffKVConfig(high="K5V4", low="K5V4", alpha_high=0, window=WINDOW, sinks=4)
    text = said(config)
    assert "200 tokens, 12 of them uncompressed; the others in K5V4" in text
    assert "high" not in text and "low " not in text


def test_groups_are_part_of_a_precision() -> None:
    """Their name has a slash too: K4V3g2/1."""
    assert "200 tokens, 36 of them uncompressed; the others in K4V3g2/1" in said(DiffKVConfig.preset("small"))
    text = said(DiffKVConfig(high="K8V4g1/2", low="K4V2g2/4", window=WINDOW, sinks=0))
    assert "of the others high (K8V4g1/2) " in text and ", low (K4V2g2/4) " in text
    config = DiffKVConfig(head_precisions=[["K5V4", "K4V3g2/1"]] * 2, window=WINDOW, sinks=0)
    assert "the others in K4V3g2/1 to K5V4, by head" in said(config)


def test_a_precision_for_each_head_is_a_range() -> None:
    config = DiffKVConfig(head_precisions=[["K3V2", "K6V5"], ["K3V2", "K4V3"]], window=WINDOW, sinks=0)
    assert "200 tokens, 8 of them uncompressed; the others in K3V2 to K6V5, by head" in said(config)


def test_levels_are_shares_of_what_is_outside_the_window() -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=WINDOW, sinks=0)
    cache = started(model_of("llama"), (200,), config).cache
    levels = torch.cat([cache.levels(layer_idx).flatten() for layer_idx in cache.compressed_layers()])
    outside = levels[levels != 3]
    high, low, pruned = ((outside == code).float().mean().item() for code in (2, 1, 0))
    expected = f"of the others high (K8V4) {high:.0%}, low (K4V2) {low:.0%}, pruned {pruned:.0%}"
    assert min(high, low, pruned) > 0
    assert f"200 tokens, 8 of them uncompressed; {expected}" in str(cache.memory())


def test_what_a_policy_drops() -> None:
    cuts = {"low_cut": 0.3, "high_cut": 0.3}
    text = said(DiffKVConfig(policy="leankv", policy_options=cuts, high="K8V8", low="K8V8", window=WINDOW))
    assert "of the others kept (K8V8) " in text and ", pruned " in text


def test_few_tokens() -> None:
    assert "5 tokens, all uncompressed" in said(DiffKVConfig(window=WINDOW), 5)
    assert "1 token, all uncompressed" in said(DiffKVConfig(window=WINDOW), 1)


def test_reports_without_precisions_and_beside_chosen_heads() -> None:
    plain = LayerReport(0, high=(6, 6), low=(3, 3), window=(1, 1), pruned=(0, 0))
    assert kept_in_words([plain]) == "10 tokens, 1 of them uncompressed"
    mixed = LayerReport(0, (6, 9), (3, 0), (1, 1), (0, 0), ("K8V4/K4V2", "K6V5"))
    assert kept_in_words([mixed]) == (
        "10 tokens, 1 of them uncompressed; of the others high (K8V4) 67%, low (K4V2) 33%, in other heads in K6V5"
    )
    assert str(MemoryReport(0, 0, 0, 0, {}, (), 2)).startswith("0.00 MB of 0.00 MB dense")


@pytest.mark.parametrize("name", ["levels", "dequantize", "significance"])
def test_a_call_without_a_layer_says_what_is_missing(name: str) -> None:
    cache: DiffKVCache = started(model_of("llama"), (20,), DiffKVConfig(window=WINDOW)).cache
    call: Callable = getattr(cache, name)
    with pytest.raises(ValueError, match=r"layer_idx=None must be an integer, one of .* \[0, 1\]"):
        call(None)
    with pytest.raises(TypeError, match="layer_idx"):
        call()
