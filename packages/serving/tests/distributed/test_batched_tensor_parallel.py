"""Continuous batching over two processes: the same requests, texts and levels as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batching_run import CONFIGS, CROWD, CROWD_NEW, KV_HEADS, NEW, prompts, uncut
from launch import torchrun
from tiny_models import tiny_model
from transformers import PreTrainedModel

SCRIPT = Path(__file__).with_name("batching_run.py")
RANKS = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.float64, num_attention_heads=8, num_key_value_heads=KV_HEADS, head_dim=16)


@pytest.fixture(scope="module")
def ranks(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("batched")
    model.save_pretrained(folder / "model")
    torchrun(RANKS, SCRIPT, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_and_levels_are_those_of_one_process(
    name: str, model: PreTrainedModel, ranks: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    found, one = [rank["uncut"][name] for rank in ranks], alone[name]
    assert all(rank["texts"] == one["texts"] for rank in found)
    assert one["levels"].keys() == found[0]["levels"].keys() == found[1]["levels"].keys()
    for request, levels in one["levels"].items():
        mine = [rank["levels"][request] for rank in found]
        assert all(each.shape[1] == KV_HEADS // RANKS for each in mine)
        assert torch.equal(torch.cat(mine, 1), levels)


@pytest.fixture(scope="module")
def alone(model: PreTrainedModel) -> dict[str, Any]:
    return uncut(model)


def test_crowded(model: PreTrainedModel, ranks: list[dict[str, Any]]) -> None:
    """Checks that ranks let in and preempt the same requests, also if they hold different numbers of pages."""
    for name in CONFIGS:
        mine, theirs = (rank["crowded"][name] for rank in ranks)
        assert mine["texts"] == theirs["texts"] and mine["slots"] == theirs["slots"]
        assert mine["preempted"] == theirs["preempted"] and mine["denied"] == theirs["denied"], name
        assert (mine["pages"] != theirs["pages"]) == ("per head" in name)
    assert ranks[0]["crowded"]["lossless"]["preempted"] > 0
    assert ranks[0]["crowded"]["precision per head"]["denied"] > 0
    want = [
        model.generate(torch.tensor([ids]), max_new_tokens=CROWD_NEW, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts(CROWD)
    ]
    assert ranks[0]["crowded"]["lossless"]["texts"] == want


def test_sampled_answers_are_the_same(ranks: list[dict[str, Any]]) -> None:
    mine, theirs = (rank["several"] for rank in ranks)
    assert mine == theirs and len(mine) == 4
    assert mine[0] != mine[1]


def test_a_request_that_fails_on_one_rank_fails_alone(ranks: list[dict[str, Any]]) -> None:
    healthy, broken = (rank["failed"] for rank in ranks)
    assert broken[1][0] == "cannot be stored"
    assert healthy[1][0] == "on tensor-parallel rank 1 of 2: cannot be stored"
    for found in (healthy, broken):
        assert found[0] == found[2] == (None, NEW)


def test_a_full_device_ends_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["full"] == ["the device is full"] * 2
    assert ranks[0]["full"] == ["tensor-parallel rank 1 of 2 failed, so this one stops too: the device is full"] * 2


def test_only_the_driver_is_asked(ranks: list[dict[str, Any]]) -> None:
    driver, other = (rank["managed"] for rank in ranks)
    assert driver["driver"] and not other["driver"]
    assert other["names"] == [None, None]
    assert driver["done"] == driver["names"][1] and len(driver["tokens"]) == 30
