"""Every policy compared with the dense simulation, step by step, and with its own promises."""

from __future__ import annotations

from typing import Any

import policy_simulation as rules
import pytest
import torch
from dense_simulation import HIGH, LOW, PRUNED, WINDOW, Rule
from given_stores import new_store
from test_compressed import Pair, left_padding
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.compact import least_mean
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.policy import POLICIES
from hf_diffkv.policy.ranking import HASHES, rank_in_rows, share_of, token_hash
from hf_diffkv.store import attend_token, attend_tokens, begin_forward, check_integrity, read_tokens

WINDOW_TOKENS = 12
PLACE = (1, 5)
CASES: dict[str, tuple[str, dict[str, Any], Rule]] = {
    "leankv": ("leankv", {"high_cut": 0.3, "low_cut": 0.1}, rules.LeanKV(0.3, 0.1)),
    "leankv without pruning": ("leankv", {"high_cut": 0.5}, rules.LeanKV(0.5)),
    "snapkv": ("snapkv", {"budget": 0.4}, rules.SnapKV(0.4)),
    "snapkv without pooling": ("snapkv", {"budget": 0.25, "pool": 1}, rules.SnapKV(0.25, 1)),
    "h2o": ("h2o", {"budget": 0.3, "minimum": 5}, rules.H2O(0.3, 5)),
    "h2o of nothing": ("h2o", {"budget": 0.0, "minimum": 0}, rules.H2O(0.0, 0)),
    "streaming": ("streaming", {"sinks": 3}, rules.Streaming(3)),
    "pyramid": ("pyramid", {"budget": 0.3, "beta": 5}, rules.Pyramid(*PLACE, 0.3, 5, 5.0)),
    "random": ("random", {"budget": 0.4, "pinned": 2, "seed": 7}, rules.Random(PLACE[0], 0.4, 2, 7)),
    "share": ("share", {"share": 0.3}, rules.Share(PLACE[0], 0.3)),
    "share, pruning": ("share", {"share": 0.4, "prune": 0.3}, rules.Share(PLACE[0], 0.4, 0.3)),
    "share by contribution": ("share", {"by": "contribution"}, rules.Share(PLACE[0], by="contribution")),
    "share at random": (
        "share",
        {"share": 0.4, "prune": 0.2, "by": "random"},
        rules.Share(PLACE[0], 0.4, 0.2, "random"),
    ),
    "share of all": ("share", {"share": 1.0, "prune": 0.5}, rules.Share(PLACE[0], 1.0, 0.5)),
    "share of none": ("share", {"share": 0.0}, rules.Share(PLACE[0], 0.0)),
}


def config_of(policy: str, policy_options: dict[str, Any], interval: int, **options: Any) -> DiffKVConfig:
    return DiffKVConfig(
        policy=policy,
        policy_options=policy_options,
        window=WINDOW_TOKENS,
        sinks=0,
        compaction_interval=interval,
        page_bytes=512,
        **options,
    )


def pair_of(case: str, batch: int, interval: int = 1, **options: Any) -> Pair:
    policy, policy_options, rule = CASES[case]
    config = config_of(policy, policy_options, interval, **options)
    return Pair(config, batch, heads=2, group=2, dim=16, place=PLACE, rule=rule)


def test_every_policy_has_a_case() -> None:
    assert {policy for policy, _, _ in CASES.values()} | {"diffkv"} == set(POLICIES)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(24)
def test_every_step_equals_the_simulation(case: str, interval: int) -> None:
    """A padded prompt, 60 steps, a further turn with gaps, 40 steps of which some rows take no part in."""
    pair = pair_of(case, 4, interval)
    pair.follow(90, *[1] * 60, valid=left_padding((90, 1, 37, 12)))
    pair.follow(23, valid=torch.rand(4, 23, generator=torch.Generator().manual_seed(1)) > 0.3)
    for step in range(40):
        pair.follow(1, valid=torch.tensor([[True], [True], [step % 3 > 0], [step > 20]]))


def outside(levels: Tensor) -> Tensor:
    return ((levels >= PRUNED) & (levels != WINDOW)).sum(-1)


