"""Vision-language models with an image in every prompt: compressed in their text side, equal when lossless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import COMMON, PRECISIONS_OF_LATENTS, ragged_prompts
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, DynamicCache, PreTrainedModel
from vision_families import IMAGE_TOKEN, VISION, VISION_FAMILIES, images

from hf_diffkv import DiffKVConfig, UnsupportedModelError
from hf_diffkv.compat import passing

LENGTHS = (90, 41, 30)
NEW_TOKENS = 16
WINDOW = 16
LOSSLESS = DiffKVConfig.lossless(window=WINDOW)
COMPRESSED = DiffKVConfig(alpha_high=1.2, alpha_low=0.5, window=WINDOW)
OF_LATENTS = replace(COMPRESSED, **PRECISIONS_OF_LATENTS)

pytestmark = pytest.mark.oldest


def build(name: str) -> PreTrainedModel:
    """A random model with eager attention."""
    config = CONFIG_MAPPING[name](**VISION_FAMILIES[name].options)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model


def prompts(name: str, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts with an image each, 25 tokens before their end."""
    family = VISION_FAMILIES[name]
    ids, mask = ragged_prompts(LENGTHS)
    ids = ids.where(ids < IMAGE_TOKEN, 7)
    ids[:, -25 : family.image_tokens - 25] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "attention_mask": mask, **images(family, len(LENGTHS), seed)}
    if family.token_types is not None:
        inputs[family.token_types] = (ids == IMAGE_TOKEN).long()
    return inputs


def greedy(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Sequences [batch, tokens], logits [new tokens, batch, vocabulary], and the cache that was used."""
    result = model.generate(
        **inputs,
        **{"max_new_tokens": NEW_TOKENS, **options},
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return result.sequences, torch.stack(result.logits), result.past_key_values


@pytest.mark.parametrize("name", VISION_FAMILIES)
@pytest.mark.sampled(100)
def test_text_side(name: str) -> None:
    model, inputs, compressed = build(name), prompts(name), list(VISION_FAMILIES[name].compressed)
    text_config = model.config.get_text_config(decoder=True)
    expected = greedy(model, inputs, **passing(DynamicCache(config=text_config)))
    other = greedy(model, prompts(name, seed=1), max_new_tokens=1)
    assert (other[1][0] - expected[1][0]).abs().max() > 1e-3, "the image does not matter"

    lossless = greedy(model, inputs, cache_implementation="diffkv", cache_config=LOSSLESS.to_dict())
    assert torch.equal(lossless[0], expected[0])
    torch.testing.assert_close(lossless[1], expected[1], rtol=0, atol=1e-4)
    assert lossless[2].compressed_layers() == compressed
    lossless[2].check_integrity()
    assert text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "eager"

    config = OF_LATENTS if VISION_FAMILIES[name].latents else COMPRESSED
    lossy = greedy(model, inputs, cache_implementation="diffkv", cache_config=config.to_dict())
    lossy[2].check_integrity()
    assert lossy[2].compressed_layers() == compressed
    for layer_idx in compressed:
        levels = lossy[2].levels(layer_idx)
        assert ((levels == 0) | (levels == 1)).any() and (levels == 2).any()
    torch.testing.assert_close(lossy[1][0], expected[1][0], rtol=0, atol=1e-4)  # the prompt is read uncompressed
    assert (lossy[1][1:] - expected[1][1:]).abs().max() > 1e-3, "compression must show"


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 40}, {"prompt_lookup_num_tokens": 3}], ids=["chunks", "lookup"]
)
@pytest.mark.parametrize("name", VISION_FAMILIES)
@pytest.mark.sampled(100)
def test_several_tokens_after_others(name: str, options: dict[str, int]) -> None:
    """A single prompt has no padding, so that only its attention says what later tokens see."""
    model = build(name)
    inputs = {key: part[: part.shape[0] // len(LENGTHS)] for key, part in prompts(name).items()}
    dense = DynamicCache(config=model.config.get_text_config(decoder=True))
    expected = greedy(model, inputs, **passing(dense), **options)
    lossless = greedy(model, inputs, cache_implementation="diffkv", cache_config=LOSSLESS.to_dict(), **options)
    assert torch.equal(lossless[0], expected[0])
    torch.testing.assert_close(lossless[1], expected[1], rtol=0, atol=1e-4)


TEXT = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "git": (
        {**TEXT, "num_hidden_layers": 2, "num_attention_heads": 4, "vision_config": VISION},
        "git computes text attention itself",
    ),
    "mllama": (
        {
            "text_config": {**COMMON, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2},
        },
        "keeps keys and values of images in layers that texts skip",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_forward(name: str) -> None:
    options, message = REFUSED[name]
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**options)).eval()
    with pytest.raises(UnsupportedModelError, match=message):
        model.generate(torch.arange(3, 30)[None], max_new_tokens=2, cache_implementation="diffkv")
    assert model.generate(torch.arange(3, 30)[None], max_new_tokens=2).shape == (1, 29)
