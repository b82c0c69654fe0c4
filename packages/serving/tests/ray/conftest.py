"""A Ray of this machine, whose workers run this checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
PATH = os.pathsep.join((str(ROOT), str(ROOT / "packages" / "serving")))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    if not hasattr(ray, "init"):
        pytest.skip("Ray is not installed: pip install -e 'packages/serving[ray]'")
    # workers inherit it
    os.environ.update(PYTHONPATH=PATH, OMP_NUM_THREADS="1", RAY_raylet_start_wait_time_s="180")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, logging_level="warning")
    yield ray
    ray.shutdown()
