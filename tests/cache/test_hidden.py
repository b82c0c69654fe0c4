"""Masks that hide stored tokens: from then on, the tokens count as padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runs import (
    CONFIG,
    SLIDING_LAYERS_RECORD,
    THRESHOLDS,
    Followed,
    Run,
    assert_close_contents,
    assert_equal_contents,
    assert_equals_simulation,
    captured,
    contents,
    model_of,
    simulation_of,
    started,
    tokens,
)
from tiny_models import PAD, ragged_prompts, tiny_model
from torch import Tensor
from transformers import DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.cache import layer as cache_layer
from hf_diffkv.compat import passing

FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss")
LENGTHS = (90, 33, 5, 64)


def lossless(model: Any, **options: Any) -> DiffKVCache:
    """Both tiers are exact, so tokens move between them losslessly; without thresholds there is only one."""
    two_tiers = {"low": Precision(16, 16, 2, 2), "alpha_high": 1.0}
    return DiffKVCache(model.config, DiffKVConfig.lossless(**{"window": 8, **two_tiers, **options}))


def ends(run: Run, counts: tuple[int, ...]) -> None:
    """Hides the last tokens of each row, as if its answer were shorter than the longest."""
    for row, count in enumerate(counts):
        run.mask[row, run.mask.shape[1] - count :] = 0


@pytest.mark.oldest
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(100)
def test_a_conversation_of_uneven_answers(name: str) -> None:
    """`generate` pads the rows that finish early; from the next turn on, the mask hides that padding."""
    model = tiny_model(name, "eager")

    def talk(cache: Any) -> list[Tensor]:
        ids, mask = ragged_prompts((60, 33, 17))
        said = []
        for turn in range(4):
            options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": list(range(3 + turn, 14 + turn))}
            answer = model.generate(ids, attention_mask=mask, **passing(cache), **options)
            said.append(answer[:, ids.shape[1] :])
            mask = torch.cat([mask, (said[-1] != PAD).long()], 1)
            more, more_mask = ragged_prompts(((5, 9, 1), (1, 3, 2), (30, 1, 2), (1, 1, 1))[turn], seed=turn)
            ids, mask = torch.cat([answer, more], 1), torch.cat([mask, more_mask], 1)
        return said

    model.set_attn_implementation("eager")
    expected = talk(DynamicCache(config=model.config))
    assert sum(int((answer == PAD).sum()) for answer in expected) > 40, "all rows ended together"
    cache = lossless(model)
    torch.testing.assert_close(talk(cache), expected, rtol=0, atol=0)
    cache.check_integrity()


@pytest.mark.parametrize("name, options", [*((name, {}) for name in FAMILIES), ("llama", {"alpha_high": 0.0})], ids=str)
@pytest.mark.sampled(100)
def test_steps_of_one_token_hide_as_well(name: str, options: dict) -> None:
    model = model_of(name)
    run = started(model, LENGTHS, cache=lossless(model, **options))
    dense = started(model, LENGTHS, cache=DynamicCache(config=model.config))
    generator = torch.Generator().manual_seed(0)
    for seed in range(25):
        hidden = torch.rand(run.mask.shape, generator=generator) < 0.03
        for each in (run, dense):
            each.mask = each.mask * (~hidden).long()
        logits = run.feed(tokens(4, 1, seed))
        torch.testing.assert_close(logits, dense.feed(tokens(4, 1, seed)), rtol=1e-6, atol=1e-6)
    assert int(run.mask.sum()) < sum(LENGTHS) + 4 * 25 - 100
    assert sum(run.cache.memory().tokens.values()) == int(run.mask.sum()) * 2 * len(run.cache.compressed_layers())
    run.cache.check_integrity()


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.slow
def test_compressed_tokens_equal_the_simulation_without_the_hidden_ones(name: str) -> None:
    config = DiffKVConfig.paper(**THRESHOLDS[name], window=16, sinks=4)
    with captured() as layers:
        run = started(model_of(name), LENGTHS, config)
        followed = Followed(run, layers, config)
        for turn in range(4):
            for seed in range(20):
                followed.feed(tokens(4, 1, seed))
            ends(run, ((0, 7, 19, 2), (20, 0, 1, 18), (3, 0, 0, 0), (9, 9, 30, 0))[turn])
            followed.feed(*ragged_prompts(((9, 3, 0, 4), (1, 1, 1, 1), (30, 2, 8, 0), (2, 2, 2, 2))[turn], seed=turn))
        # anywhere, not only at the end of a turn, and also in a step of one token
        generator = torch.Generator().manual_seed(1)
        for seed in range(12):
            run.mask = run.mask * (torch.rand(run.mask.shape, generator=generator) > 0.05).long()
            followed.feed(tokens(4, 1, seed))
        run.mask[1] = 0  # a row starts over
        run.mask[2, :-3] = 0
        followed.feed(tokens(4, 6))
        for seed in range(30):
            followed.feed(tokens(4, 1, seed))
    counts = [int((run.cache.levels(1) == level).sum()) for level in (-1, 0, 1, 2, 3)]
    assert min(counts) > 25, f"a level is nearly missing, so little is compared: {counts}"


def test_hidden_tokens_give_their_pages_back() -> None:
    run = started(model_of(), (600, 600))
    store = run.cache.stores.all[0]
    capacity, before = store.pool.capacity, store.owned_pages().numel()
    run.mask[:, :550] = 0
    run.feed(tokens(2, 2))
    assert store.pool.capacity == capacity and store.owned_pages().numel() < 0.3 * before
    assert sum(run.cache.memory().tokens.values()) == 2 * 2 * 2 * 52
    assert run.cache.get_seq_length() == 602
    assert (run.cache.levels(0)[:, :, :550] == -1).all()
    run.cache.check_integrity()


@pytest.mark.skipif(not SLIDING_LAYERS_RECORD, reason="Transformers' own sliding layers do not")
@pytest.mark.parametrize("count", [1, 6], ids=["step", "turn"])
def test_what_is_recorded_can_be_hidden(count: int) -> None:
    """Hides stored tokens and some that may still be taken back; the latter are then padding in their forward."""
    with captured() as layers:
        run = started(model_of("gemma2"), LENGTHS)
        run.cache.activate_past_recording()
        run.feed(tokens(4, 8))
        ends(run, (3, 0, 1, 8))
        run.mask[:, 70:80] = 0
        run.feed(tokens(4, count, 2))
        run.crop(count - 1)
        layer = layers[0]
        layer.crop(count - 1)
        simulation = simulation_of(CONFIG, layer)
        query, key, value, valid, _ = layer.part(0, 90)
        simulation.forward(query, key, value, valid=valid, **layer.options)
        simulation.hide(run.mask[:, :90].bool())
        query, key, value, _, output = layer.part(90, 99)
        expected = simulation.forward(query, key, value, valid=run.mask[:, 90:].bool(), **layer.options)
        torch.testing.assert_close(output[:, :, -1], expected[:, :, -1], rtol=1e-6, atol=1e-6)
        assert_equals_simulation(run.cache, {0: simulation})
    assert sum(run.cache.memory().tokens.values()) == 2 * int(run.mask.sum())


def test_forks_copies_and_files_after_hiding(tmp_path: Any) -> None:
    run = started(model_of(), LENGTHS)
    run.steps(tokens(4, 5))
    untouched = contents(run.cache)
    fork = run.on(run.cache.fork(1)[0])
    fork.mask = run.mask.clone()
    ends(fork, (5, 2, 0, 40))
    fork.feed(tokens(4, 3))
    assert all(torch.equal(*pair) for pair in zip(contents(run.cache), untouched)), "the fork changed the original"
    alone = started(model_of(), LENGTHS)
    alone.steps(tokens(4, 5))
    ends(alone, (5, 2, 0, 40))
    alone.feed(tokens(4, 3))
    assert_equal_contents(fork.cache, alone.cache)

    fork.cache.save_pretrained(tmp_path, fork.model)
    loaded = fork.on(DiffKVCache.from_pretrained(tmp_path, fork.model))
    assert_equal_contents(loaded.cache, alone.cache)
    for each in (loaded, alone):
        each.select([3, 1, 1])
        each.steps(tokens(3, 4))
    assert_equal_contents(loaded.cache, alone.cache)


def test_a_mask_of_four_dimensions() -> None:
    """It is honoured if it hides a token from all new ones."""
    run, other = started(model_of(), LENGTHS), started(model_of(), LENGTHS)
    ends(run, (3, 0, 1, 20))
    ends(other, (3, 0, 1, 20))
    expected = run.feed(tokens(4, 5))
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(4, 1, 5, 5)
    mask = torch.cat([other.mask.bool()[:, None, None].expand(4, 1, 5, -1), causal], -1)
    positions = other.mask.sum(-1)[:, None] + torch.arange(5)
    with torch.no_grad():
        logits = other.model(tokens(4, 5), attention_mask=mask, position_ids=positions, **passing(other.cache)).logits
    torch.testing.assert_close(logits, expected)
    assert_close_contents(other.cache, run.cache)


@pytest.mark.parametrize("count", [1, 6], ids=["step", "turn"])
@pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
@pytest.mark.parametrize("case", ["hidden", "padding", "no mask"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.sampled(6)
def test_what_is_gone_cannot_be_shown(name: str, case: str, recording: bool, count: int) -> None:
    if recording and name == "gemma2" and not SLIDING_LAYERS_RECORD:
        pytest.skip("Transformers' own sliding layers do not")
    run = started(model_of(name), LENGTHS)
    if recording:
        run.cache.activate_past_recording()
    ends(run, (0, 1, 2, 0))
    run.feed(tokens(4, 3))
    twin = run.on(copy.deepcopy(run.cache))
    ids, mask = tokens(4, count), torch.cat([run.mask, torch.ones(4, count, dtype=torch.int64)], 1)
    if case == "no mask":
        mask = None
    else:
        mask[2, 89 if case == "hidden" else 0] = 1
    with pytest.raises(ValueError, match="padding or hidden before.*attention_mask"):
        run.model(ids, attention_mask=mask, **passing(run.cache))
    assert all(torch.equal(*pair) for pair in zip(contents(run.cache), contents(twin.cache)))
    # the sliding layer before the compressed one had consumed the tokens
    assert torch.equal(run.feed(ids), twin.feed(ids))
    assert_equal_contents(run.cache, twin.cache)
    run.cache.check_integrity()


@pytest.mark.parametrize("shows", [False, True], ids=["hides", "shows"])
@pytest.mark.sampled(100)
def test_where_the_host_must_not_wait_it_is_noticed_later(monkeypatch: pytest.MonkeyPatch, shows: bool) -> None:
    """Imitates a GPU, where a step's mask is compared on the device and the host reads it every few steps."""
    monkeypatch.setattr(cache_layer, "reads_are_free", lambda device: False)
    run = started(model_of(), LENGTHS)
    ends(run, (3, 0, 1, 20))
    run.feed(tokens(4, 2))  # several tokens: honoured at once
    assert (run.cache.levels(0)[3, :, 70:90] == -1).all()
    run.steps(tokens(4, 20))
    run.cache.check_integrity()
    run.mask[3, 89 if shows else 50] = int(shows)
    forks = [run.on(copy.deepcopy(run.cache)) for _ in range(3)]
    for each in forks:
        each.feed(tokens(4, 1))
    with pytest.raises(ValueError, match=r"single-token step hides.*reset\(\)"):
        forks[0].steps(tokens(4, 9))
    with pytest.raises(ValueError, match=r"single-token step hides.*reset\(\)"):
        forks[1].feed(tokens(4, 2))
    with pytest.raises(ValueError, match=r"single-token step hides.*reset\(\)"):
        forks[2].cache.check_integrity()


@pytest.mark.slow
def test_compiled_steps() -> None:
    torch._dynamo.reset()
    eager, compiled = started(model_of(), LENGTHS), started(model_of(), LENGTHS)
    compiled.model = torch.compile(compiled.model, fullgraph=True, backend="aot_eager")
    for seed in range(6):
        for run in (eager, compiled):
            run.mask[:, 10 * seed : 10 * seed + 4] = 0
        torch.testing.assert_close(compiled.feed(tokens(4, 1, seed)), eager.feed(tokens(4, 1, seed)))
    assert_close_contents(compiled.cache, eager.cache)
    assert compiled.cache.stores.all[0].padding.mask().sum() == compiled.mask.sum()
