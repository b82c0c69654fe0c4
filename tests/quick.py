"""Selection of tests: `make test` runs the quick ones, `make test-all` all.

A quick run leaves out tests marked `slow`. Of the cases of a test marked `sampled(n)`, it runs the first and about one
in n of the rest, always the same ones. `--rest I/N` instead runs part I of N of what a quick run leaves out, so that N
such runs cover everything. If the command line names files or tests, all of them run.
"""

from __future__ import annotations

import zlib

import pytest


def _part(text: str) -> tuple[int, int]:
    """Returns I and N. Raises `ValueError` unless they are integers, 0 <= I < N."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(text)
    return index, count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the slow tests, and every case of the sampled ones")
    parser.addoption(
        "--rest", type=_part, metavar="I/N", help="part I (from 0) of N of the tests a quick run leaves out"
    )


def _quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests of a quick run."""
    quick, functions = set(), set()
    for item in items:
        every = max((marker.args[0] for marker in item.iter_markers("sampled")), default=1)
        function = item.nodeid.split("[")[0]
        chosen = function not in functions or zlib.crc32(item.name.encode()) % every == 0
        functions.add(function)
        if chosen and not item.get_closest_marker("slow"):
            quick.add(item)
    return quick


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all") or _named(config):
        return
    rest, quick = config.getoption("rest"), _quick(items)
    taken, left = [], []
    for item in items:
        if rest is None:
            wanted = item in quick
        else:
            wanted = item not in quick and zlib.crc32(item.nodeid.encode()) % rest[1] == rest[0]
        (taken if wanted else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = taken


def _named(config: pytest.Config) -> bool:
    """Returns whether the command line names files or folders, and not just all tests, as it does for workers."""
    folders = {config.rootpath, *(config.rootpath / folder for folder in config.getini("testpaths"))}
    return any((config.rootpath / arg).resolve() not in folders for arg in config.args)
