"""Transformers before 5.23 batches otherwise; what refuses it says so itself."""

from __future__ import annotations

import transformers

ENGINE_TESTS = [
    "batching/test_admission_order.py",
    "batching/test_batched_families.py",
    "batching/test_batched_prefixes.py",
    "batching/test_beside_generate.py",
    "batching/test_captured_batches.py",
    "batching/test_continuous.py",
    "batching/test_engine.py",
    "batching/test_many_requests.py",
    "batching/test_no_memory.py",
    "batching/test_refused_options.py",
    "batching/test_request_records.py",
    "batching/test_sampling.py",
    "batching/test_shared_beginnings.py",
    "batching/test_sliding.py",
    "batching/test_until_full_batches.py",
    "distributed/test_batched_tensor_parallel.py",
    "server/test_drain.py",
    "server/test_operation.py",
    "server/test_queue.py",
    "server/test_serve_command.py",
]
collect_ignore = ENGINE_TESTS if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23) else []
