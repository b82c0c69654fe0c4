"""Tests of the compiled kernels on a real GPU: `TRITON_INTERPRET=0 python -m pytest tests/gpu`; skipped elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no GPU"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "set TRITON_INTERPRET=0 to test the compiled kernels"
    for item in items:
        if reason is not None and Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    torch.manual_seed(0)
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def device_survives(request: pytest.FixtureRequest):
    """Blames the test that broke the device: nothing later in this process could pass."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            # another worker takes its place
            os._exit(3)
        request.session.shouldfail = f"this process can no longer use the GPU: {error}"
