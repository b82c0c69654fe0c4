"""The Cache API of a filled `DiffKVCache`: sizes, reset, copies, and choosing rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

LENGTHS = (90, 33, 1, 64)
CONFIG = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)


def model_of(name: str = "llama") -> PreTrainedModel:
    """float64, so that how many rows share a batch does not show in the results."""
    return tiny_model(name, "diffkv", dtype=torch.float64)


class Conversation:
    """A model and a cache fed with given tokens, one forward after the other."""

    def __init__(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, config: DiffKVConfig = CONFIG, cache: Any = None
    ) -> None:
        self.model, self.mask = model, mask
        self.cache = DiffKVCache(model.config, config) if cache is None else cache
        self._forward(ids)

    def say(self, tokens: Tensor) -> Tensor:
        """Feeds tokens [batch, steps] one step at a time; logits [batch, steps, vocabulary]."""
        logits = []
        for step in tokens.split(1, dim=1):
            self.mask = torch.cat([self.mask, torch.ones_like(step)], 1)
            logits.append(self._forward(step)[:, -1:])
        return torch.cat(logits, 1)

    def copied(self, cache: DiffKVCache) -> Conversation:
        other = copy.copy(self)
        other.cache = cache
        return other

    @torch.no_grad()
    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return self.model(
            ids, attention_mask=self.mask, position_ids=positions, **passing(self.cache), use_cache=True
        ).logits


def steps(batch: int, count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def assert_same_contents(actual: DiffKVCache, expected: DiffKVCache) -> None:
    assert actual.get_seq_length() == expected.get_seq_length()
    for layer_idx in expected.compressed_layers():
        assert torch.equal(actual.levels(layer_idx), expected.levels(layer_idx))
        for mine, theirs in zip(actual.dequantize(layer_idx)[:2], expected.dequantize(layer_idx)[:2]):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(actual.significance(layer_idx), expected.significance(layer_idx))
    assert actual.memory().tokens == expected.memory().tokens
    actual.check_integrity()


def assert_all_levels(cache: DiffKVCache) -> None:
    tokens = cache.memory().tokens
    assert min(tokens.values()) > 20, tokens


def test_sizes() -> None:
    model = model_of("gemma2")
    cache = DiffKVCache(model.config, CONFIG)
    assert len(cache) == 2 and cache.get_seq_length() == 0 and cache.memory().bytes == 0
    assert cache.get_mask_sizes(5, 1) == (5, 0)
    talk = Conversation(model, *ragged_prompts(LENGTHS), cache=cache)
    talk.say(steps(4, 3))
    assert len(cache) == 2
    for layer_idx in (0, 1):
        assert cache.get_seq_length(layer_idx) == max(LENGTHS) + 3  # padding and pruned tokens count
    assert cache.get_mask_sizes(1, 1) == (max(LENGTHS) + 4, 0)
    assert cache.get_mask_sizes(7, 1) == (max(LENGTHS) + 10, 0)
    assert cache.layers[1].get_max_length() == cache.layers[1].get_max_cache_shape() == -1
    assert cache.batch_size == 4
    assert not cache.is_compileable
    assert cache.layers[1].keys.shape == (4, 2, max(LENGTHS) + 3, 16)
    assert cache.layers[1].values.dtype == torch.float64
    assert repr(cache).startswith("DiffKVCache(") and "1 layer compressed" in repr(cache)
    memory = cache.memory()
    real = sum(LENGTHS) + 3 * len(LENGTHS)
    assert sum(memory.tokens.values()) == real * 2
    dense = real * 2 * (16 + 16) * 8
    assert memory.compressed_dense_bytes == dense and memory.dense_bytes == dense + memory.other_bytes
    assert memory.other_bytes == sum(t.nbytes for t in vars(cache.layers[0]).values() if torch.is_tensor(t))
    assert memory.bytes == memory.compressed_bytes + memory.other_bytes > memory.payload_bytes > 0
    assert f"1 of 2 layers compressed, to {memory.compressed_bytes / dense:.1%} of theirs" in str(memory)
    assert "too few tokens" not in str(memory)
    few = Conversation(model, torch.full((1, 4), 5), torch.ones(1, 4, dtype=torch.int64)).cache
    assert few.memory().ratio > 1 and "too few tokens to save memory" in str(few.memory())
    lossless = DiffKVCache(model.config, DiffKVConfig.lossless(window=4))
    lossless = Conversation(model, torch.full((1, 40), 5), torch.ones(1, 40, dtype=torch.int64), cache=lossless).cache
    assert lossless.memory().ratio > 1 and str(lossless.memory()).endswith("as they are, which saves nothing")


@pytest.mark.parametrize(
    "make",
    [
        lambda model: DiffKVCache(model, CONFIG),
        lambda model: DiffKVCache(model.config, {"window": CONFIG.window, "sinks": CONFIG.sinks}),
        lambda model: DiffKVCache(model.config, {"window": 3}, window=CONFIG.window, sinks=CONFIG.sinks),
    ],
    ids=["model", "fields", "fields and options"],
)
def test_ways_to_make_a_cache(make: Callable) -> None:
    config = make(model_of("llama")).config
    assert (config.window, config.sinks) == (CONFIG.window, CONFIG.sinks)


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_reset_and_reuse(name: str) -> None:
    model = model_of(name)
    talk = Conversation(model, *ragged_prompts(LENGTHS))
    talk.say(steps(4, 20))
    cache = talk.cache
    assert cache.memory().bytes > 0
    cache.reset()
    assert cache.memory().bytes == 0
    assert cache.get_seq_length() == 0
    # another batch size, too
    again = Conversation(model, *ragged_prompts((40, 70), seed=5), cache=cache)
    fresh = Conversation(model, *ragged_prompts((40, 70), seed=5))
    assert torch.equal(again.say(steps(2, 20)), fresh.say(steps(2, 20)))
    assert_same_contents(again.cache, fresh.cache)


def pickled(cache: DiffKVCache) -> DiffKVCache:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_copies_continue_identically(name: str, duplicate: Callable, interval: int) -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16, compaction_interval=interval)
    talk = Conversation(model_of(name), *ragged_prompts(LENGTHS), config)
    talk.say(steps(4, 30))
    twin = talk.copied(duplicate(talk.cache))
    assert_same_contents(twin.cache, talk.cache)
    before = [talk.cache.dequantize(i)[0] for i in talk.cache.compressed_layers()]
    logits = twin.say(steps(4, 40, seed=2))
    after = [talk.cache.dequantize(i)[0] for i in talk.cache.compressed_layers()]
    assert all(torch.equal(*pair) for pair in zip(before, after)), "the original changed with its copy"
    assert torch.equal(talk.say(steps(4, 40, seed=2)), logits)
    assert_same_contents(twin.cache, talk.cache)
    assert min(talk.cache.memory().tokens.values()) > 0


def test_an_empty_cache_can_be_copied() -> None:
    model = model_of()
    for cache in (copy.deepcopy(DiffKVCache(model.config, CONFIG)), pickled(DiffKVCache(model.config, CONFIG))):
        talk = Conversation(model, *ragged_prompts(LENGTHS), cache=cache)
        assert_same_contents(talk.cache, Conversation(model, *ragged_prompts(LENGTHS)).cache)


ROW_CHOICES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0, 3])), [2, 2, 0, 3]),
    "reorder to one": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 1, 1])), [1, 1, 1, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), [i // 3 for i in range(12)]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([3, 0])), [3, 0]),
    "select by mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, False, True])),
        [0, 3],
    ),
}


@pytest.mark.parametrize("choice", ROW_CHOICES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_chosen_rows_equal_rows_run_by_themselves(name: str, choice: str) -> None:
    choose, index = ROW_CHOICES[choice]
    model = model_of(name)
    ids, mask = ragged_prompts(LENGTHS)
    first, more = steps(4, 21), steps(len(index), 30, seed=3)
    talk = Conversation(model, ids, mask)
    talk.say(first)
    choose(talk.cache)
    talk.mask = talk.mask[index]
    expected = Conversation(model, ids[index], mask[index])
    expected.say(first[index])
    assert talk.cache.batch_size == len(index)
    assert_same_contents(talk.cache, expected.cache)
    torch.testing.assert_close(talk.say(more), expected.say(more))
    assert_same_contents(talk.cache, expected.cache)
    if name == "llama":
        assert_all_levels(talk.cache)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.sampled(100)
def test_reordering_at_every_step(interval: int) -> None:
    """As beam search does: rows are dropped and doubled between any two steps."""
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16, compaction_interval=interval)
    model = model_of()
    ids, mask = ragged_prompts((50, 20, 35))
    talk = Conversation(model, ids, mask, config)
    origin, history = torch.arange(3), torch.zeros(3, 0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        tokens = steps(3, 1, seed=step)
        logits = talk.say(tokens)
        beams = torch.randint(0, 3, (3,), generator=generator) if step % 4 else torch.tensor([2, 0, 1])
        talk.cache.reorder_cache(beams)
        origin, history = origin[beams], torch.cat([history, tokens], 1)[beams]
        talk.mask = talk.mask[beams]
    expected = Conversation(model, ids[origin], mask[origin], config)
    torch.testing.assert_close(logits[beams], expected.say(history)[:, -1:])
    assert_same_contents(talk.cache, expected.cache)


def test_dropped_rows_give_their_pages_back() -> None:
    model = model_of()
    talk = Conversation(model, *ragged_prompts(LENGTHS))
    talk.say(steps(4, 20))
    store = talk.cache.stores.all[0]
    talk.cache.check_integrity()
    free, held = store.pool.free_list.free, store.pool.capacity
    owned = (store.table.table != 0).sum((0, 2, 3))  # pages of each row
    assert owned[0] > owned[2] > 0
    talk.cache.batch_select_indices(torch.tensor([2]))
    assert store.pool.free_list.free == free + int(owned.sum() - owned[2])
    talk.mask = talk.mask[2:3]
    talk.say(steps(1, 100))
    assert store.pool.capacity == held, "pages were added although free ones were there"
    talk.cache.check_integrity()


@pytest.mark.parametrize(
    "choose",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0, 4])),
        lambda cache: cache.reorder_cache(torch.tensor([-1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.int64)),
        lambda cache: cache.batch_select_indices(torch.tensor([9])),
        lambda cache: cache.batch_select_indices(torch.tensor([True])),
        lambda cache: cache.batch_repeat_interleave(0),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_that_do_not_exist(choose: Callable, name: str) -> None:
    talk = Conversation(model_of(name), *ragged_prompts(LENGTHS))
    twin = Conversation(model_of(name), *ragged_prompts(LENGTHS))
    with pytest.raises(ValueError, match="repeats=0 must|must be in|holds 4 sequences"):
        choose(talk.cache)
    assert_same_contents(talk.cache, twin.cache)
    assert torch.equal(talk.say(steps(4, 3)), twin.say(steps(4, 3)))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_lossless_beam_search_equals_dynamic_cache(name: str) -> None:
    model = tiny_model(name, "eager")
    ids, mask = ragged_prompts((90, 33))
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 20}
    expected = model.generate(ids, **passing(DynamicCache(config=model.config)), **options)
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    assert torch.equal(model.generate(ids, **passing(cache), **options), expected)
    cache.check_integrity()


def test_the_configuration_of_a_model_by_keyword() -> None:
    """As `DynamicCache` takes it."""
    model = model_of()
    for cache in (DiffKVCache(config=model.config), DiffKVCache(config=model), DiffKVCache(model_config=model)):
        assert cache.config == DiffKVCache(model.config).config and cache.compressed_layers() == [0, 1]
    assert DiffKVCache(config=model.config, window=7).config.window == 7


def test_forks_share_payload_as_they_share_bytes() -> None:
    talk = Conversation(model_of(), steps(2, 90), torch.ones(2, 90, dtype=torch.int64))
    cache, alone = talk.cache, talk.cache.memory()
    forks = cache.fork(2)
    for memory in (each.memory() for each in (cache, *forks)):
        assert memory.payload_bytes == alone.payload_bytes // 3 < memory.bytes
        assert (memory.tokens, memory.dense_bytes) == (alone.tokens, alone.dense_bytes)
    forks.pop()
    assert cache.memory().payload_bytes == alone.payload_bytes // 2
    talk.copied(forks[0]).say(steps(2, 1))
    assert forks[0].memory().payload_bytes > alone.payload_bytes == cache.memory().payload_bytes


def test_what_a_cache_says_of_itself() -> None:
    model = model_of()
    cache = DiffKVCache(model)
    assert repr(cache) == "DiffKVCache(empty, 2 layers compressed)"
    talk = Conversation(model, steps(2, 90), torch.ones(2, 90, dtype=torch.int64), cache=cache)
    memory = cache.memory()
    megabytes = f"{memory.bytes / 1e6:.2f} MB of {memory.dense_bytes / 1e6:.2f} MB"
    assert repr(cache) == f"DiffKVCache(2 requests, 90 tokens each, {megabytes}, 2 layers compressed)"
    (fork,) = cache.fork(1)
    assert f"{fork.memory().bytes / 1e6:.2f} MB of" in repr(fork)
    cache.batch_select_indices(torch.tensor([0]))
    assert repr(cache).startswith("DiffKVCache(1 request, 90 tokens, ")
    # also where one asks in the middle of a forward
    said: list[str] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda *ignored: said.append(repr(fork)))
    talk.copied(fork).say(steps(2, 1))
    hook.remove()
    assert "DiffKVCache(2 requests, " in said[0] and "91 tokens" in repr(fork)
