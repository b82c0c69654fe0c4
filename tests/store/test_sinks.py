"""Sinks: a request's first tokens stay exact, whatever else happens to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from given_stores import attend, begin, new_store, select_rows
from runs import assert_equal_contents
from saved_files import without, write_as_before
from test_compressed import Pair, left_padding
from test_policies import CASES, PLACE
from test_rotated import RotatedPair, RotatedSharedPair, noted_draws
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, IntegrityError, Precision
from hf_diffkv.compat import passing
from hf_diffkv.native.library import library
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import LayerRows
from hf_diffkv.pages.rows import held_tokens, slots_of
from hf_diffkv.store import check_integrity, fork_store, hide_tokens, read_tokens, settle

MIXED = {"alpha_high": 1.0, "alpha_low": 0.5}
WINDOW_LEVEL = 3


def exact(pair: Pair) -> Tensor:
    return read_tokens(pair.store, 0).levels == WINDOW_LEVEL


@pytest.mark.parametrize("sinks", [0, 1, 4, 11])
def test_slots_are_those_of_a_window_filled_by_hand(sinks: int) -> None:
    """Tokens are put in one by one; a dictionary records where each one is."""
    slots, window = sinks + 5, 4
    end = torch.tensor([sinks])
    held: dict[int, int] = {}
    for token in range(40):
        slot = int(slots_of(torch.tensor([token]), end, sinks, slots))
        assert slot == token if token < sinks else sinks <= slot < slots
        held[slot] = token
        start = max(sinks, token + 1 - window)
        held = {slot: token for slot, token in held.items() if token < sinks or token >= start}
        state = torch.tensor([start]), torch.tensor([token + 1]), end
        assert held_tokens(*state, sinks, slots)[0].tolist() == [held.get(slot, -1) for slot in range(slots)]
        rows = SimpleNamespace(**dict(zip(("window_start", "length", "sink_end"), state)))
        assert int(LayerRows.held_count(rows)) == len(held) == min(token + 1, sinks + window)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("sinks", [1, 4, 13])
@pytest.mark.sampled(6)
def test_every_step_equals_the_simulation(backend: str, sinks: int) -> None:
    """A ragged batch, including rows shorter than the sinks; prompt, steps, a turn with padding, steps."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    config = DiffKVConfig(**MIXED, window=8, sinks=sinks)
    pair = Pair(config, 3, heads=2, group=2, dim=16, dtype=dtype)
    if dtype == torch.float32:
        # sums of `dim` numbers, back in the model's channels
        pair.token_tolerance = 5e-6
    if backend == "native" and library() is None:
        pytest.skip("no native library")
    pair.follow(20, *[1] * 25, valid=left_padding((20, 3, 1)))
    pair.follow(14, *[1] * 12, valid=left_padding((14, 14, 5)).flip(1))
    assert exact(pair)[0, :, :sinks].all() and exact(pair).sum(-1).amax() <= sinks + 9


@pytest.mark.parametrize("chunks", [(1,) * 40, (2, 1, 3, 1, 1, 20, 12), (3, 37), (40,)], ids=str)
def test_nothing_is_left_but_sinks_and_window(chunks: tuple[int, ...]) -> None:
    """Everything else is pruned, and what is left equals the input bit for bit."""
    config = DiffKVConfig.paper(alpha_high=1e6, alpha_low=1e6, window=5, sinks=4)
    pair = Pair(config, 2, heads=2, group=2, dim=16)
    fed = noted_draws(pair)
    for tokens in chunks:
        pair.forward(tokens)
    held = read_tokens(pair.store, 0)
    assert held.mask[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 35, 36, 37, 38, 39]
    for found, part in ((held.keys, fed[1::3]), (held.values, fed[2::3])):
        assert torch.equal(found, torch.cat(part, dim=2) * held.mask[..., None])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(6)
def test_policies_beside_sinks(case: str) -> None:
    """Budgets and shares apply to tokens that are neither in the window nor sinks."""
    policy, options, rule = CASES[case]
    config = DiffKVConfig(policy=policy, policy_options=options, window=6, sinks=5, page_bytes=512)
    pair = Pair(config, 2, heads=2, group=2, dim=16, place=PLACE, rule=rule)
    pair.follow(40, *[1] * 12, 9, *[1] * 6, valid=left_padding((40, 7)))


@pytest.mark.parametrize("sinks", [3, 4])
@pytest.mark.parametrize("tokens, steps", [(30, 0), (30, 3), (10, 2), (5, 0)])
@pytest.mark.parametrize("shown", ["some", "the last", "no sink", "all but a sink"])
@pytest.mark.sampled(6)
def test_hidden_sinks(sinks: int, tokens: int, steps: int, shown: str) -> None:
    """Remaining sinks stay; if nothing outside is left, the first tokens are sinks again."""
    config = DiffKVConfig(**MIXED, window=8, sinks=sinks)
    pair = RotatedPair(config, 3, heads=2, group=2, dim=16)
    pair.forward(tokens, left_padding((tokens, tokens - 3, 4)))
    pair.steps(steps)
    settle(pair.store)
    columns = torch.arange(pair.store.seen)
    index = pair.simulation._index
    mask = {
        "some": torch.rand(3, pair.store.seen, generator=torch.Generator().manual_seed(0)) > 0.4,
        "the last": (columns >= pair.store.seen - 3).expand(3, -1),
        "no sink": index >= sinks,
        "all but a sink": index == 1,
    }[shown]
    mask = mask & (index >= 0)
    hide_tokens(pair.store, mask)
    pair.simulation.hide(mask)
    pair.compare()
    pair.follow(*[1] * 10, 12, *[1] * 6)


