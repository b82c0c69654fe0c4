"""A folder of prefixes survives kills, full disks, damage, other models and other processes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from runs import CONFIG, Run, assert_equal_contents, model_of, started, tokens
from transformers import PreTrainedModel

from hf_diffkv import DiffKVConfig, PrefixStore
from hf_diffkv.cache.io import JSON_NAME, TENSORS_NAME, save_snapshot
from hf_diffkv.prefixes import tiers
from hf_diffkv.prefixes.tiers import PARTIAL

# what changes a file system, as `sys.addaudithook` calls it
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.truncate", "shutil.rmtree")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of(num_hidden_layers=1)


@pytest.fixture(scope="module")
def runs(model: PreTrainedModel) -> list[Run]:
    """A short prompt and one that continues it."""
    short = started(model, (30,))
    long = short.on(short.cache.fork(1)[0])
    long.feed(tokens(1, 20, 5))
    return [short, long]


def new_store(model: PreTrainedModel, folder: Path, **options: Any) -> PrefixStore:
    return PrefixStore(model, CONFIG, **{"device_bytes": 0, "folder": folder, **options})


def filled(model: PreTrainedModel, folder: Path, runs: list[Run]) -> PrefixStore:
    store = new_store(model, folder)
    assert all(store.insert(run.ids, run.cache) for run in runs)
    return store


def assert_finds(store: PrefixStore, runs: list[Run], length: int) -> None:
    """A request that continues the longer run is continued from `length` tokens, as the run of that length was."""
    cache = store.lookup(torch.cat([runs[1].ids, tokens(1, 3)], 1))
    assert cache.get_seq_length() == length
    for run in runs:
        if run.ids.shape[1] == length:
            assert_equal_contents(cache, run.cache)


def killed_at(change: int, work: Callable[[], None]) -> bool:
    """Runs `work` in a process of its own that ends without a word at its `change`-th change; whether it came to it."""
    child = os.fork()
    if child == 0:
        left = change

        def hook(event: str, args: tuple) -> None:
            nonlocal left
            writes = event in CHANGES and not (event == "open" and args[1] in ("r", "rb"))
            left -= writes
            if writes and left < 0:
                os._exit(9)

        sys.addaudithook(hook)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), "the work failed"
    return code == 9


def test_killed_at_any_change(model: PreTrainedModel, runs: list[Run], tmp_path: Path) -> None:
    """One prefix is removed to make room for another, a third one stays: what was complete is there, and no rest."""
    bystander = started(model, (40,), seed=7)
    before = filled(model, tmp_path / "before", [runs[0], bystander])
    limit = sum(before._tiers.folder.sizes().values()) + 6000

    def work() -> None:
        store = new_store(model, folder, folder_bytes=limit)
        store.insert(runs[1].ids, runs[1].cache)

    found = set()
    for change in range(100):
        folder = tmp_path / str(change)
        shutil.copytree(tmp_path / "before", folder)
        killed = killed_at(change, work)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store = new_store(model, folder)
        lengths = {entry.tokens for entry in store}
        assert {path.name for path in folder.iterdir()} == {".lock", *store._tiers.folder.names()}
        assert lengths in ({30, 40}, {40}, {40, 50})
        assert_finds(store, runs, max(lengths - {40}, default=0))
        found.add(frozenset(lengths))
        assert store.insert(runs[1].ids, runs[1].cache)
        if not killed:
            break
    assert not killed and len(found) == 3, "it came to every change"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError("code: 28")])
def test_a_full_disk(
    error: Exception, model: PreTrainedModel, runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(model, tmp_path, runs[:1])

    def fail(snapshot: Any, folder: Path, *args: Any) -> None:
        save_snapshot(snapshot, folder, *args)
        os.truncate(folder / TENSORS_NAME, 100)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "save_snapshot", fail)
        with pytest.warns(RuntimeWarning, match="cannot be written: .*(No space|code: 28)"):
            assert not store.insert(runs[1].ids, runs[1].cache)
        with warnings.catch_warnings():
            # it was said, and is only counted
            warnings.simplefilter("error")
            assert not store.insert(runs[1].ids, runs[1].cache)
        assert store.stats.disk_errors == 2
    assert not list(tmp_path.glob(PARTIAL + "*"))
    assert_finds(store, runs, 30)
    assert store.insert(runs[1].ids, runs[1].cache)
    assert_finds(store, runs, 50)


def test_each_kind_of_disk_error_is_reported(
    model: PreTrainedModel, runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(model, tmp_path, runs[:1])
    for error in (OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "Permission denied")):
        with monkeypatch.context() as patched:
            patched.setattr(tiers, "save_snapshot", Mock(side_effect=error))
            with pytest.warns(RuntimeWarning, match=f"cannot be written: .*{error.strerror}"):
                assert not store.insert(runs[1].ids, runs[1].cache)


def test_a_file_in_place_of_a_prefix(model: PreTrainedModel, runs: list[Run], tmp_path: Path) -> None:
    """It is no prefix, so the store does not say that it holds one."""
    store = filled(model, tmp_path, runs[:1])
    (name,) = store._tiers.folder.names()
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).write_text("foreign")
    assert len(store) == 0 and store.lookup(runs[0].ids).get_seq_length() == 0
    with pytest.warns(RuntimeWarning, match="a prefix cannot be written"):
        assert not store.insert(runs[0].ids, runs[0].cache)
    assert not store.contains(runs[0].ids) and not list(store)


@pytest.mark.parametrize("name", [PARTIAL + "notes", PARTIAL + "0" * 16 + "-30-" + "0" * 32])
def test_a_foreign_file_with_a_partial_name(name: str, model: PreTrainedModel, runs: list[Run], tmp_path: Path) -> None:
    (tmp_path / name).write_text("foreign")
    store = filled(model, tmp_path, runs[:1])
    assert_finds(store, runs, 30)
    assert (tmp_path / name).read_text() == "foreign"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_damaged_files(
    name: str, damage: Callable[[Path], None], model: PreTrainedModel, runs: list[Run], tmp_path: Path
) -> None:
    """They are removed with a warning, and a shorter prefix serves."""
    store = filled(model, tmp_path, runs)
    longer = next(tmp_path.glob("*-50-*"))
    damage(longer / name)
    with pytest.warns(RuntimeWarning, match="damaged and is removed"):
        assert_finds(store, runs, 30)
    assert not longer.exists() and len(store) == 1
    assert store.insert(runs[1].ids, runs[1].cache)
    assert_finds(store, runs, 50)


def test_prefixes_under_each_others_names(model: PreTrainedModel, tmp_path: Path) -> None:
    """They are removed like damaged ones, so that they can be stored again."""
    runs = [started(model, (30,), seed=seed) for seed in (0, 1)]
    filled(model, tmp_path, runs)
    (one, other), aside = tmp_path.glob("*-30-*"), tmp_path / "aside"
    for old, new in ((one, aside), (other, one), (aside, other)):
        old.rename(new)
    store = new_store(model, tmp_path)
    for run in runs:
        with pytest.warns(RuntimeWarning, match="damaged and is removed.*holds other tokens than its name says"):
            assert store.lookup(torch.cat([run.ids, tokens(1, 3)], 1)).get_seq_length() == 0
    assert len(store) == 0 and store.stats.disk_errors == 2
    assert store.insert(runs[1].ids, runs[1].cache)
    found = store.lookup(torch.cat([runs[1].ids, tokens(1, 3)], 1))
    assert_equal_contents(found, runs[1].cache)


def test_files_that_cannot_be_read(
    model: PreTrainedModel, runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(model, tmp_path, runs)

    def fail(*args: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(tiers, "load_snapshot", fail)
        with pytest.warns(RuntimeWarning, match="cannot be read, so its tokens are computed"):
            assert_finds(store, runs, 0)
    assert_finds(store, runs, 50)


def test_a_folder_that_cannot_be_listed(
    model: PreTrainedModel, runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(model, tmp_path / "folder", runs)
    assert_finds(store, runs, 50)
    # a mount that is gone is no folder any more
    (tmp_path / "folder").rename(tmp_path / "kept")
    (tmp_path / "folder").touch()
    with pytest.warns(RuntimeWarning, match="the prefix folder cannot be listed"):
        assert_finds(store, runs, 0)
    assert len(store) == 0 and store.stats.disk_errors > 0
    assert list(store) == [] and "disk 0 (0.0 MB)" in repr(store)
    store.save()
    (tmp_path / "folder").unlink()
    (tmp_path / "kept").rename(tmp_path / "folder")
    assert_finds(store, runs, 50)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", _refuse)
        patched.setattr(os, "scandir", _refuse)
        with pytest.warns(RuntimeWarning, match="Permission denied"):
            assert store.look_ahead([runs[1].ids[0]])[0].tokens == 0 and len(store) == 0
    assert_finds(store, runs, 50)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_place_of_the_folder_is_refused(model: PreTrainedModel, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="^folder='.*' is, or is in, a file; give a folder"):
        new_store(model, tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_another_model(model: PreTrainedModel, runs: list[Run], tmp_path: Path) -> None:
    """Other weights, configurations and dtypes: nothing is found, all that is there counts, and the oldest goes."""
    filled(model, tmp_path, runs)
    other = model_of(num_hidden_layers=1, seed=2)
    lossless = DiffKVConfig.lossless()
    for another, config in ((other, CONFIG), (model, lossless), (model_of(num_hidden_layers=1).float(), CONFIG)):
        with pytest.warns(RuntimeWarning, match="holds 2 prefixes of another model, configuration or version"):
            store = PrefixStore(another, config, folder=tmp_path)
        assert len(store) == 0 and store.lookup(torch.cat([runs[1].ids, tokens(1, 3)], 1)).get_seq_length() == 0
    sizes = new_store(model, tmp_path)._tiers.folder.sizes()
    run = started(other, (30,))
    with pytest.warns(RuntimeWarning, match="another model"):
        store = new_store(other, tmp_path, folder_bytes=sum(sizes.values()) + 5000)
    assert store.insert(run.ids, run.cache)
    assert sum(store._tiers.folder.sizes().values()) <= sum(sizes.values()) + 5000
    with pytest.warns(RuntimeWarning, match="another model"):
        assert_finds(new_store(model, tmp_path), runs, 50)


def test_prefixes_of_before_and_of_other_processes(model: PreTrainedModel, runs: list[Run], tmp_path: Path) -> None:
    first = new_store(model, tmp_path, device_bytes=1 << 20)
    second = new_store(model, tmp_path, device_bytes=1 << 20)
    assert first.insert(runs[1].ids, runs[1].cache)
    assert_finds(second, runs, 0)
    first.save()
    assert_finds(second, runs, 50)
    assert second.stats.hits == {"device": 0, "disk": 1}
    assert [(entry.tier, entry.on_disk, entry.hits) for entry in second] == [("device", True, 1)]
    first.clear()
    assert_finds(second, runs, 50)
    assert second.stats.hits == {"device": 1, "disk": 1}
    shutil.rmtree(tmp_path)
    second.save()
    assert_finds(new_store(model, tmp_path), runs, 50)
    assert (runs[1].ids in second, runs[0].ids in second) == (True, False)


def test_two_processes_on_one_folder(model: PreTrainedModel, runs: list[Run], tmp_path: Path) -> None:
    """Both add, read and evict at the same time, in room for three of six prefixes."""
    probe = filled(model, tmp_path / "probe", runs[:1])._tiers.folder
    limit = 3 * max(probe.sizes().values()) + 4000
    folder = tmp_path / "shared"
    expected = started(model, (30,)).cache

    def work(seed: int) -> None:
        warnings.simplefilter("error")
        store, draw, hits = new_store(model, folder, folder_bytes=limit), random.Random(seed), 0
        end = time.monotonic() + 20
        for _ in range(60):
            ids = [draw.randrange(6), *range(3, 32)]
            if draw.random() < 0.5:
                store.insert(ids, expected)
            else:
                cache = store.lookup([*ids, 1])
                if cache.get_seq_length():
                    assert_equal_contents(cache, expected)
                    hits += 1
            with store._tiers.folder.exclusive():
                assert sum(store._tiers.folder.sizes().values()) <= limit
            assert time.monotonic() < end
        assert hits > 3

    children = []
    for seed in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                work(seed)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
            os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert 1 <= len(new_store(model, folder)) <= 3
    assert not list(folder.glob(PARTIAL + "*"))
