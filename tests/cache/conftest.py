"""Shared by the integration tests: decode steps captured without a GPU."""

from __future__ import annotations

import weakref

import pytest
from recorded_graph import RecordedGraph, record_launches

from hf_diffkv.cache import graphs
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import Store


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch):
    """Records captures, and runs the kernels in Triton's interpreter."""
    monkeypatch.setitem(graphs.GRAPH_TYPES, "cpu", RecordedGraph)
    monkeypatch.setattr(graphs, "_given_up", weakref.WeakSet())
    monkeypatch.setattr(RecordedGraph, "made", [])
    record_launches(monkeypatch)
    # the interpreter is slow, so rows are rarely split and the host reads the device often
    monkeypatch.setattr("hf_diffkv.store.decode.SCRATCH_TOKENS", 64)
    monkeypatch.setattr(Store, "refresh_steps", 4)
    with use_backend("kernels"):
        yield


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips if the machine has no C++ compiler, which inductor needs on a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor finds no C++ compiler: {error}")
