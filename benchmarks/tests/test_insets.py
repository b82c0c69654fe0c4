"""The library's insets against the rows from which they were computed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from hf_diffkv.pages.inset import inset_of


@pytest.mark.parametrize("elements", [16, 32, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_insets_are_near_the_best(elements: int, bits: int, script: Callable[[str], ModuleType]) -> None:
    insets = script("insets")
    x = torch.randn(400_000 // elements, elements, generator=torch.Generator().manual_seed(1))
    parts, shrinkage = inset_of(bits, elements)
    error, measured = insets.measured(x, bits, 1 / parts if parts else 0.0)
    assert abs(measured - shrinkage) < 0.004
    assert error < 1.015 * min(insets.measured(x, bits, share / 48)[0] for share in range(12))
