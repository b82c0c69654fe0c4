"""The Cache API of a filled `DiffKVCache`: sizes, reset, copies, and row selection."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from runs import Run, assert_close_contents, model_of, started, tokens
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor
from transformers import Cache, DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

LENGTHS = (90, 33, 1, 64)
CONFIG = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)


def assert_all_levels(cache: DiffKVCache) -> None:
    counts = cache.memory().tokens
    assert min(counts.values()) > 20, counts


def test_sizes() -> None:
    model = model_of("gemma2")
    cache = DiffKVCache(model.config, CONFIG)
    assert len(cache) == 2 and cache.get_seq_length() == 0 and cache.memory().bytes == 0
    assert cache.get_mask_sizes(5, 1) == (5, 0)
    talk = started(model, LENGTHS, cache=cache)
    talk.steps(tokens(4, 3))
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
    few = started(model, (4,), CONFIG).cache
    assert few.memory().ratio > 1 and "too few tokens to save memory" in str(few.memory())
    lossless = started(model, (40,), DiffKVConfig.lossless(window=4)).cache
    assert lossless.memory().ratio > 1 and str(lossless.memory()).endswith("as they are, which saves nothing")


def test_a_report_says_that_no_layer_is_compressed() -> None:
    model = tiny_model("llama4_text")
    with pytest.warns(UserWarning, match="no plain full-attention layer"):
        cache = DiffKVCache(model)
    model.generate(tokens(1, 40), cache=cache, max_new_tokens=2)
    assert cache.memory().ratio == 1 and str(cache.memory()).endswith("; no layer of this model is compressed")


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
    talk = started(model, LENGTHS, CONFIG)
    talk.steps(tokens(4, 20))
    cache = talk.cache
    assert cache.memory().bytes > 0
    cache.reset()
    assert cache.memory().bytes == 0
    assert cache.get_seq_length() == 0
    # with another batch size, too
    again = started(model, (40, 70), cache=cache, seed=5)
    fresh = started(model, (40, 70), CONFIG, seed=5)
    assert torch.equal(again.steps(tokens(2, 20)), fresh.steps(tokens(2, 20)))
    assert_close_contents(again.cache, fresh.cache)


def pickled(cache: DiffKVCache) -> DiffKVCache:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(100)
def test_copies_continue_identically(name: str, duplicate: Callable) -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)
    talk = started(model_of(name), LENGTHS, config)
    talk.steps(tokens(4, 30))
    twin = talk.on(duplicate(talk.cache))
    assert_close_contents(twin.cache, talk.cache)
    before = [talk.cache.dequantize(i)[0] for i in talk.cache.compressed_layers()]
    logits = twin.steps(tokens(4, 40, seed=2))
    after = [talk.cache.dequantize(i)[0] for i in talk.cache.compressed_layers()]
    assert all(torch.equal(*pair) for pair in zip(before, after)), "the original changed with its copy"
    assert torch.equal(talk.steps(tokens(4, 40, seed=2)), logits)
    assert_close_contents(twin.cache, talk.cache)
    assert min(talk.cache.memory().tokens.values()) > 0


def test_an_empty_cache_can_be_copied() -> None:
    model = model_of()
    for cache in (copy.deepcopy(DiffKVCache(model.config, CONFIG)), pickled(DiffKVCache(model.config, CONFIG))):
        talk = started(model, LENGTHS, cache=cache)
        assert_close_contents(talk.cache, started(model, LENGTHS, CONFIG).cache)


ROW_CHOICES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0, 3])), [2, 2, 0, 3]),
    "reorder to one": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 1, 1])), [1, 1, 1, 1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(3), [i // 3 for i in range(12)]),
    "reorder by a list": (lambda cache: cache.reorder_cache([1, 0, 3]), [1, 0, 3]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([3, 0])), [3, 0]),
    "select by a list": (lambda cache: cache.batch_select_indices([3, 0]), [3, 0]),
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
    first, more = tokens(4, 21), tokens(len(index), 30, seed=3)
    talk = started(model, LENGTHS, CONFIG)
    talk.steps(first)
    choose(talk.cache)
    talk.ids, talk.mask = talk.ids[index], talk.mask[index]
    ids, mask = ragged_prompts(LENGTHS)
    expected = Run(model, DiffKVCache(model.config, CONFIG), len(index))
    expected.feed(ids[index], mask[index])
    expected.steps(first[index])
    assert talk.cache.batch_size == len(index)
    assert_close_contents(talk.cache, expected.cache)
    torch.testing.assert_close(talk.steps(more), expected.steps(more))
    assert_close_contents(talk.cache, expected.cache)
    if name == "llama":
        assert_all_levels(talk.cache)


@pytest.mark.sampled(100)
def test_reordering_at_every_step() -> None:
    """Drops and duplicates rows between any two steps, like beam search."""
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)
    model = model_of()
    talk = started(model, (50, 20, 35), config)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        logits = talk.steps(tokens(3, 1, seed=step))
        beams = torch.randint(0, 3, (3,), generator=generator) if step % 4 else torch.tensor([2, 0, 1])
        talk.cache.reorder_cache(beams)
        talk.ids, talk.mask = talk.ids[beams], talk.mask[beams]
    expected = Run(model, DiffKVCache(model.config, config), 3)
    expected.feed(talk.ids[:, :50], talk.mask[:, :50])
    torch.testing.assert_close(logits[beams], expected.steps(talk.ids[:, 50:])[:, -1:])
    assert_close_contents(talk.cache, expected.cache)


def test_dropped_rows_give_their_pages_back() -> None:
    model = model_of()
    talk = started(model, LENGTHS, CONFIG)
    talk.steps(tokens(4, 20))
    store = talk.cache.stores.all[0]
    talk.cache.check_integrity()
    free, held = store.pool.free_list.free, store.pool.capacity
    owned = (store.table.table != 0).sum((0, 2, 3))  # pages of each row
    assert owned[0] > owned[2] > 0
    talk.select([2])
    assert store.pool.free_list.free == free + int(owned.sum() - owned[2])
    talk.steps(tokens(1, 100))
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
        lambda cache: cache.batch_select_indices(torch.tensor(1)),
        lambda cache: cache.batch_select_indices(1),
        lambda cache: cache.batch_select_indices(torch.ones(4, 2, dtype=torch.bool)),
        lambda cache: cache.batch_select_indices([0.5, 1.0]),
        lambda cache: cache.reorder_cache(torch.tensor(1)),
        lambda cache: cache.reorder_cache([[0, 1]]),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rows_that_do_not_exist(choose: Callable, name: str) -> None:
    talk = started(model_of(name), LENGTHS, CONFIG)
    twin = started(model_of(name), LENGTHS, CONFIG)
    with pytest.raises(
        ValueError, match="repeats=0 must|must be in|holds 4 sequences|(indices|beam_idx) is .* one-dimensional"
    ):
        choose(talk.cache)
    assert_close_contents(talk.cache, twin.cache)
    assert torch.equal(talk.steps(tokens(4, 3)), twin.steps(tokens(4, 3)))


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
    """Passes the model's configuration by the same keyword as `DynamicCache`."""
    model = model_of()
    for cache in (DiffKVCache(config=model.config), DiffKVCache(config=model), DiffKVCache(model_config=model)):
        assert cache.config == DiffKVCache(model.config).config and cache.compressed_layers() == [0, 1]
    assert DiffKVCache(config=model.config, window=7).config.window == 7


