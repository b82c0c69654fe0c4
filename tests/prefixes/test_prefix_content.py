"""Prefixes of prompts with images are found by the images as well: placeholders have the same ids everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from hf_diffkv import DiffKVConfig, PrefixStore
from hf_diffkv.compat import passing
from hf_diffkv.prefixes.content import ContentKeys, content_digest

sys.path.append(str(Path(__file__).parent.parent / "families"))
from test_vision import build
from vision_families import IMAGE_TOKEN, VISION_FAMILIES, images

LOSSLESS = DiffKVConfig.lossless(window=16)
BEFORE, AFTER = 20, 15


def prompt(name: str) -> Tensor:
    """[1, tokens], with an image in the middle."""
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randint(3, IMAGE_TOKEN, (1, n), generator=generator) for n in (BEFORE, AFTER))
    return torch.cat([before, torch.full((1, VISION_FAMILIES[name].image_tokens), IMAGE_TOKEN), after], dim=1)


def processed(name: str, ids: Tensor, seed: int) -> dict[str, Any]:
    """What a processor gives for a prompt with an image."""
    family = VISION_FAMILIES[name]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images(family, 1, seed)}
    if family.token_types is not None:
        given[family.token_types] = (ids == IMAGE_TOKEN).long()
    return given


def generate(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> Tensor:
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_another_image_is_another_prefix(name: str) -> None:
    model, ids = build(name), prompt(name)
    store = PrefixStore(model, LOSSLESS)
    first, second = (processed(name, ids, seed) for seed in (0, 1))
    texts = [generate(model, inputs) for inputs in (first, second)]
    cache = store.lookup(ids, first)
    text = generate(model, first, **passing(cache))
    assert torch.equal(text, texts[0]) and store.insert(text, cache, first)
    assert store.lookup(ids[:, : BEFORE + 5], second).get_seq_length() == 0

    longer = torch.cat([text, ids[:, :7]], dim=1)
    assert store.lookup(longer, processed(name, longer, 1)).get_seq_length() == 0
    assert not store.contains(text[:, :-1], second) and store.contains(text[:, :-1], first)
    # what the processor gives for every token has changed, the image has not
    again = processed(name, longer, 0)
    found = store.lookup(longer, again)
    assert found.get_seq_length() == text.shape[1] - 1
    without = {key: value for key, value in again.items() if key not in images(VISION_FAMILIES[name], 1)}
    assert torch.equal(generate(model, without, **passing(found)), generate(model, again))


def test_the_text_before_an_image_is_shared() -> None:
    model, ids = build("llava"), prompt("llava")
    store = PrefixStore(model, LOSSLESS)
    assert store.prefill(ids[:, :BEFORE])
    for seed in (0, 1):
        inputs = processed("llava", ids, seed)
        cache = store.lookup(ids, inputs)
        assert cache.get_seq_length() == BEFORE
        assert torch.equal(generate(model, inputs, **passing(cache)), generate(model, inputs))
        assert store.prefill(ids, inputs)
        longer = torch.cat([ids, ids[:, :3]], dim=1)
        assert store.lookup(longer, processed("llava", longer, seed)).get_seq_length() == ids.shape[1]
    assert len(store) == 3


def test_placeholders_without_content_are_refused() -> None:
    model, ids = build("llava"), prompt("llava")
    store = PrefixStore(model, LOSSLESS)
    inputs = processed("llava", ids, 0)
    cache = store.lookup(ids, inputs)
    text = generate(model, inputs, **passing(cache))
    calls = [
        lambda: store.lookup(ids),
        lambda: store.insert(text, cache),
        lambda: store.prefill(ids),
        lambda: store.look_ahead([ids[:, :BEFORE], ids]),
        lambda: ids in store,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"placeholders.*content=inputs.*content=\{\}"):
            call()
    assert len(store) == 0 and store.stats.lookups == 1
    with pytest.raises(ValueError, match="contents has 1 entries for 2 prompts"):
        store.look_ahead([ids, ids], contents=[inputs])
    assert store.look_ahead([ids, ids], contents=[inputs, {}])[0].tokens == 0
    assert store.lookup(ids, {}).get_seq_length() == 0


def test_texts_need_no_content() -> None:
    keys = ContentKeys(tiny_model("llama").config)
    ids = torch.arange(40)
    assert keys.placeholders == [] and not keys.have_placeholders(ids)
    assert keys.names(ids, None, [10, 40]) == keys.names(ids, {"pixel_values": torch.ones(1)}, [10, 40])
    config = build("llava").config
    for name in ("image_token_index", "image_token_id"):
        vars(config).pop(name, None)
    unknown = ContentKeys(config)
    with pytest.raises(ValueError, match="placeholders"):
        unknown.names(ids, None, [40])
    assert unknown.names(ids, {}, [40]) != keys.names(ids, None, [40])


def test_digests_of_content() -> None:
    pixels = torch.arange(12.0).reshape(3, 4)
    same = [
        {"pixel_values": pixels},
        {"pixel_values": pixels.clone(), "input_ids": torch.ones(3), "attention_mask": torch.ones(2)},
        {"pixel_values": pixels.t().contiguous().t(), "image_sizes": None},
        {"pixel_values": pixels.numpy()},
    ]
    assert len({content_digest(content) for content in same}) == 1
    other = [
        {},
        {"pixel_values": pixels.reshape(4, 3)},
        {"pixel_values": pixels.int()},
        {"pixel_values": pixels.bfloat16()},
        {"pixel_values_videos": pixels},
        {"pixel_values": [pixels]},
        {"pixel_values": [pixels[0], pixels[1:]]},
        {"pixel_values": pixels, "sizes": [(3, 4)]},
        {"pixel_values": pixels, "sizes": [(3,), (4,)]},
        {"pixel_values": pixels, "sizes": np.array([3, 4])},
        {"pixel_values": pixels + torch.eye(3, 4) * 1e-6},
    ]
    assert len({content_digest(content) for content in [*other, same[0]]}) == len(other) + 1
    with pytest.raises(ValueError, match="the processor's output"):
        content_digest({"images": object()})
