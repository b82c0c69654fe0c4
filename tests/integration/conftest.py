"""Shared by the integration tests: quiet logs."""

from __future__ import annotations

import transformers

transformers.logging.set_verbosity_error()