def test_forks_share_payload_as_they_share_bytes() -> None:
    talk = started(model_of(), (90, 90), CONFIG)
    cache, alone = talk.cache, talk.cache.memory()
    forks = cache.fork(2)
    for memory in (each.memory() for each in (cache, *forks)):
        assert memory.payload_bytes == alone.payload_bytes // 3 < memory.bytes
        assert (memory.tokens, memory.dense_bytes) == (alone.tokens, alone.dense_bytes)
    forks.pop()
    assert cache.memory().payload_bytes == alone.payload_bytes // 2
    talk.on(forks[0]).steps(tokens(2, 1))
    assert forks[0].memory().payload_bytes > alone.payload_bytes == cache.memory().payload_bytes


def test_what_a_cache_says_of_itself() -> None:
    model = model_of()
    cache = DiffKVCache(model)
    assert repr(cache) == "DiffKVCache(empty, 2 layers compressed)"
    talk = started(model, (90, 90), cache=cache)
    memory = cache.memory()
    megabytes = f"{memory.bytes / 1e6:.2f} MB of {memory.dense_bytes / 1e6:.2f} MB"
    assert repr(cache) == f"DiffKVCache(2 requests, 90 tokens each, {megabytes}, 2 layers compressed)"
    (fork,) = cache.fork(1)
    assert f"{fork.memory().bytes / 1e6:.2f} MB of" in repr(fork)
    cache.batch_select_indices(torch.tensor([0]))
    assert repr(cache).startswith("DiffKVCache(1 request, 90 tokens, ")
    # also when asked in the middle of a forward
    said: list[str] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda *ignored: said.append(repr(fork)))
    talk.on(fork).steps(tokens(2, 1))
    hook.remove()
    assert "DiffKVCache(2 requests, " in said[0] and "91 tokens" in repr(fork)


@pytest.mark.parametrize("name", ["llama", "gemma2", "hrm_text"])
def test_a_filled_cache_says_so(name: str) -> None:
    """Prefix models such as HRM-Text attend in both directions only while the cache is empty."""
    torch.manual_seed(0)
    prompt, more = torch.randint(3, 99, (1, 40)), torch.randint(3, 99, (1, 70))
    model = tiny_model(name, "eager")

    def logits(cache: Cache) -> Tensor:
        assert not cache.is_initialized
        given = []
        for ids in (prompt, more):
            types = {"token_type_ids": torch.ones_like(ids)} if name == "hrm_text" else {}
            given.append(model(ids, **types, **passing(cache)).logits)
            assert cache.is_initialized
        cache.reset()
        return torch.cat(given, 1)

    with torch.no_grad():
        expected = logits(DynamicCache(config=model.config))
        model.set_attn_implementation("diffkv")
        found = logits(cache := DiffKVCache(model, DiffKVConfig.lossless(window=16)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not cache.is_initialized
