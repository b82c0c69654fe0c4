"""Transformers before 5.23 batches otherwise; what refuses it says so itself."""

from __future__ import annotations

import transformers

OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
collect_ignore = ["test_batched_tensor_parallel.py"] if OLDER else []
