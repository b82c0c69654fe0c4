"""The emulator and the compiler it takes its kernels from, for all tests of compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from selection import ALL

from tools.kernels.emulator.compiler import Compiler
from tools.kernels.emulator.launch import Emulator


@pytest.fixture(scope="session")
def compiler_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Compiler]]:
    """The compiler for a target."""
    made: dict[str, Compiler] = {}
    with ExitStack() as running:

        def get(target: str) -> Compiler:
            if target not in made:
                made[target] = running.enter_context(Compiler(tmp_path_factory.mktemp("triton"), target))
            return made[target]

        yield get


@pytest.fixture
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates without initialising is NaN, or 0xFF."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=["sm_80", "sm_90"] if ALL else ["sm_80"])
def emulator(
    request: pytest.FixtureRequest, compiler_for: Callable[[str], Compiler], poisoned_buffers: None
) -> Iterator[Emulator]:
    """Launches are executed from compiled code."""
    with Emulator(compiler_for(request.param)).active() as made:
        yield made


@pytest.fixture
def ampere(compiler_for: Callable[[str], Compiler], poisoned_buffers: None) -> Iterator[Emulator]:
    """The same, for sm_80 alone."""
    with Emulator(compiler_for("sm_80")).active() as made:
        yield made


@pytest.fixture
def hopper(compiler_for: Callable[[str], Compiler], poisoned_buffers: None) -> Iterator[Emulator]:
    """The same, for sm_90 alone."""
    with Emulator(compiler_for("sm_90")).active() as made:
        yield made
