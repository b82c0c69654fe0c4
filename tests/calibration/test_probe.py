"""The probe for keys that few bits do not hold, on tiny-lm as it is and with outlier channels put into its keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision, probe_keys, without_fragile_level
from hf_diffkv.calibration.probe import FRAGILE_KL, KeyProbe
from hf_diffkv.compat import passing

TINY_LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"
TOKENS = 80
STORED = 60
PLAIN = {"rotate": False, "center": False}
TEXT = Path(__file__).read_text()


def load() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()


def outlier_channels(model: LlamaForCausalLM) -> tuple[list[int], list[int]]:
    """The slowest rotary pair of every head, as rows of the projections of queries and of keys."""
    dim = model.config.head_dim
    pair = (dim // 2 - 1, dim - 1)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    queries, keys = ([head * dim + channel for head in range(count) for channel in pair] for count in heads)
    return queries, keys


@torch.no_grad()
def scaled(factor: float = 64.0) -> LlamaForCausalLM:
    """Some key channels are larger and those of the queries smaller by the same factor: the same attention."""
    model = load()
    queries, keys = outlier_channels(model)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight[keys] *= factor
        layer.self_attn.q_proj.weight[queries] /= factor
    return model


@torch.no_grad()
def biased(size: float = 400.0) -> LlamaForCausalLM:
    """Some key channels have a bias, as those of Qwen2.5 have."""
    model = load()
    _, keys = outlier_channels(model)
    for layer in model.model.layers:
        bias = torch.zeros(layer.self_attn.k_proj.out_features)
        bias[keys] = size
        layer.self_attn.k_proj.bias = torch.nn.Parameter(bias)
    return model


@torch.no_grad()
def kl_of_rounded_keys(model: LlamaForCausalLM, ids: torch.Tensor, bits: int) -> float:
    """Mean KL with all stored keys but the newest rounded by hand."""

    def logits(rounded: bool) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(ids[:, :STORED], **passing(cache))
        for layer in cache.layers if rounded else ():
            keys = layer.keys[:, :, : STORED - 1]
            zero = keys.amin(-1, keepdim=True)
            scale = ((keys.amax(-1, keepdim=True) - zero) / (2**bits - 1)).half().float()
            zero = zero.half().float()
            layer.keys[:, :, : STORED - 1] = torch.round((keys - zero) / scale) * scale + zero
        return model(ids[:, STORED:-1], **passing(cache)).logits[0].log_softmax(-1)

    dense, rounded = logits(False), logits(True)
    return float((dense.exp() * (dense - rounded)).sum(-1).mean())


def test_figures_are_those_of_rounded_keys() -> None:
    model, tokenizer = load(), AutoTokenizer.from_pretrained(TINY_LM)
    probe = probe_keys(model, tokenizer, TEXT, TOKENS, config=DiffKVConfig.paper())
    assert list(probe.kl) == [8, 6, 4, 2] and probe.tokens == TOKENS and probe.seconds > 0
    ids = torch.tensor([tokenizer(TEXT).input_ids[:TOKENS]])
    for bits in (6, 4, 2):
        assert probe.kl[bits] == pytest.approx(kl_of_rounded_keys(model, ids, bits), rel=1e-3)


def test_the_default_text_is_long_enough() -> None:
    probe = probe_keys(load(), AutoTokenizer.from_pretrained(TINY_LM), bits=(4,), config=DiffKVConfig.paper())
    assert probe.tokens == 200 and 0 < probe.kl[4] < FRAGILE_KL


@pytest.mark.parametrize("config", [None, DiffKVConfig.paper()], ids=["default", "plain"])
def test_a_trained_model_survives(config: DiffKVConfig | None) -> None:
    probe = probe_keys(load(), tokens=TOKENS, bits=(8, 4), config=config)
    assert probe.survives(8) and probe.survives(4)


@pytest.mark.parametrize("broken", [scaled, biased])
def test_outlier_channels_are_found(broken) -> None:
    probe = probe_keys(broken(), tokens=TOKENS, bits=(8, 4), config=DiffKVConfig.paper())
    assert probe.survives(8) and not probe.survives(4)
    assert "4 bits" in str(probe) and str(probe).count("(fragile)") == 1


def test_scaled_channels_change_nothing_without_quantisation() -> None:
    ids = torch.randint(128, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(scaled()(ids).logits, load()(ids).logits, atol=1e-3, rtol=1e-3)


def test_centred_keys_survive_a_bias() -> None:
    probe = probe_keys(biased(), tokens=TOKENS, bits=(4,))
    assert probe.survives(4)


def test_groups_of_the_configuration_are_used() -> None:
    model = biased()
    # the outlier channels are in the second and in the last quarter
    configs = DiffKVConfig.paper(), DiffKVConfig.paper(low=Precision(4, 2, 4, 1))
    kl = [probe_keys(model, tokens=TOKENS, bits=(4,), config=config).kl[4] for config in configs]
    assert kl[1] < 0.5 * kl[0]


def test_the_low_level_is_left_out_of_fragile_models() -> None:
    levels = DiffKVConfig(alpha_high=1.0)
    assert without_fragile_level(levels, load()) == levels
    model = biased()
    config = without_fragile_level(DiffKVConfig(alpha_high=1.0, window=8, **PLAIN), model)
    assert config == DiffKVConfig(alpha_high=0.0, window=8, **PLAIN)
    cache = DiffKVCache(model.config, config)
    model.set_attn_implementation("diffkv")
    model(torch.randint(128, (1, 100)), **passing(cache))
    tokens = cache.memory().tokens
    assert tokens["low"] == tokens["pruned"] == 0 and tokens["high"] == 6 * 2 * (100 - 8 - config.sinks)


def test_pruning_stays_as_it_was() -> None:
    config = without_fragile_level(DiffKVConfig(alpha_high=3.0, alpha_low=0.04, **PLAIN), biased())
    assert (config.alpha_low, config.alpha_high) == (0.04, 0.04)


@pytest.mark.parametrize(
    "fields",
    [
        {**PLAIN, "low": Precision(8, 2)},
        {**PLAIN, "high": Precision(4, 4)},
        {**PLAIN, "alpha_high": 0.0},
        {"low": Precision(4, 2)},
    ],
    ids=["8-bit keys", "the same keys", "no low level", "centred"],
)
def test_levels_that_hold_the_keys_stay(fields: dict) -> None:
    assert without_fragile_level(DiffKVConfig(**fields), biased()) == DiffKVConfig(**fields)


def test_other_policies_get_one_precision() -> None:
    fields = {"policy": "leankv", "policy_options": {}, **PLAIN}
    config = without_fragile_level(DiffKVConfig(**fields), biased())
    assert config == DiffKVConfig(low=Precision(8, 4), **fields)


def test_a_probe_needs_the_model() -> None:
    for given in (load().config, "Qwen/Qwen2.5-7B"):
        with pytest.raises(ValueError, match="pass the model itself, not its configuration or name"):
            without_fragile_level(DiffKVConfig(), given)
        with pytest.raises(ValueError, match="pass the model itself, not its configuration or name"):
            probe_keys(given)


def test_bad_input() -> None:
    model, tokenizer = load(), AutoTokenizer.from_pretrained(TINY_LM)
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        probe_keys(model, text="abc")
    with pytest.raises(ValueError, match="the text has [0-9]+ tokens but 200 are needed"):
        probe_keys(model, tokenizer, "abc")
    with pytest.raises(ValueError, match="tokens=3 must be at least 16"):
        probe_keys(model, tokens=3)
    with pytest.raises(ValueError, match="k_bits=9 is not supported"):
        probe_keys(model, bits=(9,))
    with pytest.raises(KeyError):
        KeyProbe({8: 0.0}, 200, 1.0).survives(4)
