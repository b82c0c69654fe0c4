"""Stands in for a GPU where the benchmarks use it: events, graphs, free memory and the profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# what the fake clock adds for an event, and for each operator of a replayed graph
EVENT_US, OPERATOR_US = 1000, 1


class FakeGpu:
    """A GPU as seen by benchmarks.

    Its clock is not the host's, because replays do nothing, and the host would time noise.

    Attributes:
        free: bytes of free memory.
        clock_us: microseconds since the start; see `EVENT_US` and `OPERATOR_US`.
        kernels: microseconds of each kernel that the profiler sees between start and stop.
        replayed: number of each replayed graph, in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch, measure: ModuleType) -> None:
        self.free = 1e12
        self.clock_us = 0
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
            "Event": partial(Event, self),
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
        graph = SimpleNamespace(operators=0)

        def replay() -> None:
            self.replayed.append(number)
            self.clock_us += OPERATOR_US * graph.operators

        graph.replay = replay
        return graph

    @contextmanager
    def _capture(self, graph: SimpleNamespace):
        with Operators() as seen:
            yield
        graph.operators = seen.count

    def _profile(self, activities: list) -> SimpleNamespace:
        def events() -> list[SimpleNamespace]:
            kind = torch.autograd.DeviceType.CUDA
            return [
                SimpleNamespace(name=name, device_type=kind, device_time_total=us) for name, us in self.kernels.items()
            ]

        def start() -> None:
            self.profiles += 1

        return SimpleNamespace(start=start, stop=lambda: None, events=events)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Event:
    """A time of the fake clock."""

    def __init__(self, gpu: FakeGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.clock_us += EVENT_US
        self.at = self.gpu.clock_us

    def elapsed_time(self, other: Event) -> float:
        return 1e-3 * (other.at - self.at)


def fake_gpu(patch: pytest.MonkeyPatch, load: Callable[[str], ModuleType]) -> FakeGpu:
    """Fakes a GPU. It must be called before a benchmark runs."""
    return FakeGpu(patch, load("measure"))
