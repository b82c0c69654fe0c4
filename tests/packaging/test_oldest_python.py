"""What the oldest declared Python refuses and the one that runs the tests does not."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest

import hf_diffkv

OLDEST = (3, 10)
# modules that stand for those of packages beside the library
ELSEWHERE = {"hf_diffkv.lmcache", "hf_diffkv.ray"}


def test_the_library_parses() -> None:
    paths = sorted(Path(hf_diffkv.__file__).parent.rglob("*.py"))
    assert len(paths) > 100
    for path in paths:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=OLDEST)


def dataclasses_of(module: object) -> list[type]:
    return [each for each in vars(module).values() if isinstance(each, type) and dataclasses.is_dataclass(each)]


def changeable(each: type) -> list[str]:
    """Names of fields whose default Python 3.10 takes for one that instances would share."""
    return [field.name for field in dataclasses.fields(each) if isinstance(field.default, (list, dict, set))]


def test_defaults_of_dataclasses() -> None:
    names = [found.name for found in pkgutil.walk_packages(hf_diffkv.__path__, "hf_diffkv.")]
    found: set[type] = set()
    for name in set(names) - ELSEWHERE:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # needs what is not installed
        found.update(dataclasses_of(module))
    assert hf_diffkv.DiffKVConfig in found and len(found) > 40
    assert {each.__name__: changeable(each) for each in found if changeable(each)} == {}


def test_a_dictionary_with_a_hash_is_found() -> None:
    class Hashable(dict):
        def __hash__(self) -> int:  # type: ignore[override]
            return 0

    made = dataclasses.make_dataclass("Made", [("given", dict, Hashable()), ("fine", int, 0)])
    assert changeable(made) == ["given"]
    with pytest.raises(SyntaxError):
        ast.parse("try: f()\nexcept* E: pass", feature_version=OLDEST)
