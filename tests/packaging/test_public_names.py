"""A name at the top of a module stands for one thing in all packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "hf_diffkv", *(ROOT / "packages").glob("*/hf_diffkv_*"))


def public_names(tree: ast.Module) -> Iterator[str]:
    """Classes and constants that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        for target in targets(node):
            for given, value in pairs(target, node.value):
                if isinstance(given, ast.Name) and not given.id.startswith("_") and not is_handed_on(given.id, value):
                    yield given.id


def targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple):
        yield target, value
        return
    values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
    yield from zip(target.elts, values)


def is_handed_on(name: str, value: ast.expr | None) -> bool:
    """Whether it is `tl.constexpr(module.NAME)`: the constant of another module, as kernels take it."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr"):
        return False
    (given,) = value.args
    return isinstance(given, ast.Attribute) and given.attr == name


def repeated(sources: dict[str, str]) -> dict[str, list[str]]:
    """The names that several modules define, and which."""
    places: dict[str, list[str]] = {}
    for path, source in sources.items():
        for name in set(public_names(ast.parse(source))):
            places.setdefault(name, []).append(path)
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def test_no_name_stands_for_two_things() -> None:
    paths = [path for package in PACKAGES for path in package.rglob("*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    assert len(sources) > 100
    assert repeated(sources) == {}


def test_what_counts_as_repeated() -> None:
    sources = {
        "a": "A, B = 1, 2\nclass C: pass\n_D = 1\nE: int = 1\nF['x'] = 1",
        "b": "A = 1\nB = tl.constexpr(a.B)\nC = 3\n_D = 2\nE = 1\nF = 1",
        "c": "from a import A, C",
    }
    assert repeated(sources) == {"A": ["a", "b"], "C": ["a", "b"], "E": ["a", "b"]}
