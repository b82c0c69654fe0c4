"""Random operations on a cache against a model that keeps no cache at all.

`HF_DIFFKV_FUZZ=N` runs N sequences instead of the few that CI can afford, starting at seed `HF_DIFFKV_FUZZ_SEED`.
"""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SLIDING_LAYERS_RECORD, Run
from tiny_models import PAD, VOCABULARY, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision

SEQUENCES = int(os.environ.get("HF_DIFFKV_FUZZ", 60))
FIRST_SEED = int(os.environ.get("HF_DIFFKV_FUZZ_SEED", 0))
OPERATIONS = 14
LONGEST = 160
FULL = Precision(16, 16)
# exact as well, but a different precision, so that a cache with both chooses between them
FULL_IN_GROUPS = Precision(16, 16, 2, 2)
# lossless configurations; with alpha_high above 0, tokens move between two tiers that are both exact
CONFIGS = [
    DiffKVConfig(
        FULL,
        FULL_IN_GROUPS,
        alpha_high=alpha_high,
        alpha_low=0.0,
        window=window,
        page_bytes=size,
    )
    for alpha_high, window, size in [
        (0.0, 64, None),
        (0.0, 3, 512),
        (1.0, 4, 512),
        (1.0, 1, 1024),
        (0.7, 9, 700),
    ]
]
# each head at one of them, and layers in separate stores
THIRD = Precision(16, 16, 1, 2)
HEADS = ((FULL, FULL_IN_GROUPS), (THIRD, FULL))
CONFIGS += [DiffKVConfig(head_precisions=HEADS, window=5, page_bytes=1024)]
# fixed precisions for the heads of one layer, two tiers for the tokens of another
MIXED = ((THIRD, FULL), None)
CONFIGS += [DiffKVConfig(FULL, FULL_IN_GROUPS, alpha_high=1.0, head_precisions=MIXED, window=4, page_bytes=1024)]


def of_model(config: DiffKVConfig, model: PreTrainedModel) -> DiffKVConfig:
    """Returns the configuration with entries for the model's compressed layers."""
    layers = len(DiffKVCache(model.config).compressed_layers())
    heads = config.head_precisions
    return config if heads is None else replace(config, head_precisions=heads[:layers])


