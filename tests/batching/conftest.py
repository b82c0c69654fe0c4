"""Transformers before 5.23 batches otherwise; what refuses it says so itself."""

from __future__ import annotations

import transformers

ENGINE_TESTS = [
    "test_admission_order.py",
    "test_batched_prefixes.py",
    "test_captured_batches.py",
    "test_continuous.py",
    "test_drain.py",
    "test_engine.py",
    "test_many_requests.py",
    "test_operation.py",
    "test_request_records.py",
    "test_sampling.py",
    "test_serve_command.py",
    "test_shared_beginnings.py",
    "test_sliding.py",
]
collect_ignore = ENGINE_TESTS if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23) else []
