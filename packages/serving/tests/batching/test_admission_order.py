"""Order in which waiting requests are let in; none waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batching import LOSSLESS, chunks, expected, prompts, request_config
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.order import AdmissionOrder, ExpectedPrefix
from tiny_models import tiny_model

from hf_diffkv import PrefixStore

RESIDENT, NONE, SLOW = ExpectedPrefix("device", True), ExpectedPrefix(), ExpectedPrefix("disk", False)


def test_resident_hits_come_first_and_slow_ones_last() -> None:
    order = AdmissionOrder()
    found = {"a": SLOW, "b": NONE, "c": RESIDENT, "d": ExpectedPrefix("host", False), "e": RESIDENT}
    assert order.sort("abcdef", found) == ["c", "e", "b", "f", "a", "d"]
    assert order.sort("abc", {}) == ["a", "b", "c"]
    # what is being loaded is awaited where there is something else to do
    loading = {"a": ExpectedPrefix("disk", loading=True), "c": RESIDENT}
    assert order.sort("abc", loading, busy=True) == ["c", "b"]
    assert order.sort("abc", loading, busy=False) == ["c", "b", "a"]


def test_overtaking_has_an_end() -> None:
    order = AdmissionOrder(most_overtaken=3)
    waiting = ["slow", *(f"fast{i}" for i in range(9))]
    found = {name: SLOW if name == "slow" else RESIDENT for name in waiting}
    let_in = []
    while waiting:
        first = order.sort(waiting, found)[0]
        order.note(waiting, {first, "somebody who did not wait"})
        waiting.remove(first)
        let_in.append(first)
    assert let_in.index("slow") == 3 and let_in[4:] == [f"fast{i}" for i in range(3, 9)]


def test_one_that_is_overdue_is_let_in_before_all_others() -> None:
    """Even where it takes more room than they do: they would take what becomes free again and again."""
    order = AdmissionOrder(most_overtaken=2)
    order.note("abcd", {"c", "d"})
    assert order.sort("abe", {"e": RESIDENT}) == ["a"]
    # the one before it came first as well, and is let in by itself, too
    order.note("abe", {"a"})
    assert order.sort("be", {"e": RESIDENT}) == ["b"]
    order.note("be", {"b"})
    assert order.sort("ef", {"f": RESIDENT}) == ["f", "e"]


def test_at_any_load_nobody_is_overtaken_more_often() -> None:
    """Random arrivals and tiers, up to three let in at a time in the order that is asked for."""
    most, together = 5, 3
    rng, order, waiting, overtaken = random.Random(0), AdmissionOrder(most), [], {}
    kinds: dict[str, ExpectedPrefix] = {}
    for step in range(400):
        for i in range(rng.randint(0, 3)):
            name = f"{step}-{i}"
            waiting.append(name)
            overtaken[name], kinds[name] = 0, rng.choice([RESIDENT, NONE, SLOW])
        admitted = order.sort(waiting, kinds)[: rng.randint(0, together)]
        order.note(waiting, admitted)
        for at, name in enumerate(waiting):
            overtaken[name] += 0 if name in admitted else sum(later in admitted for later in waiting[at + 1 :])
        waiting = [name for name in waiting if name not in admitted]
    assert most <= max(overtaken.values()) < most + together


def test_the_tier_is_known_without_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    first, second, third = (torch.tensor(ids) for ids in prompts((40, 50, 60)))
    PrefixStore(model, LOSSLESS, device_bytes=0, folder=tmp_path).prefill(first)
    store = PrefixStore(model, LOSSLESS, folder=tmp_path)
    store.prefill(second)
    monkeypatch.setattr("hf_diffkv.prefixes.tiers.load_snapshot", lambda *args: pytest.fail("it was read"))
    more, before = torch.tensor([5, 6]), store.stats
    found = store.look_ahead([torch.cat([ids, more]) for ids in (first, second, third)] + [second])
    assert found == [replace(SLOW, tokens=40), replace(RESIDENT, tokens=50), NONE, NONE]
    assert store.stats == before


@pytest.mark.parametrize(
    ("loads", "order"), [(False, ["first", "resident", "none", "slow"]), (True, ["first", "slow", "resident", "none"])]
)
def test_the_engine_lets_them_in_in_this_order(
    loads: bool, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three wait until a slot is idle; what is loaded meanwhile is a resident hit."""
    model, admitted = tiny_model("llama"), []
    given = dict(zip(("first", "slow", "none", "resident"), prompts((20, 40, 50, 60))))
    PrefixStore(model, LOSSLESS, device_bytes=0, folder=tmp_path).prefill(torch.tensor(given["slow"]))
    store = PrefixStore(model, LOSSLESS, folder=tmp_path)
    for name in ("first", "resident"):
        store.prefill(torch.tensor(given[name]))
    manager = model.init_continuous_batching(request_config(LOSSLESS), chunks(max_requests_per_batch=1))
    manager.use_prefixes(store)
    extend = ContinuousCache.extend_read_and_write_indices

    def noted(cache: ContinuousCache, request_id: str, *args: object) -> None:
        if request_id not in admitted:
            admitted.append(request_id)
        elif request_id == "first":
            # its second forward: the others have been announced
            store.flush()
        extend(cache, request_id, *args)

    monkeypatch.setattr(ContinuousCache, "extend_read_and_write_indices", noted)
    if not loads:
        monkeypatch.setattr(store, "start", lambda: None)
    for name, ids in given.items():
        # all are there before the first batch is formed
        manager.add_request(ids + [7, 8], name, max_new_tokens=3)
    manager.start()
    results = [manager.get_result(timeout=60) for _ in given]
    manager.stop()
    assert admitted == order
    for result in results:
        assert result.generated_tokens == expected(model, given[result.request_id] + [7, 8], 3)
    assert store.stats.hits == ({"device": 3, "disk": 0} if loads else {"device": 2, "disk": 1})
    assert store.stats.loaded_ahead == loads
