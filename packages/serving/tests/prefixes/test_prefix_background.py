"""The thread that moves prefixes: what it moves, that nobody waits for it, and what becomes of what fails."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, model_of, started

from hf_diffkv import DiffKVCache, PrefixStore
from hf_diffkv.prefixes import store as store_module
from hf_diffkv.prefixes.tiers import FolderTier, MemoryTier

LENGTH, PATIENCE = 6, 60


class Stage:
    """A model, a cache of six tokens, and stores with room for so many prefixes of its size."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model_of(num_hidden_layers=1)
        self.cache = started(self.model, (LENGTH,)).cache
        probe = PrefixStore(self.model, CONFIG)
        probe.insert(range(LENGTH), self.cache)
        self.size, self.folder, self.made = next(iter(probe)).bytes, folder, []

        def two_tiers(device: torch.device, device_bytes: int, host_bytes: int) -> list[MemoryTier]:
            host = [MemoryTier("host", host_bytes, device, to_host=True)] if host_bytes else []
            return [MemoryTier("device", device_bytes, device), *host]

        monkeypatch.setattr(store_module, "_memory_tiers", two_tiers)

    def store(self, room: float, host: int = 0) -> PrefixStore:
        sizes = {"device_bytes": int(room * self.size), "host_bytes": host * self.size}
        self.made.append(PrefixStore(self.model, CONFIG, folder=self.folder, **sizes))
        return self.made[-1]

    def insert(self, store: PrefixStore, *names: int) -> None:
        for name in names:
            assert store.insert(self.ids(name)[:LENGTH], self.cache)

    def ids(self, name: int) -> list[int]:
        """Tokens of a request that begins with a prefix."""
        return [name, 1, 2, 3, 4, 5, 6]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path, monkeypatch)
    yield stage
    for store in stage.made:
        store.stop()


def tiers(store: PrefixStore) -> dict[str, int]:
    """Returns the number of prefixes in each tier."""
    found = [entry.tier for entry in store]
    return {tier: found.count(tier) for tier in set(found)}


def settled(store: PrefixStore) -> dict[str, int]:
    """Returns `tiers` once nothing is under way."""
    store.flush()
    return tiers(store)


class Gate:
    """Replaces a method of a class. Calls wait until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def held(*args: Any) -> Any:
            self.reached.set()
            assert self.open.wait(PATIENCE)
            return original(*args)

        monkeypatch.setattr(owner, name, held)


def test_above_90_percent_the_coldest_move_down(stage: Stage) -> None:
    """Moves prefixes from the device to the host and from there to the disk, except those that requests wait for."""
    store = stage.store(room=20, host=10)
    store.start()
    stage.insert(store, *range(18))
    assert settled(store) == {"device": 18} and store.stats.offloaded == 0
    store.lookup(stage.ids(0))
    store.look_ahead([stage.ids(1)])
    stage.insert(store, 18, 19)
    assert settled(store) == {"device": 18, "host": 2} and store.stats.offloaded == 2
    held = {name: store.look_ahead([stage.ids(name)], load=False)[0].tier for name in range(20)}
    assert [name for name in held if held[name] == "host"] == [2, 3]
    stage.insert(store, *range(20, 30))
    # the host keeps nine of ten as well
    assert settled(store) == {"device": 18, "host": 9, "disk": 3}
    store.stop()
    for name in range(30):
        assert store.lookup(stage.ids(name)).get_seq_length() == LENGTH


def test_nobody_waits_for_a_file_that_is_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile prefixes are added and read, and what is read stays in memory."""
    gate = Gate(monkeypatch, FolderTier, "put")
    store = stage.store(room=10)
    store.start()
    stage.insert(store, *range(10))
    assert gate.reached.wait(PATIENCE)
    assert store.lookup(stage.ids(0)).get_seq_length() == LENGTH
    assert tiers(store) == {"device": 10}
    gate.open.set()
    assert settled(store) == {"device": 9, "disk": 1}
    resident = [store.look_ahead([stage.ids(name)], load=False)[0].resident for name in range(3)]
    assert resident == [True, False, True]


