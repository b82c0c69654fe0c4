"""Losses by gradients, against dense caches with a head's keys or values replaced by nearly the same ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv.cache.attention import diffkv_attention
from hf_diffkv.calibration.gradients import GRADIENTS, Following, random_signs
from hf_diffkv.calibration.watched import run_prompt, watched_attention, watching
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.errors import EvaluationError
from tests.tiny_models import LATENT, tiny_model

COUNTED = [2, 3, 5, 8, 9]
IDS = torch.randint(3, 128, (130,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPT, FOLLOWING = IDS[:120], IDS[120:]
# size of changes, so small that terms of third order, and the roundings of norms in float32, are below a fiftieth
SMALL = 1e-4
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "gemma3_text": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "gpt_oss": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "qwen3_moe": {"experts_implementation": "eager"},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 4},
}


def all_signs(vocabulary: int) -> Tensor:
    """Returns an orthogonal basis of all positions and tokens, scaled so that its mean square is that of signs."""
    count = len(COUNTED) * vocabulary
    return count**0.5 * torch.eye(count).view(count, len(COUNTED), vocabulary)


def changed(layer: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns keys and values that differ a little from those of the prompt."""
    return tuple(
        tensor[0] * (1 + SMALL * torch.randn(tensor[0].shape, generator=generator))
        for tensor in (layer.keys, layer.values)
    )


@torch.no_grad()
def expected_loss(model: PreTrainedModel, layer: int, head: int, keys: Tensor | None, values: Tensor | None) -> float:
    """Returns the mean KL behind a dense prompt, one of whose heads has these keys or values."""

    def log_probabilities(changes: bool) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(torch.tensor([PROMPT]), **passing(cache))
        held = cache.layers[layer]
        # Transformers has latents where others have keys
        names = ("values", "keys") if "deepseek" in model.config.model_type else ("keys", "values")
        for name, tensor in zip(names, (keys, values)):
            if changes and tensor is not None:
                getattr(held, name)[0, head] = tensor
        return model(torch.tensor([FOLLOWING]), **passing(cache)).logits[0, COUNTED].double().log_softmax(-1)

    exact, other = log_probabilities(False), log_probabilities(True)
    return float((exact.exp() * (exact - other)).sum(-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_small_changes_of_single_heads(family: str) -> None:
    model = tiny_model(family, "eager", dtype=torch.float64, num_hidden_layers=4, **FAMILIES[family])
    indices = [0, 2] if "layer_types" in FAMILIES[family] else [0, 1, 2, 3]
    with watching(model):
        cached, watched = run_prompt(model, PROMPT)
        assert [cached.index(layer) for layer in watched] == indices
        following = Following(model, cached, FOLLOWING, COUNTED, all_signs(128))
    generator = torch.Generator().manual_seed(0)
    for index in (0, len(watched) - 1):
        keys, values = changed(watched[index], generator)
        of_keys, of_values = following.losses(index, keys, values)
        assert len(of_keys) == len(of_values) == len(keys)
        for head in range(len(keys)):
            for found, arguments in ((of_keys, (keys[head], None)), (of_values, (None, values[head]))):
                expected = expected_loss(model, indices[index], head, *arguments)
                assert expected > 0 and found[head] == pytest.approx(expected, rel=0.03)


@torch.no_grad()
def test_layers_that_others_read() -> None:
    """Every reader of a layer's keys and values loses by their change."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 24}
    options = {"num_hidden_layers": 8, "num_kv_shared_layers": 4, "global_head_dim": 16, "tie_word_embeddings": True}
    sizes = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
    model = tiny_model("gemma4_text", "eager", dtype=torch.float64, **kinds, **options, **sizes)
    with watching(model):
        cached, watched = run_prompt(model, PROMPT)
        following = Following(model, cached, FOLLOWING, COUNTED, all_signs(128))
    shared = [index for index, layer in enumerate(watched) if len(layer.readings) > 1]
    assert shared
    keys, values = changed(watched[shared[0]], torch.Generator().manual_seed(0))
    found = following.losses(shared[0], keys, values)[1][1]
    expected = expected_loss(model, cached.index(watched[shared[0]]), 1, None, values[1])
    assert found == pytest.approx(expected, rel=0.03)


@torch.no_grad()
def test_random_signs_estimate_the_loss() -> None:
    model = tiny_model("llama", "eager", num_hidden_layers=2)
    found = []
    with watching(model):
        for signs in (all_signs(128), None, random_signs(FOLLOWING, 5, 128, 500)):
            cached, watched = run_prompt(model, PROMPT)
            following = Following(model, cached, FOLLOWING, COUNTED, signs)
            keys, values = changed(watched[0], torch.Generator().manual_seed(0))
            found.append(torch.tensor(following.losses(0, keys, values)))
    exact, few, many = found
    # the square of a normal variable has a relative deviation of sqrt(2)
    assert ((many / exact - 1).abs() < 5 * (2 / 500) ** 0.5).all()
    assert ((few / exact - 1).abs() < 5 * (2 / GRADIENTS) ** 0.5).all() and not torch.equal(few, exact)


def test_signs_depend_on_the_tokens_alone() -> None:
    signs = random_signs(FOLLOWING, 5, 128)
    torch.manual_seed(5)
    assert torch.equal(signs, random_signs(FOLLOWING, 5, 128)) and signs.shape == (GRADIENTS, 5, 128)
    assert set(signs.unique().tolist()) == {-1, 1} and signs.float().mean().abs() < 0.1
    assert not torch.equal(signs, random_signs(PROMPT, 5, 128))


@torch.no_grad()
def test_a_model_without_gradients() -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    mlp = model.model.layers[1]
    mlp.register_forward_hook(lambda module, given, output: output.detach())
    with watching(model):
        cached, _ = run_prompt(model, PROMPT)
        with pytest.raises(EvaluationError, match="LlamaForCausalLM has none"):
            Following(model, cached, FOLLOWING, COUNTED)


@pytest.mark.parametrize("masked", [False, True])
def test_few_queries_attend_as_ever(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, tokens, 16, generator=generator) for heads, tokens in ((6, 5), (2, 40), (2, 40))
    )
    mask = torch.rand(1, 1, 5, 40, generator=generator) < 0.5 if masked else None
    module = torch.nn.Module()
    found, _ = watched_attention(module, query, key, value, mask, scaling=0.3)
    expected, _ = diffkv_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
