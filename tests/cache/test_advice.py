"""Errors whose advice is followed, and warnings that must not appear where they would be wrong."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tiny_models import tiny_model
from torch import Tensor
from transformers import StoppingCriteria

from hf_diffkv import CacheInUseError, DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

LOSSLESS = DiffKVConfig.lossless(window=16)
IDS = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))


def generate(model: Any, ids: Tensor | None = IDS, **options: Any) -> Tensor:
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, **options})


class Hold(StoppingCriteria):
    """Holds a call after its first token until told to continue."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.reached.set()
        assert self.go_on.wait(60)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_a_cache_in_use() -> None:
    """It is not forked during a running call, nor does anything advise doing so; earlier copies run alongside it."""
    model = tiny_model("llama")
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, **passing(cache))
    expected = generate(model, text)
    twin, hold, said = copy.deepcopy(cache), Hold(), []

    def run() -> None:
        said.append(generate(model, text, **passing(cache), stopping_criteria=[hold]))

    thread = threading.Thread(target=run)
    thread.start()
    assert hold.reached.wait(60)
    try:
        with pytest.raises(CacheInUseError, match=r"copy\.deepcopy\(cache\)") as refused:
            generate(model, text, **passing(cache))
        assert "fork" not in str(refused.value)
        with pytest.raises(CacheInUseError, match="after it has returned"):
            cache.fork(2)
        assert torch.equal(generate(model, text, **passing(twin)), expected)
    finally:
        hold.go_on.set()
        thread.join(60)
    assert torch.equal(said[0], expected)
    cache.check_integrity()
    for fork in cache.fork(2):
        assert torch.equal(generate(model, said[0], **passing(fork)), generate(model, said[0]))


@pytest.mark.parametrize("options", [{"num_return_sequences": 3, "num_beams": 3}, {"num_beams": 3}, {}], ids=str)
def test_more_sequences_than_a_cache_holds(options: dict[str, Any]) -> None:
    """A call repeats the cache for its beams, and the error names the method that does so for further prompts."""
    model = tiny_model("llama")
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, **passing(cache))
    more = text.repeat(3, 1)
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        generate(model, more, **options, **passing(cache))
    if not options:
        cache.batch_repeat_interleave(3)
        text = more
    assert torch.equal(generate(model, text, **options, **passing(cache)), generate(model, text, **options))
    assert cache.rows() == 3


def test_embeddings_that_do_not_continue_a_cache() -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config, LOSSLESS)
    embed = model.get_input_embeddings()
    said = generate(model, None, inputs_embeds=embed(IDS), **passing(cache))
    held, new = cache.get_seq_length(), IDS[:, :7]
    mask = torch.ones(1, held + 7, dtype=torch.int64)
    # the new tokens alone are refused, whatever the mask
    for options in ({}, {"attention_mask": mask}):
        with pytest.raises(ValueError, match="inputs_embeds has 7.*embeddings of the whole text") as refused:
            generate(model, None, inputs_embeds=embed(new), **options, **passing(cache))
        assert "attention_mask" not in str(refused.value) and cache.get_seq_length() == held
    whole = torch.cat([IDS, said, new], dim=1)
    text = generate(model, None, inputs_embeds=embed(whole), **passing(cache))
    assert torch.equal(text, generate(model, None, inputs_embeds=embed(whole)))


def test_embeddings_that_end_with_padding() -> None:
    model = tiny_model("llama")
    embeds, mask = model.get_input_embeddings()(IDS.repeat(2, 1)), torch.ones(2, 40, dtype=torch.int64)
    mask[1, -5:] = 0
    with pytest.raises(ValueError, match="in front of the prompts") as refused:
        generate(model, None, inputs_embeds=embeds, attention_mask=mask, cache_implementation="diffkv")
    assert "tokenizer" not in str(refused.value)
    embeds[1], mask[1] = embeds[1].roll(5, 0), mask[1].roll(5, 0)
    options = {"inputs_embeds": embeds, "attention_mask": mask}
    said = generate(model, None, **options, **passing(DiffKVCache(model.config, LOSSLESS)))
    assert torch.equal(said, generate(model, None, **options))


def test_an_assistant_is_not_warned_of_options_that_are_not_its_own() -> None:
    model, assistant = tiny_model("llama"), tiny_model("llama", seed=2)
    options = {"cache_implementation": "diffkv", "cache_config": {"max_bytes": 1 << 20}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        generate(model, assistant_model=assistant, **options)
    assert not [warning for warning in said if "cache_config" in str(warning.message)]
    with pytest.warns(UserWarning, match="no effect"):
        generate(model, cache_config={"max_bytes": 1 << 20})


@pytest.mark.parametrize("offload", ["host", "disk"])
def test_a_saved_cache_for_an_offloaded_model(offload: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    cache = DiffKVCache(model.config, LOSSLESS)
    text = generate(model, **passing(cache))
    expected = generate(model, text)
    cache.save_pretrained(tmp_path / "cache")
    cache.save_pretrained(tmp_path / "with_weights", model)
    if offload == "host":
        cpu_offload(model, torch.device("cpu"))
    else:
        disk_offload(model, tmp_path / "weights", torch.device("cpu"))
    assert next(model.parameters()).is_meta
    loaded = DiffKVCache.from_pretrained(tmp_path / "cache", model)
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert torch.equal(generate(model, text, **passing(loaded)), expected)
    with pytest.raises(ValueError, match="offloaded.*load it without offloading"):
        DiffKVCache.from_pretrained(tmp_path / "with_weights", model)