def test_what_a_waiting_request_will_use_is_loaded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one prefix is read the store answers; then it is in memory, and another one has moved down for it."""
    stage.insert(stage.store(room=0), 0)
    store = stage.store(room=1.5)
    stage.insert(store, 1)
    gate = Gate(monkeypatch, FolderTier, "get")
    store.start()
    (found,) = store.look_ahead([stage.ids(0)])
    assert (found.tier, found.resident, found.loading) == ("disk", False, True)
    assert gate.reached.wait(PATIENCE)
    assert store.look_ahead([stage.ids(0), stage.ids(7)])[0].loading
    assert store.lookup(stage.ids(1)).get_seq_length() == LENGTH
    gate.open.set()
    store.flush()
    (found,) = store.look_ahead([stage.ids(0)])
    assert (found.tier, found.resident, found.loading) == ("device", True, False)
    cache = store.lookup(stage.ids(0))
    assert cache.get_seq_length() == LENGTH
    for mine, want in zip(cache.stores.all, stage.cache.stores.all, strict=True):
        assert torch.equal(mine.window_key, want.window_key)
    stats = store.stats
    assert stats.hits == {"device": 2, "disk": 0} and stats.loaded_ahead == stats.offloaded == 1
    assert stats.bytes_read["disk"] == stage.size


def test_what_requests_wait_for_is_not_moved_for_another(stage: Stage) -> None:
    stage.insert(stage.store(room=0), 0, 1)
    store = stage.store(room=1.5)
    store.start()
    waiting = [stage.ids(0), stage.ids(1)]
    store.look_ahead(waiting)
    store.flush()
    found = store.look_ahead(waiting)
    assert [one.tier for one in found] == ["device", "disk"]
    # and it is not read again and again
    assert not found[1].loading and store.stats.loaded_ahead == 1


def damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.glob("*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])


def fails(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: FolderTier, name: str) -> None:
        raise error

    monkeypatch.setattr(FolderTier, "get", get)


@pytest.mark.parametrize(
    ("spoil", "message", "left"),
    [
        (damage, "damaged and is removed", 0),
        (partial(fails, OSError("the disk is gone")), "the disk is gone", 1),
        (partial(fails, RuntimeError("nobody thought of this")), "could not be moved", 1),
    ],
    ids=["damaged", "unreadable", "broken"],
)
def test_what_cannot_be_loaded_is_logged_and_computed(
    stage: Stage,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    message: str,
    left: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage.insert(stage.store(room=0), 0)
    store = stage.store(room=5)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="hf_diffkv"):
        spoil(stage.folder, patch)
        store.start()
        store.look_ahead([stage.ids(0)])
        store.flush()
        assert len(caplog.records) == 1 and message in caplog.text
    assert len(store) == left
    # the thread goes on
    stage.insert(stage.store(room=0), 1)
    store.look_ahead([stage.ids(1)])
    store.flush()
    assert store.lookup(stage.ids(1)).get_seq_length() == LENGTH
    assert store.stats.hits == {"device": 1, "disk": 0}


def test_what_cannot_be_written_stays_in_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: FolderTier, *args: Any) -> None:
        raise OSError("no space left")

    store = stage.store(room=10)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="hf_diffkv"):
        patch.setattr(FolderTier, "put", full)
        stage.insert(store, *range(10))
        store.start()
        store.flush()
        # not all are tried
        assert len(caplog.records) == 1 and "no space left" in caplog.text
    assert tiers(store) == {"device": 10}
    store.lookup(stage.ids(3))
    assert settled(store) == {"device": 10} and store.stats.offloaded == 0
    stage.insert(store, 10)
    assert settled(store) == {"device": 9, "disk": 2}


def test_stopping_waits_for_what_is_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the last user, may be started again, and ends with the store."""
    gate = Gate(monkeypatch, FolderTier, "put")
    store = stage.store(room=10)
    stage.insert(store, *range(10))
    store.start()
    store.start()
    thread = store._background._thread
    assert gate.reached.wait(PATIENCE)
    store.stop()
    assert thread.is_alive()
    with ThreadPoolExecutor(1) as other:
        stopped = other.submit(store.stop)
        gate.open.set()
        stopped.result(PATIENCE)
    assert not thread.is_alive()
    assert tiers(store) == {"device": 9, "disk": 1}
    store.stop()
    store.start()
    stage.insert(store, 10)
    assert settled(store) == {"device": 9, "disk": 2}
    thread = store._background._thread
    stage.made.clear()
    del store
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_what_is_cleared_does_not_come_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, FolderTier, "put")
    store = stage.store(room=10)
    stage.insert(store, *range(10))
    store.start()
    assert gate.reached.wait(PATIENCE)
    with ThreadPoolExecutor(1) as other:
        # which waits for the lock of the folder
        cleared = other.submit(store.clear)
        gate.open.set()
        cleared.result(PATIENCE)
    store.flush()
    assert len(store) == 0
    assert not list(stage.folder.glob("*-*-*"))


