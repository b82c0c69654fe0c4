"""One default: a configuration that chooses no levels is what `DiffKVCache(model)` uses where nothing was measured."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from runs import assert_equal_contents
from tiny_models import greedy, ragged_prompts, tiny_model

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.resolve import resolve_config
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.heads import lookup


def written(bits: tuple[int, int], low_bits: tuple[int, int], **fields: Any) -> dict[str, Any]:
    """What `to_dict` writes of a configuration with these precisions; `fields` are all others."""
    levels = zip(("high", "low"), (bits, low_bits))
    precisions = {name: {"k_bits": k, "v_bits": v, "k_groups": 1, "v_groups": 1} for name, (k, v) in levels}
    others = {"policy": "diffkv", "policy_options": {}, "observation_window": None}
    rest = {"page_bytes": None, "max_bytes": None, "cuda_graphs": True}
    return {**precisions, **others, **rest, **fields}


WIDE = {"window": 64, "adaptive_rounding": False, "metadata_bits": 32}
OURS = {"sinks": 4, "rotate": True, "center": True}
PAPERS = {"sinks": 0, "rotate": False, "center": False}
TWO_LEVELS = written((8, 4), (4, 2), alpha_high=1.0, alpha_low=0.0, **WIDE, **OURS)
PAPER = written((8, 4), (4, 2), alpha_high=1.0, alpha_low=0.0, **WIDE, **PAPERS)
LOSSLESS = written((16, 16), (16, 16), alpha_high=0.0, alpha_low=0.0, **WIDE, **PAPERS)
BALANCED = written(
    (5, 4), (5, 4), alpha_high=0.0, alpha_low=0.0, window=32, adaptive_rounding=True, metadata_bits=16, **OURS
)
# what two levels have anyway, so that only naming it makes a difference
CHOSEN: list[dict[str, Any]] = [
    *({"high": "K8V4"}, {"low": "K4V2"}, {"alpha_high": 1.0}, {"alpha_low": 0.0}, {"head_precisions": None}),
    *({"policy": "diffkv"}, {"policy_options": {}}),
]


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "kept"))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"window": 64},
        {"max_bytes": 8_000_000, "until_full": "auto"},
        {"metadata_bits": 32, "adaptive_rounding": False},
    ],
    ids=str,
)
def test_without_levels_it_is_balanced(more: dict[str, Any], tmp_path: Path) -> None:
    expected = {**BALANCED, **more}
    (tmp_path / "diffkv_config.json").write_text(json.dumps(more))
    made = [DiffKVConfig(**more), DiffKVConfig.from_dict(more), DiffKVConfig.from_json(json.dumps(more))]
    made += [DiffKVConfig.from_pretrained(tmp_path), DiffKVConfig.preset("balanced", **more)]
    model = tiny_model("llama")
    made += [DiffKVConfig.for_model(model, **more), DiffKVCache(model, **more).config]
    made += [DiffKVCache(model.config, more).config, resolve_config(model, DiffKVConfig(), more)]
    options = "+".join(f"{name}={json.dumps(value)}" for name, value in more.items())
    made.append(get_method(f"diffkv:{options}" if options else "diffkv").config_for(model))
    assert [config.to_dict() for config in made] == [expected] * len(made)


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
@pytest.mark.parametrize("more", [{}, {"max_bytes": 8_000_000, "until_full": "auto"}, {"window": 7}], ids=str)
def test_with_a_level_it_has_two(chosen: dict[str, Any], more: dict[str, Any]) -> None:
    expected = {**TWO_LEVELS, **more}
    fields = {**more, **chosen}
    assert DiffKVConfig(**fields).to_dict() == DiffKVConfig.from_dict(fields).to_dict() == expected
    assert DiffKVCache(tiny_model("llama").config, **fields).config.to_dict() == expected


def test_levels_by_position() -> None:
    assert DiffKVConfig("K8V4").to_dict() == DiffKVConfig("K8V4", "K4V2", 1, window=64).to_dict() == TWO_LEVELS


@pytest.mark.parametrize("more", [{}, {"window": 5}, {"metadata_bits": 16}, {"alpha_high": 3.0}], ids=str)
def test_the_papers_and_the_lossless_are_as_they_were(more: dict[str, Any]) -> None:
    assert DiffKVConfig.paper(**more).to_dict() == {**PAPER, **more}
    assert DiffKVConfig.lossless(**more).to_dict() == {**LOSSLESS, **more}


@pytest.mark.parametrize("saved", [TWO_LEVELS, PAPER, LOSSLESS, BALANCED], ids=["two", "paper", "lossless", "balanced"])
def test_what_was_saved_keeps_its_meaning(saved: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "diffkv_config.json").write_text(json.dumps(saved))
    config = DiffKVConfig.from_pretrained(tmp_path)
    assert config.to_dict() == DiffKVConfig.from_json(json.dumps(saved)).to_dict() == saved
    # a pickle sets the fields without the constructor
    earlier = DiffKVConfig.__new__(DiffKVConfig)
    vars(earlier).update(vars(config))
    for same in (earlier, copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and vars(same).keys() == vars(config).keys()
        assert dataclasses.replace(same, window=9).to_dict() == {**saved, "window": 9}


@pytest.mark.parametrize("max_bytes", [8_000_000, 74_000])
def test_a_budget_holds_the_same_bytes_in_every_way(max_bytes: int) -> None:
    """The smaller one is full."""
    model = tiny_model("llama")
    ids, mask = ragged_prompts((150, 90))
    fields = {"max_bytes": max_bytes, "page_bytes": 512}
    expected, *others = (
        DiffKVCache(model, **fields),
        DiffKVCache(model, DiffKVConfig(**fields)),
        DiffKVCache(model, DiffKVConfig(page_bytes=512), max_bytes=max_bytes),
        DiffKVCache(model.config, fields),
    )
    texts = [greedy(model, ids, mask, 20, **passing(cache)).sequences for cache in (expected, *others)]
    for config in (fields, DiffKVConfig(**fields)):
        output = greedy(model, ids, mask, 20, cache_implementation="diffkv", cache_config=config)
        others.append(output.past_key_values)
        texts.append(output.sequences)
    names = {name for layer in expected.memory().layers for name in layer.precisions}
    assert (names != {"K8V8"}) == (max_bytes == 74_000)
    for cache in others:
        assert cache.config == expected.config
        assert cache.memory() == expected.memory()
        assert_equal_contents(cache, expected)
    assert all((text == texts[0]).all() for text in texts)
