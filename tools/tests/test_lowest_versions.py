"""The constraints with which the oldest supported versions are tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def test_bounds_and_what_is_left_out(tool: ModuleType) -> None:
    given = ["accelerate>=1.1", "huggingface_hub >= 1.5, <3", "x-y>=2; platform_system == 'Linux'", "torch>=2.11"]
    assert tool.lowest_versions(given) == {"accelerate": "1.1", "huggingface_hub": "1.5", "x-y": "2"}


@pytest.mark.parametrize("requirement", ["tqdm", "tqdm<5", "tqdm<5,>=4", "tqdm==4"])
def test_a_bound_that_is_missing(tool: ModuleType, requirement: str) -> None:
    with pytest.raises(ValueError, match="no lower bound; write it as"):
        tool.lowest_versions([requirement])


def test_every_dependency_has_a_bound(tool: ModuleType, tmp_path: Path) -> None:
    """Calls the script as CI does. Each name is a dependency of the package."""
    path = tmp_path / "folder" / "lowest.txt"
    subprocess.run([sys.executable, str(ROOT / "tools" / "lowest_versions.py"), str(path)], check=True)
    lines = path.read_text().split()
    assert {"transformers==5.17", "click==8.4.2", "triton==3.6"} <= set(lines)
    assert len(lines) == len(tool.dependencies()) - 1
