"""Shared by the training tests: quiet logs, and the tiny models of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers

transformers.logging.set_verbosity_error()
# test folders are no packages; without this the helpers are found only if the integration tests are collected first
sys.path.append(str(Path(__file__).parents[1] / "integration"))
