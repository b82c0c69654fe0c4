"""Stands in for a GPU where the benchmarks talk to it: events, graphs, free memory and the profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch


class FakeGpu:
    """A GPU as benchmarks see it.

    Attributes:
        free: bytes of memory that are free.
        kernels: microseconds of each kernel that the profiler sees from its start to its stop.
        replayed: number of every graph that was replayed, in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch, measure: ModuleType) -> None:
        self.free = 1e12
        self.kernels = {"attend_kernel": 80.0, "finish_kernel": 20.0, "another": 100.0}
        self.replayed: list[int] = []
        self.graphs = 0
        self.profiles = 0
        init = measure.Session.__init__

        def on_gpu(session: object, args: object) -> None:
            init(session, args)
            session.gpu = True

        patch.setattr(measure.Session, "__init__", on_gpu)
        patch.setattr(measure, "FLUSH_BYTES", 64)
        patch.setattr(measure, "peak_bandwidth", lambda device: 4.8e12)
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Event": Event,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: nullcontext(),
            "synchronize": lambda device=None: None,
            "mem_get_info": lambda device: (self.free, 2 * self.free),
            "CUDAGraph": self._graph,
            "graph": self._capture,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.profiler, "profile", self._profile)

    def _graph(self) -> SimpleNamespace:
        number, self.graphs = self.graphs, self.graphs + 1
        return SimpleNamespace(replay=lambda: self.replayed.append(number), captured=False)

    @contextmanager
    def _capture(self, graph: SimpleNamespace):
        yield
        graph.captured = True

    def _profile(self, activities: list) -> SimpleNamespace:
        def events() -> list[SimpleNamespace]:
            kind = torch.autograd.DeviceType.CUDA
            return [
                SimpleNamespace(name=name, device_type=kind, device_time_total=us) for name, us in self.kernels.items()
            ]

        def start() -> None:
            self.profiles += 1

        return SimpleNamespace(start=start, stop=lambda: None, events=events)


class Event:
    """A CUDA event that reads the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def fake_gpu(patch: pytest.MonkeyPatch, load: Callable[[str], ModuleType]) -> FakeGpu:
    """Fakes a GPU. It must be called before a benchmark runs."""
    return FakeGpu(patch, load("measure"))
