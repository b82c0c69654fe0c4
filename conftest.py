"""Shared by all tests: quiet logs, fixtures, and poisoned memory, so that reads of unwritten memory show."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# read when triton is first imported; on a GPU run the tests with TRITON_INTERPRET=0
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import transformers

# test folders are not packages; these hold shared cases of ops, pairs of a store and its simulation, policies
ROOT = Path(__file__).parent
sys.path += [
    str(ROOT / "tests" / folder) for folder in ("", "ops", "store", "policy", "distributed", "families", "evaluation")
]
sys.path += [str(ROOT / "packages" / "serving" / "tests" / "batching")]

# ruff: noqa: E402
from hub_stand_in import Hub
from quick import pytest_addoption, pytest_collection_modifyitems  # noqa: F401

from hf_diffkv.cache.graphs import DecodeStep
from hf_diffkv.pages import PagePool
from hf_diffkv.running.models import resolve_model

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def _loop_bounds_of_one_element() -> None:
    """Lets Triton 3.6 interpret `range` over loaded numbers: it holds them as arrays of shape [1], which NumPy 2.4 no
    longer turns into an int. Later releases do the same themselves."""
    import triton.runtime.interpreter as interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
    if importlib.metadata.version("triton").startswith("3.6."):
        _loop_bounds_of_one_element()


@pytest.fixture(autouse=True)
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new pages with 0xFF bytes: NaN metadata and scores, absurd positions."""
    add_pages = PagePool._add_pages

    def poison(self: PagePool, count: int) -> None:
        first = self.capacity
        add_pages(self, count)
        self.pages[first : self.capacity] = 0xFF

    monkeypatch.setattr(PagePool, "_add_pages", poison)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[DecodeStep]:
    """The `DecodeStep` of every `generate()` call."""
    found: list[DecodeStep] = []
    init = DecodeStep.__init__

    def note(self: DecodeStep, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(DecodeStep, "__init__", note)
    return found


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def qwen() -> Path:
    """The folder of Qwen2.5-Coder-0.5B-Instruct."""
    return fetched("qwen2.5-coder-0.5b")


def fetched(name: str) -> Path:
    """Returns the folder of a fetched model; skips the test if it is not there."""
    folder = Path(resolve_model(name))
    if not folder.is_dir():
        pytest.skip("run `make models`")
    return folder
