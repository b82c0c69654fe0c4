"""Shared by the tests of several devices and processes: the helpers of the generation tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "generation"))
