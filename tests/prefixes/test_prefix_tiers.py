"""Tiers of a prefix store: their limits are kept, and who gives way is what a simulation of CaR's score says."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, model_of, started

from hf_diffkv import PrefixStore
from hf_diffkv.prefixes import store as store_module
from hf_diffkv.prefixes.hierarchy import Entry, Requests
from hf_diffkv.prefixes.tiers import MemoryTier, Rank, choose_victims

TIERS = ("device", "host", "disk")
CLOCK = itertools.count()


def two_tiers(device: torch.device, device_bytes: int, host_bytes: int) -> list[MemoryTier]:
    """Tiers of a store on a GPU."""
    return [MemoryTier("device", device_bytes, device), MemoryTier("host", host_bytes, device, to_host=True)]


class Known:
    """A prefix of the simulation, from when a tier takes it until none holds it."""

    def __init__(self) -> None:
        self.score, self.used, self.tiers = 0, next(CLOCK), set()

    def rank(self) -> tuple[int, int]:
        return self.score, self.used


class Simulation:
    """Prefixes of one size in tiers that have room for some each, the last one on disk."""

    def __init__(self, *rooms: int) -> None:
        self.rooms = rooms
        self.known: dict[int, Known] = {}
        self.window: list[tuple[int, Known | None]] = []

    def place(self, prefix: Known, first: int) -> None:
        for tier in range(first, len(self.rooms)):
            if tier in prefix.tiers:
                return
            held = [known for known in self.known.values() if tier in known.tiers]
            if len(held) == self.rooms[tier]:
                least = min([*held, prefix], key=Known.rank)
                if least is prefix:
                    continue
                least.tiers.remove(tier)
                if tier < len(self.rooms) - 1:
                    self.place(least, tier + 1)
            prefix.tiers.add(tier)
            return

    def insert(self, name: int) -> None:
        if name in self.known:
            self.known[name].used = next(CLOCK)
        else:
            self.known[name] = Known()
            self.place(self.known[name], 0)
        self.forget_lost()

    def lookup(self, name: int) -> list[Known]:
        """Looks a prefix up and returns those that the request has raised."""
        raised, prefix = [], self.known.get(name)
        if prefix is not None:
            raised.append(prefix)
            prefix.score, prefix.used = prefix.score + 1, next(CLOCK)
            tier = min(prefix.tiers)
            if tier < len(self.rooms) - 1:
                prefix.tiers.remove(tier)
            self.place(prefix, 0)
            self.forget_lost()
        announced = [i for i, (one, _) in enumerate(self.window) if one == name]
        if announced:
            raised.append(self.window.pop(announced[0])[1])
        return [one for one in raised if one is not None]

    def look_ahead(self, names: list[int]) -> None:
        for change, window in ((-1, self.window), (1, [(name, self.known.get(name)) for name in names])):
            for _, prefix in window:
                if prefix is not None:
                    prefix.score += change
            self.window = window

    def forget_lost(self) -> None:
        self.known = {name: known for name, known in self.known.items() if known.tiers}

    def entries(self) -> list[tuple[str, bool, int]]:
        """Tier, whether on disk, score; the last to go first."""
        ranked = sorted(self.known.values(), key=Known.rank, reverse=True)
        last = len(self.rooms) - 1
        return [(TIERS[min(known.tiers)], last in known.tiers, known.score) for known in ranked]


@pytest.mark.parametrize("rooms", [(2, 3, 4), (3, 0, 2), (0, 2, 1), (1, 1, 1)])
def test_moves_between_tiers(rooms: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come at random; some are announced, some end by being stored and some by being dropped."""
    model = model_of(num_hidden_layers=1)
    cache = started(model, (6,)).cache
    probe = PrefixStore(model, CONFIG, folder=tmp_path / "probe")
    probe.insert(range(6), cache)
    probe.save()
    folder, snapshot = probe._tiers.folder, probe._tiers.tiers[0].get(next(iter(probe._tiers.entries)))
    on_disk = sum(folder.sizes().values())
    # files are a little smaller than what is reserved for them
    assert on_disk <= folder.cost(snapshot) < 2 * on_disk
    limits = (rooms[0] * snapshot.bytes, rooms[1] * snapshot.bytes, (rooms[2] - 1) * on_disk + folder.cost(snapshot))

    monkeypatch.setattr(store_module, "_memory_tiers", two_tiers)
    sizes = {"device_bytes": limits[0], "host_bytes": limits[1], "folder_bytes": limits[2]}
    store = PrefixStore(model, CONFIG, folder=tmp_path / "store", **sizes)
    simulation, draw, running = Simulation(*rooms), random.Random(0), []

    def prompt(name: int) -> list[int]:
        return [name, 1, 2, 3, 4, 5, 6]

    for _ in range(250):
        action, name = draw.random(), draw.randrange(9)
        if action < 0.35:
            store.insert(prompt(name), cache)
            simulation.insert(name)
        elif action < 0.7:
            cache_of_request = store.lookup(prompt(name))
            assert cache_of_request.get_seq_length() == 6 * (name in simulation.known)
            running.append((cache_of_request, simulation.lookup(name)))
            del cache_of_request
        elif action < 0.8:
            window = [draw.randrange(9) for _ in range(draw.randint(0, 3))]
            store.look_ahead([prompt(name) for name in window])
            simulation.look_ahead(window)
        elif running:
            ended, raised = running.pop(draw.randrange(len(running)))
            for known in raised:
                known.score -= 1
            if action < 0.9 and ended.get_seq_length():
                # stored again, or anew if it has gone meanwhile, under one name as by a model that is called directly
                ended.held_tokens.clear()
                store.insert(prompt(20), ended)
                simulation.insert(20)
            del ended
        found = list(store)
        assert [(entry.tier, entry.on_disk, entry.score) for entry in found] == simulation.entries()
        for tier, limit in zip(store._tiers.tiers, limits, strict=True):
            assert sum(tier.sizes().values()) <= limit
    stats = store.stats
    for tier, room in zip(TIERS, rooms):
        assert (stats.bytes_written[tier] > 0) == (stats.bytes_read[tier] > 0) == (stats.hits[tier] > 0) == (room > 0)


