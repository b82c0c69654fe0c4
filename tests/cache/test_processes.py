"""Other processes, forked or newly started: each works on its own memory, and the parent's cache is unchanged."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from programs import run_program
from tiny_models import tiny_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
PREFIX = torch.randint(1, 128, (1, 150), generator=torch.Generator().manual_seed(3))
QUESTIONS = [
    torch.randint(1, 128, (1, length), generator=torch.Generator().manual_seed(length)) for length in (7, 20, 31)
]


def continue_text(model: PreTrainedModel, cache: DiffKVCache, question: Tensor) -> list[int]:
    ids = torch.cat([PREFIX, question], dim=1)
    output = model.generate(ids, **passing(cache), max_new_tokens=40, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", "diffkv")


@pytest.fixture
def cache(model: PreTrainedModel) -> DiffKVCache:
    """Holds the prefix, with high, low and pruned tokens in it."""
    cache = DiffKVCache(model.config, alpha_high=1.5, alpha_low=0.5, window=32)
    with torch.no_grad():
        model(PREFIX, **passing(cache))
    assert all(cache.memory().tokens.values())
    return cache


def contents(cache: DiffKVCache) -> list[Tensor]:
    """Returns every byte of the pages, and the levels, scores, keys and values of all layers."""
    layers = cache.compressed_layers()
    found = [store.pool.pages[: store.pool.capacity].clone() for store in cache.stores.all]
    return found + [part for i in layers for part in (cache.levels(i), cache.significance(i), *cache.dequantize(i))]


def in_child(work: Callable[[], list[int]]) -> list[int]:
    """Returns the result of `work` in a forked process."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(work()))
    child.start()
    # so that a child that dies without answering is noticed
    send.close()
    tokens = receive.recv()
    child.join()
    assert child.exitcode == 0
    return tokens


def test_child_continues_and_the_parents_cache_stays(model: PreTrainedModel, cache: DiffKVCache) -> None:
    expected = continue_text(model, copy.deepcopy(cache), QUESTIONS[0])
    before = contents(cache)
    assert in_child(lambda: continue_text(model, cache, QUESTIONS[0])) == expected
    after = contents(cache)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    cache.check_integrity()
    assert cache.get_seq_length() == PREFIX.shape[1]
    assert continue_text(model, cache, QUESTIONS[0]) == expected


def test_child_makes_a_cache_of_its_own(model: PreTrainedModel, cache: DiffKVCache) -> None:
    fields = {"cache_implementation": "diffkv", "cache_config": {"alpha_high": 1.5, "window": 32}}

    def generate() -> list[int]:
        return model.generate(PREFIX, max_new_tokens=20, do_sample=False, **fields)[0, PREFIX.shape[1] :].tolist()

    assert in_child(generate) == generate()


def send_text(model: PreTrainedModel, cache: DiffKVCache, question: Tensor, answers: Any) -> None:
    answers.put(continue_text(model, cache, question))


@pytest.mark.slow
def test_a_spawned_process_gets_a_copy(model: PreTrainedModel, cache: DiffKVCache) -> None:
    expected = continue_text(model, copy.deepcopy(cache), QUESTIONS[0])
    before = contents(cache)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=send_text, args=(model, cache, QUESTIONS[0], answers))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert answers.get() == expected
    assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))
    assert continue_text(model, cache, QUESTIONS[0]) == expected


def test_sending_a_cache_leaves_its_memory_where_it_is(cache: DiffKVCache) -> None:
    """PyTorch would move it to shared memory, but records and kernels know its addresses."""
    (store,) = cache.stores.all
    before, addresses = contents(cache), store.addresses()
    received = pickle.loads(ForkingPickler.dumps([cache]))[0]
    assert store.addresses() == addresses
    for found in (cache, received):
        found.check_integrity()
        assert all(torch.equal(a, b) for a, b in zip(before, contents(found), strict=True))


class Answers(Dataset):
    """Answers questions about one prefix, in whichever process requests an item."""

    def __init__(self, model: PreTrainedModel, cache: DiffKVCache) -> None:
        self.model, self.cache = model, cache

    def __len__(self) -> int:
        return len(QUESTIONS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (fork,) = self.cache.fork(1)
        return {"process": os.getpid(), "tokens": continue_text(self.model, fork, QUESTIONS[index])}


def test_data_loader_workers_share_a_prefix(model: PreTrainedModel, cache: DiffKVCache) -> None:
    answers = Answers(model, cache)
    expected = [answers[index]["tokens"] for index in range(len(answers))]
    before = contents(cache)
    loader = DataLoader(answers, batch_size=None, num_workers=2, multiprocessing_context="fork")
    items = list(loader)
    assert [item["tokens"] for item in items] == expected
    assert len({item["process"] for item in items} | {os.getpid()}) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))
    cache.check_integrity()


IMPORT_IN_CHILD = """
import os
from transformers import AttentionInterface, GenerationMixin

method = GenerationMixin._prepare_cache_for_generation
child = os.fork()
if child == 0:
    import hf_diffkv
    os._exit(0 if "diffkv" in AttentionInterface().valid_keys() else 1)
assert os.waitpid(child, 0)[1] == 0
assert "diffkv" not in AttentionInterface().valid_keys()
assert GenerationMixin._prepare_cache_for_generation is method
import hf_diffkv
assert "diffkv" in AttentionInterface().valid_keys()
if os.fork() == 0:
    hf_diffkv.unregister()
    os._exit(0)
os.wait()
assert GenerationMixin._prepare_cache_for_generation is not method
"""


@pytest.mark.slow
def test_importing_in_a_child_leaves_the_parent_alone() -> None:
    run_program(IMPORT_IN_CHILD)