class Fuzz:
    """Runs that share no state visible to a user, each checked against its own history."""

    def __init__(self, seed: int, models: tuple[PreTrainedModel, PreTrainedModel], folder: Path) -> None:
        self.random = random.Random(seed)
        self.model, self.dense = models
        self.folder = folder
        self.config = of_model(self.random.choice(CONFIGS), self.model)
        self.log: list[Any] = []
        self.runs = [Run(self.model, DiffKVCache(self.model.config, self.config))]
        self.recording = {id(self.runs[0]): None}
        self.prompt(self.runs[0])

    # every forward

    def feed(self, run: Run, count: int, padding: float) -> Tensor:
        """Feeds random tokens; `compare` must come next."""
        batch = run.ids.shape[0]
        generator = torch.Generator().manual_seed(self.random.randrange(10**6))
        ids = torch.randint(3, VOCABULARY, (batch, count), generator=generator)
        mask = (torch.rand(batch, count, generator=generator) >= padding).long()
        mask[:, -1] |= int(run.ids.shape[1] == 0)  # every request starts with a prompt
        ids = torch.where(mask.bool(), ids, PAD)
        if self.recording[id(run)] is not None:
            self.recording[id(run)] += count
        return run.feed(ids, mask)

    @torch.no_grad()
    def compare(self, run: Run, *logits: Tensor) -> None:
        """Logits of the newest tokens, each [batch, n, vocabulary], and those of a forward over everything."""
        positions = (run.mask.cumsum(-1) - 1).clamp(min=0)
        expected = self.dense(run.ids, attention_mask=run.mask, position_ids=positions, use_cache=False).logits
        actual = torch.cat(logits, 1)
        real = run.mask[:, -actual.shape[1] :].bool()
        torch.testing.assert_close(actual[real], expected[:, -actual.shape[1] :][real], rtol=0, atol=1e-4)

    def prompt(self, run: Run) -> None:
        batch = self.random.randint(1, 3)
        run.ids = run.mask = torch.zeros(batch, 0, dtype=torch.int64)
        self.compare(run, self.feed(run, self.random.randint(1, 60), self.random.choice([0.0, 0.3])))

    # operations

    def step(self, run: Run) -> None:
        logits = []
        for _ in range(self.random.randint(1, 12)):
            logits.append(self.feed(run, 1, self.random.choice([0.0, 0.0, 0.3])))
            if self.recording[id(run)] is not None and self.random.random() < 0.7:
                self.compare(run, *logits)
                logits.clear()
                self.crop(run)
        if logits:
            self.compare(run, *logits)

    def turn(self, run: Run) -> None:
        self.compare(run, self.feed(run, self.random.randint(2, 25), self.random.choice([0.0, 0.4])))

    def hide(self, run: Run) -> None:
        """Hides the ends of some rows with the next forward's mask. (Later tokens have seen them.)"""
        seen = run.mask.shape[1]
        counts = [self.random.choice([0, 1, self.random.randint(0, seen)]) for _ in range(run.mask.shape[0])]
        run.mask = run.mask * (torch.arange(seen) < seen - torch.tensor(counts)[:, None]).long()
        self.compare(run, self.feed(run, self.random.choice([1, 1, 7]), self.random.choice([0.0, 0.3])))

    def reorder(self, run: Run) -> None:
        batch = run.ids.shape[0]
        index = [self.random.randrange(batch) for _ in range(batch)]
        run.cache.reorder_cache(torch.tensor(index))
        run.ids, run.mask = run.ids[index], run.mask[index]

    def repeat(self, run: Run) -> None:
        if run.ids.shape[0] <= 2:
            run.cache.batch_repeat_interleave(2)
            run.ids, run.mask = (t.repeat_interleave(2, 0) for t in (run.ids, run.mask))

    def select(self, run: Run) -> None:
        batch = run.ids.shape[0]
        run.select([self.random.randrange(batch) for _ in range(self.random.randint(1, 4))])

    def record(self, run: Run) -> None:
        if self.model.config.model_type == "gemma2" and not SLIDING_LAYERS_RECORD:
            return
        run.cache.activate_past_recording()
        if self.recording[id(run)] is None:
            self.recording[id(run)] = 0
        self.compare(run, self.feed(run, self.random.randint(1, 9), self.random.choice([0.0, 0.3])))
        self.crop(run)

    def crop(self, run: Run) -> None:
        held = self.recording[id(run)]
        if held is None:
            run.crop(0)
            return
        run.crop(self.random.randint(0, held) if held < run.ids.shape[1] else self.random.randint(0, held - 1))
        self.recording[id(run)] = 0

    def settle(self, run: Run) -> None:
        if self.recording[id(run)]:
            self.crop(run)

    def add(self, run: Run, cache: DiffKVCache, recording: int | None) -> None:
        other = run.on(cache)
        self.runs.append(other)
        self.recording[id(other)] = recording

    def fork(self, run: Run) -> None:
        self.settle(run)
        for cache in run.cache.fork(self.random.randint(1, 2)):
            self.add(run, cache, self.recording[id(run)])

    def deepcopy(self, run: Run) -> None:
        self.add(run, copy.deepcopy(run.cache), self.recording[id(run)])

    def save_and_load(self, run: Run) -> None:
        self.settle(run)
        run.cache.save_pretrained(self.folder, self.model)
        self.add(run, DiffKVCache.from_pretrained(self.folder, self.model), None)

    def reset(self, run: Run) -> None:
        run.cache.reset()
        self.recording[id(run)] = None
        self.prompt(run)

    def drop(self, run: Run) -> None:
        if len(self.runs) > 1:
            self.runs = [other for other in self.runs if other is not run]

    def one(self) -> None:
        run = self.random.choice(self.runs)
        names = ["step"] * 3 + ["turn"] * 2 + ["hide"] * 2 + ["reorder", "repeat", "select", "record", "record", "crop"]
        names += ["fork", "deepcopy", "save_and_load", "reset", "drop"]
        name = self.random.choice(names)
        if run.ids.shape[1] > LONGEST:
            name = "reset"
        elif len(self.runs) > 4:
            name = "drop"
        self.log.append((name, self.runs.index(run), tuple(run.ids.shape), self.recording[id(run)]))
        getattr(self, name)(run)
        for each in self.runs:
            each.cache.check_integrity()
            assert each.cache.get_seq_length() == each.ids.shape[1]
            counts = each.cache.memory().tokens
            assert counts["pruned"] == 0
            assert sum(counts.values()) == int(each.mask.sum()) * 2 * len(each.cache.compressed_layers())


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def models(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    return tiny_model(request.param, "diffkv"), tiny_model(request.param, "eager")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.sampled(6)
def test_random_operations(models: tuple[PreTrainedModel, PreTrainedModel], part: int, tmp_path: Path) -> None:
    for seed in range(FIRST_SEED + part, FIRST_SEED + SEQUENCES // 2, 4):
        fuzz = None
        try:
            fuzz = Fuzz(seed, models, tmp_path)
            for _ in range(OPERATIONS):
                fuzz.one()
        except Exception as error:
            log = [] if fuzz is None else fuzz.log
            raise AssertionError(f"seed {seed}: {log[-4:]}: {error}") from error