def test_threads(tmp_path: Path) -> None:
    """Four of them add and read at the same time; there is room for three of six prefixes in memory."""
    model = model_of(num_hidden_layers=1)
    cache = started(model, (30,)).cache
    one = PrefixStore(model, CONFIG)
    one.insert(range(30), cache)
    size = next(iter(one)).bytes
    store = PrefixStore(model, CONFIG, device_bytes=3 * size, folder=tmp_path, folder_bytes=3 * size)

    def work(seed: int) -> int:
        draw, hits = random.Random(seed), 0
        for _ in range(30):
            ids = [draw.randrange(6), *range(3, 32)]
            if draw.random() < 0.5:
                store.insert(ids, cache.fork(1)[0])
            else:
                restored = store.lookup([*ids, 1])
                restored.check_integrity()
                hits += restored.get_seq_length() == 30
            assert sum(store._tiers.tiers[0].sizes().values()) <= 3 * size
        return hits

    with ThreadPoolExecutor(4) as threads:
        hits = sum(threads.map(work, range(4)))
    assert hits == sum(store.stats.hits.values()) > 10
    # nothing is under way
    assert [entry.score for entry in store] == [0] * len(store)


def test_who_gives_way() -> None:
    ranks = {"old": Rank(0, 1), "new": Rank(0, 5), "wanted": Rank(2, 0)}
    sizes = {"old": 10, "new": 30, "wanted": 20}
    for rank, missing, expected in (
        (Rank(0, 9), 0, []),
        (Rank(0, 9), -5, []),
        (Rank(0, 9), 10, ["old"]),
        (Rank(0, 9), 11, ["old", "new"]),
        (Rank(0, 9), 41, None),
        (Rank(2, 9), 41, ["old", "new", "wanted"]),
        (Rank(2, 9), 61, None),
        (Rank(0, 3), 11, None),
    ):
        assert choose_victims(ranks, sizes, rank, missing) == expected


def test_what_is_too_large_goes_further_down(tmp_path: Path) -> None:
    model = model_of(num_hidden_layers=1)
    run = started(model, (60,))
    nowhere = PrefixStore(model, CONFIG, device_bytes=1000)
    assert not nowhere.insert(run.ids, run.cache) and len(nowhere) == 0
    disk = PrefixStore(model, CONFIG, device_bytes=1000, folder=tmp_path)
    assert disk.insert(run.ids, run.cache)
    assert [entry.tier for entry in disk] == ["disk"]
    full = PrefixStore(model, CONFIG, device_bytes=1000, folder=tmp_path / "full", folder_bytes=2000)
    assert not full.insert(run.ids, run.cache)
    # a smaller limit than that of those who wrote holds from the start
    assert len(PrefixStore(model, CONFIG, folder=tmp_path, folder_bytes=2000)) == 0


def test_host_and_device_are_one_on_a_cpu() -> None:
    model = model_of(num_hidden_layers=1)
    store = PrefixStore(model, CONFIG, device_bytes=10, host_bytes=90)
    assert [(tier.name, tier.limit) for tier in store._tiers.tiers] == [("device", 100)]


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_prefix_without_memory_in_a_tier_stays_in_the_next_one(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(num_hidden_layers=1)
    cache = started(model, (6,)).cache
    monkeypatch.setattr(store_module, "_memory_tiers", two_tiers)
    store = PrefixStore(model, CONFIG, host_bytes=1 << 20)
    device = store._tiers.tiers[0]
    for name in (1, 2):
        store.insert([name, 1, 2, 3, 4, 5], cache)
        device.limit = max(device.sizes().values())
    assert [entry.tier for entry in store] == ["device", "host"]

    def fail(snapshot: Any) -> Any:
        raise error("no memory")

    monkeypatch.setattr(device, "moved", fail)
    for name in (1, 2):
        assert store.lookup([name, 1, 2, 3, 4, 5, 6]).get_seq_length() == 6
        assert len(store) == 2
    assert {entry.tier for entry in store} == {"host"}


def test_an_interrupted_announcement_leaves_no_wrong_scores() -> None:
    class Interrupted(Entry):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "score" and interrupts:
                raise interrupts.pop()

    interrupts: list[BaseException] = []
    entries = [Entry(4), Interrupted(5), Entry(6)]
    window = [(str(entry.length), entry) for entry in entries]
    requests = Requests()
    for after in (window, []):
        requests.announce(window[:1])
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            requests.announce(window)
        requests.announce(after)
        assert [entry.score for entry in entries] == [int(bool(after))] * 3
