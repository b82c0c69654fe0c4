"""The instruction set and the number of threads that native code runs with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from native_code import SETS

from hf_diffkv.native.library import use_instructions


@pytest.fixture(params=SETS or ["none"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Instruction set of a test, each that runs here in turn."""
    with use_instructions(request.param):
        yield request.param


@pytest.fixture(params=[1, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)
