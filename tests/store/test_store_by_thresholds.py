"""Prompts of stores that choose by thresholds: kernels without host reads, against the dense simulation."""

from __future__ import annotations

import interpreted  # noqa: F401
import pytest
import thresholds_oracle
import torch
from given_stores import attend_prompt, new_store
from launches import FIRST_READS, turns_of_layers
from test_compressed import Pair, left_padding
from test_rotated import RotatedPair, RotatedSharedPair

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import FreeList
from hf_diffkv.store import Store, begin_forward, check_integrity, prompt

MIXED = {"alpha_high": 1.0, "alpha_low": 0.5, "window": 8, "page_bytes": 448}


def relevel_at_once(monkeypatch: pytest.MonkeyPatch, how: str) -> list[int]:
    """Levels tokens in one go, by kernels or their reference, while everything else runs as on a CPU.

    Returns:
        Layers that were levelled the other way, in a list that grows as this happens.
    """
    monkeypatch.setattr(Store, "stores_by_kernel", property(lambda store: store.policy.by_thresholds))
    if how == "reference":
        monkeypatch.setattr("hf_diffkv.ops.store_prompt.launch.store_prompt", thresholds_oracle.store_prompt)
    others, decide = [], prompt.decide_levels

    def noted(store: Store, layer: int, *arguments: object) -> object:
        others.append(layer)
        return decide(store, layer, *arguments)

    monkeypatch.setattr(prompt, "decide_levels", noted)
    return others


def run(pair: Pair) -> None:
    """Runs padded prompts that stay in their windows and leave them, turns over what is stored, and steps."""
    with use_backend("reference"):
        pair.follow(7, valid=left_padding((7, 3)))
        pair.follow(60, valid=torch.tensor([[True] * 60, [False] * 24 + [True] * 36]))
        before = (pair.store.high_count.clone(), pair.store.low_count.clone())
        # stored tokens receive little from so many queries
        pair.follow(1, 1, 80)
        assert (pair.store.high_count + pair.store.low_count < before[0] + before[1] + 80).all()
        pair.follow(5, 1, 1, 1)
    pair.assert_mixed(10, (0, 1, 2))
    assert not pair.store.invalid


@pytest.mark.parametrize(
    "how, dtype, fields",
    [
        ("kernels", torch.bfloat16, {"paper": True, "alpha_high": ((1.0, 1.4),), "alpha_low": ((0.5, 0.2),)}),
        ("kernels", torch.float32, {"sinks": 3, "metadata_bits": 16}),
        ("kernels", torch.float16, {"rotate": False, "low": Precision(4, 2, 2, 4), "adaptive_rounding": True}),
        ("reference", torch.float32, {"sinks": 3, "metadata_bits": 16}),
        ("reference", torch.bfloat16, {"paper": True}),
    ],
    ids=str,
)
@pytest.mark.sampled(10)
def test_prompts_turns_and_steps(how: str, dtype: torch.dtype, fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    others = relevel_at_once(monkeypatch, how)
    fields = {**MIXED, **fields}
    make = DiffKVConfig.paper if fields.pop("paper", False) else DiffKVConfig
    pair = RotatedPair(make(**fields), 2, 2, 2, 16, dtype)
    if dtype != torch.float32:
        # outputs of at most 16 are rounded before and after they are rotated back
        pair.output_tolerance = 16 * 2**-8
        pair.score_tolerance = 1e-4
    run(pair)
    assert not others


def test_layers_that_share_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    others = relevel_at_once(monkeypatch, "reference")
    pair = RotatedSharedPair(DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=8))
    pair.forward(6, left_padding((6, 3, 1, 2)), 5)
    for tokens in (1, 60, 1, 12):
        pair.forward(tokens, None, 5)
        pair.compare()
    assert not others


def make_store(layers: int, **fields: object) -> Store:
    config = DiffKVConfig.paper(**{**MIXED, **fields})
    store = new_store(config, layers, 2, 1, 16, 16, torch.float32, torch.device("cpu"))
    for layer in range(layers):
        store.set_thresholds(layer, config.alpha_high, config.alpha_low)
    return store


def draw(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(2, heads, tokens, 16) for heads in (2, 1, 1)]


def test_few_looks_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward reads the free list if pages known to be free may not suffice; pages are not made for the worst case of
    all layers at once."""
    others = relevel_at_once(monkeypatch, "reference")
    looks, free = [], FreeList.free
    monkeypatch.setattr(FreeList, "free", property(lambda self: looks.append(1) or free.fget(self)))
    torch.manual_seed(0)
    store = make_store(32)
    for tokens in (60, 50):
        looks.clear()
        begin_forward(store, tokens)
        for layer in range(32):
            attend_prompt(store, layer, *draw(tokens), softmax=Softmax(0.25))
            if layer == 0:
                worst, known = max(store.forward.pages), len(looks)
        assert known == 0 and 1 < len(looks) <= 10
        check_integrity(store)
    assert store.pool.free_list.free < 4 * worst
    assert not others


def test_layers_whose_worst_case_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    others = relevel_at_once(monkeypatch, "reference")
    pair = Pair(DiffKVConfig.paper(**MIXED), 2, 2, 2, 16, torch.float32)
    pair.forward(60, left_padding((60, 40)))
    pool = pair.store.pool
    pool.max_pages = pool.capacity + 4
    pair.forward(40)
    pair.compare()
    assert others == [0] and pool.capacity <= pool.max_pages
    before = [getattr(pair.store, name).clone() for name in ("high_count", "low_count", "length", "window_key")]
    begin_forward(pair.store, 300)
    with pytest.raises(MemoryError, match="more pages"):
        attend_prompt(pair.store, 0, *[pair.draw(heads, 300) for heads in (4, 2, 2)], softmax=Softmax(0.25))
    after = [getattr(pair.store, name) for name in ("high_count", "low_count", "length", "window_key")]
    assert all(torch.equal(*both) for both in zip(before, after))
    check_integrity(pair.store)


@pytest.mark.parametrize("how", ["reference", "kernels"])
@pytest.mark.sampled(3)
def test_what_cannot_be_stored_is_seen_at_the_next_look(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relevel_at_once(monkeypatch, how)
    store = make_store(1)
    for wrong in (False, True):
        query, key, value = draw(12)
        value[1, :, 3] = float("nan") if wrong else 1.0
        begin_forward(store, 12)
        with use_backend("reference"):
            attend_prompt(store, 0, query, key, value, softmax=Softmax(0.25))
        if not wrong:
            store.look()
    with pytest.raises(ValueError, match="NaN, infinite or beyond 32752"):
        store.look()


@pytest.mark.parametrize("fields", [{"rotate": True, "center": True, "metadata_bits": 16}, {}], ids=str)
@pytest.mark.sampled(100)
def test_launches_and_reads(fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a layer launches at most 12 kernels after attention, and reads the device only to look at counts."""
    # launches for growing the pool do not belong to a layer
    for layer, after, reads in turns_of_layers(make_store(2, **fields), 16, monkeypatch, free=60):
        assert "level_new_kernel" in after
        assert reads == (FIRST_READS if layer == 0 else [])
        assert layer == 0 or len(after) <= 12, " ".join(after)