def prompted(lengths: tuple[int, ...], policy: str, place: tuple[int, int] = (0, 1), **options: Any) -> Pair:
    config = DiffKVConfig(policy=policy, policy_options=options, window=WINDOW_TOKENS, sinks=0, page_bytes=512)
    pair = Pair(config, len(lengths), heads=3, group=1, dim=16, place=place)
    begin_forward(pair.store, max(lengths))
    pair.store.padding.append(max(lengths), left_padding(lengths))
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = torch.randn(3, len(lengths), 3, max(lengths), 16, generator=generator, dtype=torch.float64)
    attend_tokens(pair.store, 0, 3 * query, key, value, softmax=Softmax(0.25), valid=left_padding(lengths))
    return pair


def counts(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """High, low and all tokens outside the window, int64 [batch, heads]."""
    levels = read_tokens(pair.store, 0).levels
    return (levels == HIGH).sum(-1), (levels == LOW).sum(-1), outside(levels)


LENGTHS = (1, 12, 13, 14, 40, 111, 212)


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.5, 0.77, 1.0])
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_budgets_are_exact(policy: str, budget: float) -> None:
    least = {"minimum": 3} if policy == "h2o" else {}
    high, low, everything = counts(prompted(LENGTHS, policy, budget=budget, **least))
    expected = torch.floor(everything.double() * budget + 0.5).long().clamp(min=least.get("minimum", 0))
    assert torch.equal(high, torch.minimum(expected, everything)) and not low.any()


@pytest.mark.parametrize("share, prune", [(0.0, 0.0), (0.25, 0.0), (0.25, 0.4), (1.0, 0.3), (0.6, 1.0)])
@pytest.mark.parametrize("by", ["significance", "contribution", "random"])
def test_shares_are_exact(share: float, prune: float, by: str) -> None:
    high, low, everything = counts(prompted(LENGTHS, "share", share=share, prune=prune, by=by))
    pruned = torch.floor(everything.double() * prune + 0.5).long()
    assert torch.equal(high + low, everything - pruned)
    assert torch.equal(high, torch.floor((high + low).double() * share + 0.5).long())


@pytest.mark.parametrize("layers", [1, 2, 7])
@pytest.mark.parametrize("budget, beta", [(0.2, 20.0), (0.2, 1.0), (0.8, 4.0)])
@pytest.mark.sampled(100)
def test_pyramids_fall_and_keep_the_mean(layers: int, budget: float, beta: float) -> None:
    tokens = 1000
    kept = []
    for layer in range(layers):
        pair = prompted((tokens + WINDOW_TOKENS,), "pyramid", (layer, layers), budget=budget, beta=beta)
        high, _, _ = counts(pair)
        assert (high == high[0, 0]).all()
        kept.append(int(high[0, 0]))
    steps = [first - second for first, second in zip(kept, kept[1:])]
    assert abs(sum(kept) / layers - budget * tokens) <= 1
    assert not steps or (min(steps) >= 0 and max(steps) - min(steps) <= 1)
    if layers > 1 and budget < 0.5:
        assert abs(kept[-1] - budget * tokens / beta) <= 1


def test_streaming_keeps_the_ends() -> None:
    pair = prompted(LENGTHS, "streaming", sinks=2)
    for row, length in enumerate(LENGTHS):
        levels = read_tokens(pair.store, 0).levels[row, :, -length:]
        kept = (levels > PRUNED).nonzero()[:, 1].unique().tolist()
        assert kept == sorted({*range(min(2, length)), *range(max(0, length - WINDOW_TOKENS), length)})


def test_random_is_a_matter_of_seed_layer_head_and_position() -> None:
    def levels(lengths: tuple[int, ...], place: tuple[int, int] = (0, 4), seed: int = 0) -> Tensor:
        return read_tokens(prompted(lengths, "random", place, seed=seed, budget=0.3).store, 0).levels

    first = levels((300, 300))
    kept = (first == HIGH).float().mean(-1) * 300 / (300 - WINDOW_TOKENS)
    # four standard deviations of 288 draws
    assert ((kept - 0.3).abs() < 4 * (0.3 * 0.7 / 288) ** 0.5 + 4 / 288).all()
    assert torch.equal(first[0], first[1]), "the request does not matter"
    assert torch.equal(levels((100, 300))[1], first[0])
    others = [first[0, 1], levels((300,), (1, 4))[0, 0], levels((300,), seed=1)[0, 0]]
    for other in others:
        both = ((other == HIGH) & (first[0, 0] == HIGH)).sum()
        assert 5 < both < 60, "26 of 288 are expected"


