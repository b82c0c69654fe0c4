"""Shared by the tests of several devices and processes: quiet logs, and the helpers of the other folders."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

transformers.logging.set_verbosity_error()
for folder in ("integration", "generation"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
