"""Key biases: the bias added back equals the model's, and keys are stored without it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

LENGTH, FURTHER = 90, 20


def biased(scale: float) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=97, num_key_value_heads=2, head_dim=16, initializer_range=0.2, **sizes)
    model = Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=scale)
    return model


def test_the_bias_of_turned_keys(script: Callable[[str], ModuleType]) -> None:
    key_bias, model = script("key_bias"), biased(5.0)
    ids = tuple(torch.randint(2, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist())
    found = key_bias.turned_bias(model, model.model.layers[0], LENGTH)
    with torch.no_grad():
        whole = key_bias.read_prompt(model, ids).layers[0][2]
        torch.nn.init.zeros_(model.model.layers[0].self_attn.k_proj.bias)
        without = key_bias.read_prompt(model, ids).layers[0][2]
    torch.testing.assert_close(whole - without, found, atol=1e-4, rtol=1e-4)


def test_rows(script: Callable[[str], ModuleType]) -> None:
    key_bias, model = script("key_bias"), biased(20.0)
    ids = tuple(torch.randint(2, 97, (LENGTH + FURTHER,), generator=torch.Generator().manual_seed(1)).tolist())
    with torch.no_grad():
        rows = list(
            key_bias.measure(model, ids, [60, LENGTH], ["diffkv:lossless", "diffkv:K4V4+sinks=0+window=1"], FURTHER)
        )
    assert [(row["length"], row["keys"]) for row in rows] == [(n, k) for n in (60, LENGTH) for k in KEYS * 2]
    for exact, exact_without, coarse, without in (rows[:4], rows[4:]):
        assert max(exact["kl"], exact_without["kl"]) < 1e-5
        assert without["kl"] < 0.5 * coarse["kl"]


KEYS = ["with bias", "without bias"]