@pytest.mark.parametrize("early", [False, True])
def test_what_was_brought_up_goes_when_nobody_waits_for_it(
    early: bool, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fill a tier to the brim; also where the request is taken back while it is read."""
    store = stage.store(room=3)
    store.start()
    stage.insert(store, 0, 1, 2)
    assert settled(store) == {"device": 2, "disk": 1}
    gate = Gate(monkeypatch, FolderTier, "get")
    store.look_ahead([stage.ids(0)])
    assert gate.reached.wait(PATIENCE)
    if early:
        store.look_ahead([])
    gate.open.set()
    store.flush()
    if not early:
        assert tiers(store) == {"device": 3}
        store.look_ahead([])
        store.flush()
    assert store.stats.loaded_ahead == 1
    assert tiers(store) == {"device": 2, "disk": 1}


def test_what_was_used_while_it_moved_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stage.store(room=3, host=2)
    stage.insert(store, 0, 1, 2)
    gate = Gate(monkeypatch, MemoryTier, "moved")
    store.start()
    assert gate.reached.wait(PATIENCE)
    # nothing but the first, which is on its way, may go
    used = [store.lookup(stage.ids(name)) for name in (1, 2)]
    store.lookup(stage.ids(0))
    gate.open.set()
    assert settled(store) == {"device": 2, "host": 1}
    assert [cache.get_seq_length() for cache in used] == [LENGTH] * 2


def test_what_found_no_room_below_is_tried_again(stage: Stage) -> None:
    """The host is full of what requests wait for, until they do not."""
    store = stage.store(room=3, host=2)
    stage.insert(store, *range(5))
    assert tiers(store) == {"device": 3, "host": 2}
    store.look_ahead([stage.ids(0), stage.ids(1)], load=False)
    store.start()
    assert settled(store) == {"device": 3, "host": 2}
    store.look_ahead([])
    assert settled(store) == {"device": 2, "host": 1, "disk": 2}


def test_threads_and_the_background(stage: Stage) -> None:
    """Four threads add, announce and read while prefixes move; there is room for five of twelve in memory."""
    store = stage.store(room=3, host=2)
    store.start()

    def work(seed: int) -> int:
        draw, hits = random.Random(seed), 0
        for _ in range(40):
            name, action = draw.randrange(12), draw.random()
            if action < 0.4:
                store.insert(stage.ids(name)[:LENGTH], stage.cache.fork(1)[0])
            elif action < 0.6:
                store.look_ahead([stage.ids(draw.randrange(12)) for _ in range(3)])
            else:
                cache: DiffKVCache = store.lookup(stage.ids(name))
                cache.check_integrity()
                hits += cache.get_seq_length() == LENGTH
        return hits

    with ThreadPoolExecutor(4) as threads:
        hits = sum(threads.map(work, range(4)))
    store.look_ahead([])
    store.flush()
    for tier, room in zip(store._tiers.tiers, (3, 2)):
        assert sum(tier.sizes().values()) <= 0.9 * room * stage.size
    assert hits == sum(store.stats.hits.values()) > 10
    assert store.stats.offloaded > 0 and [entry.score for entry in store] == [0] * len(store)
    names = {entry.tier for entry in store}
    assert names <= {"device", "host", "disk"} and len(store) > 5


def test_a_store_without_its_thread_goes_on_and_can_start_later(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stage.store(room=3)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr(threading.Thread, "start", refuse)
        store.start()
    store.stop()
    store.start()
    stage.insert(store, 0, 1, 2)
    assert settled(store) == {"device": 2, "disk": 1}
    store.stop()
    assert not any(thread.name == "hf_diffkv prefixes" for thread in threading.enumerate())
