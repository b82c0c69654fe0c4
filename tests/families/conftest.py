"""Transformers before 5.23 batches otherwise."""

from __future__ import annotations

import transformers

ENGINE_TESTS = ["test_batched_families.py"]
collect_ignore = ENGINE_TESTS if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23) else []
