"""The emulator and the compiler it takes its kernels from, for all tests of compiled code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")
# hand-made pages and cases
sys.path.append(str(Path(__file__).parents[1] / "ops"))

from emulator.compiler import Compiler  # noqa: E402
from emulator.launch import Emulator  # noqa: E402


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    with Compiler(tmp_path_factory.mktemp("triton")) as made:
        yield made


@pytest.fixture
def emulator(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Launches are executed from compiled code; what a launcher allocates without initialising is NaN, or 0xFF."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)
    with Emulator(compiler).active() as made:
        yield made