@pytest.mark.parametrize("tokens, share, prune", [(400, 0.25, 0.0), (100, 0.5, 0.0), (300, 0.3, 0.4), (20, 0.1, 0.0)])
@pytest.mark.parametrize("spread", [0.0, 1.5])
@pytest.mark.sampled(100)
def test_generation_keeps_the_share(tokens: int, share: float, prune: float, spread: float) -> None:
    """500 tokens, with scores that are noise, or with tokens that differ from each other for good."""
    config = DiffKVConfig(
        policy="share", policy_options={"share": share, "prune": prune}, window=16, sinks=0, page_bytes=512
    )
    store = new_store(config, 1, 2, 4, 16, 16, torch.float32, torch.device("cpu"))
    store.set_thresholds(0, 1.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    for step, new in enumerate([tokens] + [1] * 500):
        key, value = torch.randn(2, 2, 4, new, 16, generator=generator)
        key[..., 0] = spread * torch.randn(2, 4, new, generator=generator)
        query = 2 * torch.randn(2, 4, new, 16, generator=generator)
        query[..., 0] = 8.0
        begin_forward(store, new)
        store.padding.append(new, None)
        (attend_token if step else attend_tokens)(store, 0, query, key, value, softmax=Softmax(0.125))
        high, kept = (count.float() for count in (store.high_count, store.high_count + store.low_count))
        wanted = (1 - prune) * store.window_start[..., None]
        assert ((high - share * kept).abs() <= 0.03 * kept + 2).all()
        assert ((kept - wanted).abs() <= 0.03 * wanted + 2).all()
    check_integrity(store)
    stored = read_tokens(store, 0)
    mean = stored.score / torch.arange(stored.score.shape[-1] - 1, -1, -1).clamp(min=1)
    if spread:
        high = stored.levels == HIGH
        ordered = torch.where(high | (stored.levels == LOW), mean, 0).sort(-1, descending=True).values
        best = torch.where(torch.arange(mean.shape[-1]) < high.sum(-1, keepdim=True), ordered, 0)
        assert ((mean * high).sum(-1) > 0.85 * best.sum(-1)).all(), "what is high matters more"


def test_ranks_within_rows() -> None:
    row = torch.tensor([2, 0, 2, 0, 2, 0, 2])
    key = torch.tensor([1.0, 5.0, 3.0, 5.0, 1.0, 7.0, 0.0])
    position = torch.tensor([4, 1, 9, 0, 6, 2, 1])
    rank, count = rank_in_rows(row, key, position, 4)
    # of equal keys the newest comes first, as the oldest is dropped first
    assert rank.tolist() == [2, 1, 0, 2, 1, 0, 3]
    assert count.tolist() == [3, 0, 4, 0]


def test_shares_round_half_up() -> None:
    assert share_of(torch.tensor([0, 1, 2, 3, 10]), 0.25).tolist() == [0, 0, 1, 1, 3]
    assert share_of(torch.tensor([5, 7]), 0.3).tolist() == [2, 2]


def test_hashes_are_uniform_and_unrelated() -> None:
    """Means, deviations and correlations within five standard errors of those of uniform numbers."""
    layers, heads, positions = torch.arange(3)[:, None, None], torch.arange(4)[:, None], torch.arange(10_000)
    drawn = [token_hash(seed, layers, heads, positions).flatten(0, 1).double() / HASHES for seed in (0, 1)]
    every = torch.cat(drawn)
    assert every.min() >= 0 and every.max() < 1
    assert ((every.mean(-1) - 0.5).abs() < 5 * (1 / 12 / 10_000) ** 0.5).all()
    assert ((every.std(-1) - 12**-0.5).abs() < 0.01).all()
    related = torch.corrcoef(torch.cat([every, every.roll(1, -1)]))
    assert related.fill_diagonal_(0).abs().max() < 0.05


def test_the_least_mean_of_each_row() -> None:
    pair = prompted((1, 14, 111), "share", share=0.5)
    store = pair.store
    tokens = read_tokens(store, 0)
    later = torch.arange(110, -1, -1).clamp(min=1)
    for tier, level in enumerate((HIGH, LOW)):
        least = least_mean(store.rows(0), tier)
        expected = torch.where(tokens.levels == level, tokens.score / later, torch.inf).amin(-1)
        assert torch.equal(least, expected)
    assert (expected == torch.inf).any() and (expected < torch.inf).any()
