"""`max_bytes` is kept at every step and turn, costs the least significant tokens, and fails before anything changes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from runs import Run, captured, contents, model_of, simulation_of, started, tokens
from tiny_models import ragged_prompts
from torch import Tensor
from transformers import StoppingCriteriaList

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.store import settle

LENGTHS = (200, 90, 150)
WINDOW = 16


def budget(max_bytes: int | None, **options) -> DiffKVConfig:
    """Returns a configuration that prunes nothing without the budget."""
    return DiffKVConfig(
        alpha_high=1.0, alpha_low=0.0, window=WINDOW, sinks=0, page_bytes=512, max_bytes=max_bytes, **options
    )


def assert_within(cache: DiffKVCache) -> None:
    assert cache.memory().compressed_bytes <= cache.config.max_bytes
    cache.check_integrity()


@pytest.mark.parametrize("max_bytes", [130_000, 200_000])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(6)
def test_a_budget_is_kept_at_every_step_and_turn(name: str, max_bytes: int) -> None:
    model = model_of(name)
    max_bytes = max_bytes if name == "llama" else max_bytes // 2  # half of its layers are compressed
    run = started(model, LENGTHS, budget(max_bytes))
    assert_within(run.cache)
    for turn in range(4):
        for seed in range(30):
            run.feed(tokens(3, 1, seed))
            assert_within(run.cache)
        run.feed(*ragged_prompts((20 + 30 * turn, 3, 60), seed=turn))
        assert_within(run.cache)
    memory = run.cache.memory()
    assert memory.compressed_bytes > 0.75 * max_bytes, "most of the budget is used"
    assert memory.tokens["pruned"] > 100

    free = started(model, LENGTHS, budget(None))
    for turn in range(4):
        free.steps(tokens(3, 30))
        free.feed(*ragged_prompts((20 + 30 * turn, 3, 60), seed=turn))
    unlimited = free.cache.memory()
    assert unlimited.compressed_bytes > 1.2 * max_bytes and unlimited.tokens["pruned"] == 0


def test_tighter_thresholds_stand_where_they_stood() -> None:
    """Otherwise no captured step would remain valid."""
    run = started(model_of(), LENGTHS, budget(130_000))
    (store,) = run.cache.stores.all
    alphas = (store.alpha_high, store.alpha_low)
    places, before = [alpha.data_ptr() for alpha in alphas], [alpha.clone() for alpha in alphas]
    run.steps(tokens(3, 40))
    alphas = (store.alpha_high, store.alpha_low)
    assert [alpha.data_ptr() for alpha in alphas] == places
    assert all(bool((alpha > old).any()) for alpha, old in zip(alphas, before))


@pytest.mark.parametrize("beams, max_bytes", [(1, 130_000), (2, 200_000)])
@pytest.mark.sampled(100)
def test_a_budget_is_kept_inside_generate(beams: int, max_bytes: int) -> None:
    model, sizes = model_of(), []
    cache = DiffKVCache(model.config, budget(max_bytes))

    def look(input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        sizes.append(cache.memory().bytes)
        cache.check_integrity()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids, mask = ragged_prompts(LENGTHS)
    criteria = StoppingCriteriaList([look])
    options = {"max_new_tokens": 120, "do_sample": False, "stopping_criteria": criteria, "num_beams": beams}
    model.generate(ids, attention_mask=mask, **passing(cache), **options)
    assert len(sizes) == 120
    assert max(sizes) <= max_bytes
    assert cache.memory().tokens["pruned"] > 100


def test_thresholds_that_a_budget_raises_are_said_once() -> None:
    with pytest.warns(UserWarning, match="max_bytes=130000 is full") as caught:
        run = started(model_of(), LENGTHS, budget(130_000))
        run.steps(tokens(3, 40))
    assert len(caught) == 1
    memory, (store,) = run.cache.memory(), run.cache.stores.all
    assert memory.thresholds == (float(store.alpha_high.max()), float(store.alpha_low.max()))
    assert memory.thresholds[0] > 1 and "raised alpha_high to" in str(memory)
    assert started(model_of(), LENGTHS, budget(None)).cache.memory().thresholds is None


@pytest.mark.parametrize("repeats", [2, 4])
def test_a_budget_is_kept_when_rows_are_repeated(repeats: int) -> None:
    """The rows fit, or they are refused and nothing has changed."""
    run = started(model_of(), LENGTHS, budget(200_000))
    before = contents(run.cache)
    try:
        run.cache.batch_repeat_interleave(repeats)
    except MemoryError:
        assert all(torch.equal(*pair) for pair in zip(before, contents(run.cache)))
        assert run.cache.batch_size == 3
    assert_within(run.cache)


def test_a_budget_is_kept_while_recording() -> None:
    run = started(model_of(), LENGTHS, budget(200_000))
    run.cache.activate_past_recording()
    for seed in range(40):
        run.feed(tokens(3, 8, seed))
        assert_within(run.cache)
        run.crop(seed % 8)
        assert_within(run.cache)


def relative_means(layer, seen: Tensor) -> Tensor:
    """mean * N of every token of one forward, float32 [batch, heads, tokens], from a dense computation."""
    simulation = simulation_of(budget(None), layer)
    simulation.forward(layer.query, layer.key, layer.value, valid=layer.valid, **layer.options)
    index = (layer.valid.cumsum(-1) - 1)[:, None]
    later = (seen[:, None, None] - 1 - index).clamp(min=1)
    return simulation.sums() / later * seen[:, None, None]


@pytest.mark.parametrize("max_bytes", [95_000, 110_000])
def test_the_most_significant_tokens_are_kept(max_bytes: int) -> None:
    """Checks that every level of a layer holds more significant tokens than the level below."""
    with captured() as layers:
        run = started(model_of(), LENGTHS, budget(max_bytes))
    seen = torch.tensor(LENGTHS)
    pruned = 0
    for index, layer_idx in enumerate(run.cache.compressed_layers()):
        levels, means = run.cache.levels(layer_idx), relative_means(layers[index], seen)
        high, low, gone = (means[levels == level] for level in (2, 1, 0))
        pruned += gone.numel()
        if gone.numel():
            assert torch.cat([high, low]).min() >= gone.max() - 1e-5
        if low.numel():
            assert high.min() >= low.max() - 1e-5
        # the newest tokens of a request are never touched
        assert ((levels == 3).sum(-1) == WINDOW).all()
    assert pruned > 100


def test_while_generating_what_is_kept_matters_more() -> None:
    """Compares by the attention that every token, even a pruned one, received in a run that prunes none."""
    with captured() as layers:
        run = started(model_of(), LENGTHS, budget(130_000))
        first = run.ids.shape[1]
        run.steps(tokens(3, 100))
    simulation = {index: simulation_of(budget(None), layer) for index, layer in layers.items()}
    for index, layer in layers.items():
        cuts = [0, *range(first, run.ids.shape[1] + 1)]
        for start, stop in zip(cuts, cuts[1:]):
            query, key, value, valid, _ = layer.part(start, stop)
            simulation[index].forward(query, key, value, valid=valid, **layer.options)
        later = (run.mask.sum(-1, keepdim=True) - run.mask.cumsum(-1)).clamp(min=1)
        means = simulation[index].sums() / later[:, None]
        levels = run.cache.levels(run.cache.compressed_layers()[index])
        for row in range(3):
            for head in range(2):
                mean, level = means[row, head], levels[row, head]
                gone, kept = mean[level == 0], mean[(level == 1) | (level == 2)]
                assert gone.numel() > 10 and kept.numel() > 10
                assert kept.median() > gone.median()
                # a random choice would put half of the kept tokens above the pruned ones' median
                assert (kept > gone.median()).float().mean() > 0.7


def test_a_budget_below_the_windows_raises_at_once() -> None:
    model = model_of()
    cache = DiffKVCache(model.config, budget(20_000))
    with pytest.raises(MemoryError, match="max_bytes=20000"):
        started(model, LENGTHS, cache=cache)
    cache.check_integrity()
    assert cache.get_seq_length() == 0 and cache.memory().bytes == 0


@pytest.mark.parametrize("tight", [1.0, 0.98, 0.95, 0.92, 0.9])
@pytest.mark.sampled(100)
def test_a_step_that_cannot_fit_raises_before_it(tight: float) -> None:
    """A cache's budget is lowered to what it holds, or slightly less, with only windows to prune."""
    model = model_of()
    run = started(model, (17, 17, 17), budget(10**6))
    run.steps(tokens(3, 8))
    store = run.cache.stores.all[0]
    lowered = budget(int(tight * (store.bytes - 512 * (store.pool.capacity - 2))))
    run.cache.config = run.cache.stores.config = store.config = lowered
    held = contents(run.cache)
    for seed in range(20):
        seen, before, pages = run.cache.get_seq_length(), contents(run.cache), store.pool.capacity
        try:
            run.feed(tokens(3, 1, seed))
        except MemoryError as error:
            assert "max_bytes" in str(error)
            break
        held = None
    else:
        pytest.fail("a budget below what the windows take was accepted")
    assert held is None or all(torch.equal(*pair) for pair in zip(held, contents(run.cache)))
    assert run.cache.get_seq_length() == seen and store.pool.capacity == pages
    run.cache.check_integrity()
    assert all(torch.equal(*pair) for pair in zip(before, contents(run.cache)))

    # with a larger budget, the same cache continues
    run.cache.config = run.cache.stores.config = store.config = budget(10**6)
    other = Run(model, DiffKVCache(model.config, budget(10**6)), 3)
    other.feed(run.ids[:, :17])
    other.steps(run.ids[:, 17:])
    assert torch.equal(run.feed(tokens(3, 1, 99)), other.feed(tokens(3, 1, 99)))


@pytest.mark.parametrize("pages", range(8, 40, 2))
def test_a_refused_step_has_tightened_nothing(pages: int) -> None:
    """Rows without tokens need a page for each level, but rows with a few tokens in a page may not."""
    run = started(model_of(), (40, 40, 40), budget(10**6))
    run.steps(tokens(3, 2))
    (store,) = run.cache.stores.all
    settle(store)
    # the host reads the device
    store.forget_bounds()
    limit = store.bytes_outside_pool() + store.growth() + pages * 516
    run.cache.config = run.cache.stores.config = store.config = budget(limit * 257 // 256)
    before = contents(run.cache)
    with pytest.raises(MemoryError) if pages < 26 else nullcontext():
        run.feed(tokens(3, 1))
    if pages < 26:
        assert all(torch.equal(*pair) for pair in zip(before, contents(run.cache)))
    run.cache.check_integrity()
