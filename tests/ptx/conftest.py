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
    """Fills memory that a launcher does not initialise with NaN, or with bytes of 0xFF."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)


def emulator_of(targets: list[str]) -> Callable:
    """A fixture by which launches are executed from compiled code."""

    @pytest.fixture(params=targets)
    def emulator(
        request: pytest.FixtureRequest, compiler_for: Callable[[str], Compiler], poisoned_buffers: None
    ) -> Iterator[Emulator]:
        with Emulator(compiler_for(request.param)).active() as made:
            yield made

    return emulator


emulator = emulator_of(["sm_80", "sm_90"] if ALL else ["sm_80"])
ampere, hopper = emulator_of(["sm_80"]), emulator_of(["sm_90"])
