"""Two processes find what one process finds: each for its half of the heads, or for its half of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import torchrun
from tensor_parallel_run import (
    CONFIGS,
    GREEDY,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    called,
    dense,
    generated,
    prompts,
    saved_and_loaded,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache

SCRIPT = Path(__file__).with_name("tensor_parallel_run.py")
RANKS = 2
MODELS = ("llama", "qwen3")
OPTIONS = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}

pytestmark = [pytest.mark.oldest, pytest.mark.slow]


class Found:
    """A model, and what each rank reported of it."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Results of all models, which the same processes run one after the other."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    models = {name: tiny_model(name, dtype=torch.float64, num_hidden_layers=LAYERS, **OPTIONS) for name in MODELS}
    for name, model in models.items():
        model.save_pretrained(folders[name] / "model")
    windowed().save_pretrained(folders["llama"] / "windowed")
    torchrun(RANKS, SCRIPT, *folders.values())
    return {name: Found(models[name], folders[name]) for name in MODELS}


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest, all_found: dict[str, Found]) -> Found:
    return all_found[request.param]


def windowed() -> PreTrainedModel:
    """A model whose stages each have a sliding window before a full layer."""
    kinds = ["sliding_attention", "full_attention"] * RANKS
    return tiny_model("gemma3_text", dtype=torch.float64, num_hidden_layers=4, layer_types=kinds, **OPTIONS)


def assert_same(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    """The heads of all ranks in order are those of one process; values up to the order of sums between ranks."""
    assert all(rank["levels"].shape[2] == KV_HEADS // RANKS for rank in ranks)
    assert torch.equal(torch.cat([rank["levels"] for rank in ranks], 2), one["levels"])
    assert all(rank.keys() == one.keys() for rank in ranks)
    for name in ("keys", "values", *(["sums"] if "sums" in one else [])):
        torch.testing.assert_close(torch.cat([rank[name] for rank in ranks], 2), one[name], rtol=1e-6, atol=1e-6)
    assert {name: sum(rank["tokens"][name] for rank in ranks) for name in one["tokens"]} == one["tokens"]
    assert sum(rank["dense_bytes"] for rank in ranks) == one["dense_bytes"]


def test_generate(found: Found) -> None:
    alone = generated(found.model)
    for name in CONFIGS:
        for rank in found.ranks:
            assert torch.equal(rank["generated"][name]["text"], alone[name]["text"]), name
        assert_same([rank["generated"][name] for rank in found.ranks], alone[name])
    assert min(alone["compressed"]["tokens"].values()) > 50
    assert torch.equal(dense(found.model), alone["lossless"]["text"])
    assert all(torch.equal(rank["dense"], alone["lossless"]["text"]) for rank in found.ranks)


def test_thresholds_of_each_head(found: Found) -> None:
    """They differ enough that a rank with another rank's thresholds would show."""
    levels = found.ranks[0]["generated"]["per head"]["levels"]
    shares = (levels == 2).float().mean((1, 3))
    assert (shares[0, 0] - shares[0, 1]).abs() > 0.02
    assert_same([rank["called"] for rank in found.ranks], called(found.model))


def test_saved_and_loaded(found: Found, tmp_path: Path) -> None:
    alone = saved_and_loaded(found.model, tmp_path)
    assert all(torch.equal(rank["loaded"], alone) for rank in found.ranks)
    names = {path.name for path in (found.folder / "cache").iterdir()}
    assert {name for name in names if "rank1of2" in name} == {
        "diffkv_cache.rank1of2.json",
        "diffkv_cache.rank1of2.safetensors",
    }
    with pytest.raises(FileNotFoundError, match="tensor-parallel"):
        DiffKVCache.from_pretrained(found.folder / "cache", found.model)


def test_one_rank_that_cannot_go_on_stops_all(found: Found) -> None:
    healthy, starved = (rank["messages"] for rank in found.ranks)
    assert len(healthy) == len(starved) == 5
    for mine, theirs in zip(healthy, starved):
        assert mine == f"tensor-parallel rank 1 of 2 failed, so this one stops too: {theirs}"
    assert all("max_bytes=1000" in message for message in starved[:4])
    assert "NaN" in starved[4]


def test_pipeline_stages(found: Found) -> None:
    assert_stages(found.model, [rank["staged"] for rank in found.ranks])


def test_pipeline_stages_with_sliding_windows(all_found: dict[str, Found]) -> None:
    model, ranks = windowed(), [rank["windowed"] for rank in all_found["llama"].ranks]
    assert_stages(model, ranks)
    assert torch.equal(dense(model), ranks[0]["lossless"]["text"])


def assert_stages(model: PreTrainedModel, ranks: list[dict[str, Any]]) -> None:
    """Each rank has the text of one process, and that process's layer of its own."""
    alone = generated(model)
    for name in ("lossless", "compressed"):
        for rank, stages in enumerate(ranks):
            staged = stages[name]
            assert torch.equal(staged["text"], alone[name]["text"])
            assert torch.equal(staged["next turn"], ranks[0][name]["next turn"])
            assert torch.equal(staged["levels"], alone[name]["levels"][rank])
            torch.testing.assert_close(staged["keys"], alone[name]["keys"][rank], rtol=1e-6, atol=1e-6)
    mask = torch.cat([prompts()[1], torch.ones(2, GREEDY["max_new_tokens"], dtype=torch.long)], 1)
    text = ranks[0]["lossless"]["text"]
    assert torch.equal(ranks[0]["lossless"]["next turn"], model.generate(text, attention_mask=mask, **GREEDY))