@pytest.mark.parametrize("lengths", [(5, 3, 1, 2), (2, 2, 1, 1)], ids=str)
def test_tokens_taken_back_into_the_sinks(lengths: tuple[int, ...]) -> None:
    pair = RotatedSharedPair(DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=4, sinks=6))
    pair.forward(max(lengths), left_padding(lengths))
    settle(pair.store)
    pair.store.recording = True
    for tokens, rejected in ((4, 4), (6, 5), (1, 0), (4, 3), (9, 2), (1, 0), (6, 6), (3, 1), (1, 0), (8, 0)):
        pair.forward_recorded(tokens, rejected)
        pair.compare()


def test_chosen_repeated_and_forked_requests() -> None:
    pair = RotatedPair(DiffKVConfig(**MIXED, window=8), 3, heads=2, group=2, dim=16)
    pair.forward(30, left_padding((30, 3, 11)))
    shown = pair.store.padding.mask().clone()
    shown[0, 1:3] = False
    hide_tokens(pair.store, shown)
    before, fork = read_tokens(pair.store, 0), fork_store(pair.store)
    index = torch.tensor([2, 0, 0, 1])
    select_rows(pair.store, index)
    check_integrity(pair.store)
    assert pair.store.sink_end[0].tolist() == [4, 2, 2, 4] and fork.sink_end[0].tolist() == [2, 4, 4]
    for name in ("keys", "values", "levels", "score"):
        assert torch.equal(getattr(read_tokens(pair.store, 0), name), getattr(before, name)[index])
        assert torch.equal(getattr(read_tokens(fork, 0), name), getattr(before, name))


def test_a_budget_never_takes_sinks() -> None:
    fields = {"alpha_high": 0.0, "alpha_low": 0.0, "window": 8, "page_bytes": 512}
    free, tight = (
        RotatedPair(DiffKVConfig(**fields, **limit), 2, heads=2, group=2, dim=16, dtype=torch.float32)
        for limit in ({}, {"max_bytes": 30_000, "until_full": None})
    )
    for pair in (free, tight):
        for tokens in (300, *[1] * 150):
            begin(pair.store, tokens)
            states = [pair.draw(heads, tokens) for heads in (4, 2, 2)]
            attend(pair.store, 0, states, Softmax(0.25))
        check_integrity(pair.store)
    assert tight.store.bytes <= 30_000 < free.store.bytes
    assert (read_tokens(tight.store, 0).levels == 0).any()
    mine, theirs = (read_tokens(pair.store, 0) for pair in (tight, free))
    assert exact(tight)[:, :, :4].all() and torch.equal(mine.keys[:, :, :4], theirs.keys[:, :, :4])


def test_memory_counts_sinks() -> None:
    shape = (2, 3, 2, 16, 16, torch.bfloat16, torch.device("cpu"))
    none, four = (new_store(DiffKVConfig(alpha_high=1.0, sinks=sinks), *shape) for sinks in (0, 4))
    # keys, values and a sum for each
    assert four.bytes - none.bytes == 2 * 3 * 2 * 4 * (2 * 16 * 2 + 4)


@pytest.mark.parametrize("change", ["beyond the slots", "behind the window"])
def test_integrity_finds_sinks_out_of_place(change: str) -> None:
    pair = Pair(DiffKVConfig(**MIXED, window=8), 1, heads=2, group=2, dim=16)
    pair.forward(30)
    check_integrity(pair.store)
    if change == "beyond the slots":
        pair.store.sink_end += 1
    else:
        pair.store.window_start.fill_(3)
        pair.store.length.fill_(8)
    with pytest.raises(IntegrityError, match="after the sinks"):
        check_integrity(pair.store)


def generate(model: PreTrainedModel, cache: DiffKVCache, ids: Tensor, mask: Tensor, count: int, **options) -> Tensor:
    return model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=count, do_sample=False, **options)


@pytest.mark.parametrize("sinks", [0, 4])
def test_saved_caches(sinks: int, tmp_path: Path) -> None:
    """This includes a cache saved before sinks existed, with no mention of them."""
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, mask = ragged_prompts((30, 3))
    cache = DiffKVCache(model.config, DiffKVConfig(**MIXED, window=8, sinks=sinks))
    text = generate(model, cache, ids, mask, 6)
    cache.save_pretrained(tmp_path)
    if not sinks:
        write_as_before(tmp_path, 2, ["sinks"], without("sink_end"))
    loaded = DiffKVCache.from_pretrained(tmp_path, model)
    assert loaded.config == cache.config
    mask = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
    assert torch.equal(*(generate(model, each, text, mask, 20) for each in (cache, loaded)))
    assert_equal_contents(cache, loaded)


def test_beams_of_a_padded_batch() -> None:
    """Everything is exact at every level, so the text equals the dense cache's."""
    model = tiny_model("llama", "diffkv", dtype=torch.float64)
    ids, mask = ragged_prompts((20, 3, 1))
    expected = generate(model, DynamicCache(config=model.config), ids, mask, 24, num_beams=3)
    cache = DiffKVCache(
        model.config, DiffKVConfig.lossless(low=Precision(16, 16, 2, 2), window=8, sinks=4, alpha_high=1.0)
    )
    assert torch.equal(generate(model, cache, ids, mask, 24, num_beams=3), expected)
    cache.check_integrity()
