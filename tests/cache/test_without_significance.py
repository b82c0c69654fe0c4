"""Whole models whose configurations never choose between tokens, and which keep no sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import assert_equal_contents, assert_equals_simulation, captured, model_of, simulation_of, started, tokens

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.cache.io import JSON_NAME, CacheFileError, _checksum

UNIFORM = {"high": Precision(5, 3), "low": Precision(5, 3), "alpha_high": 0.0}
HEADS = {"head_precisions": (("K5V3", "K3V2"), ("K4V3", "K5V3"))}
# thresholds choose the tokens of the second layer
ONE_LAYER = {"head_precisions": (("K5V3", "K3V2"), None), "alpha_high": 1.0, "alpha_low": 0.5}


@pytest.mark.parametrize("fields", [UNIFORM, HEADS, ONE_LAYER], ids=["uniform", "heads", "one layer"])
def test_a_model_with_forks_crops_and_saved_caches(tmp_path: Path, fields: dict) -> None:
    config = DiffKVConfig.paper(**fields, window=8, sinks=2, metadata_bits=32, page_bytes=512)
    model = model_of()
    with captured() as layers:
        run = started(model, (50, 21, 3), config)
        simulations = {index: simulation_of(config.of_layer(index), layer) for index, layer in layers.items()}
        run.steps(tokens(3, 12))
        for index, layer in layers.items():
            for start, stop in ((0, 50), *((at, at + 1) for at in range(50, 62))):
                query, key, value, valid, _ = layer.part(start, stop)
                simulations[index].forward(query, key, value, valid, **layer.options)
    assert_equals_simulation(run.cache, simulations)
    fork = run.on(run.cache.fork(1)[0])
    run.cache.save_pretrained(tmp_path, model)
    loaded = run.on(DiffKVCache.from_pretrained(tmp_path, model))
    for each in (run, fork, loaded):
        each.select([2, 0, 0])
        each.cache.activate_past_recording()
        each.steps(tokens(3, 5))
        each.crop(3)
        each.steps(tokens(3, 9, 2))
        each.crop(0)
    for other in (fork, loaded):
        assert_equal_contents(other.cache, run.cache)
    with pytest.raises(ValueError, match="tracks no significance.*alpha_high"):
        run.cache.significance(0)
    assert len(run.cache.stores.all) == (1 if fields is UNIFORM else 2)


def test_caches_saved_with_scores_are_refused(tmp_path: Path) -> None:
    model = model_of()
    started(model, (30,), DiffKVConfig.paper(**UNIFORM)).cache.save_pretrained(tmp_path)
    content = json.loads((tmp_path / JSON_NAME).read_text())
    content |= {"format_version": 3}
    del content["checksum"]
    (tmp_path / JSON_NAME).write_text(json.dumps({**content, "checksum": _checksum(content)}))
    with pytest.raises(CacheFileError, match="scores and positions.*run the model on its text again"):
        DiffKVCache.from_pretrained(tmp_path, model)
