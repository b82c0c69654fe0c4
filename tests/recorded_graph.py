"""A stand-in for a CUDA graph on the CPU: records every tensor operation and kernel launch, and replays these.

As on a GPU, no Python runs again at a replay: numbers the host held at capture stay as they were, and tensors
are those that were captured. Reading a tensor on the host during a capture is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_reads import READS, attend_within
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_diffkv.cache.stores import Stores


class RecordedGraph:
    """Graph with the methods of `hf_diffkv.cache.graphs.CudaGraph`. The capture also counts as the first replay."""

    current: RecordedGraph | None = None
    made: list[RecordedGraph] = []

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Callable[[], None]] = []
        self._captured_now = False
        self.made.append(self)

    def capture(self, work: Callable[[], Any]) -> Any:
        RecordedGraph.current = self
        try:
            with _Recorder(self):
                output = work()
        finally:
            RecordedGraph.current = None
        self._captured_now = True
        return output

    def replay(self) -> None:
        if self._captured_now:
            self._captured_now = False
            return
        for step in self.steps:
            step()


class _Recorder(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A forward compiled with backend "eager" stays compiled, and what it runs is recorded."""
        return True

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if RecordedGraph.current is not self.graph:
            return func(*args, **kwargs)  # within a kernel launch, which is recorded as a whole
        if func is torch.ops.hf_diffkv.attend.default:
            # its parts are recorded, not the whole, which does more if nothing is captured
            return attend_within(self, *args, **kwargs)
        if func.overloadpacket in READS:
            raise RuntimeError(f"{func} is not permitted during a capture")
        output = func(*args, **kwargs)
        flat = tree_flatten((args, kwargs))[0]
        inputs = {t.untyped_storage().data_ptr() for t in flat if isinstance(t, Tensor)}
        fresh = [
            (index, tensor)
            for index, tensor in enumerate(tree_flatten(output)[0])
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in inputs
        ]

        def again() -> None:
            results = tree_flatten(func(*args, **kwargs))[0]
            for index, tensor in fresh:
                tensor.copy_(results[index])

        self.graph.steps.append(again)
        return output


class RepeatedWork:
    """Another stand-in, for a forward whose kernels cannot be recorded: a replay repeats the captured work.

    It does not check what the host held at capture; `RecordedGraph` does.
    """

    def __init__(self, stores: Stores) -> None:
        self.stores = stores

    def capture(self, work: Callable[[], Any]) -> Any:
        self.work = work
        # a capture runs nothing
        self.stores.rehearsing = True
        self.output = work()
        self.stores.rehearsing = False
        return self.output

    def replay(self) -> None:
        self.stores.capturing = True
        output = self.work()
        self.stores.capturing = False
        for name, value in output.items():
            if isinstance(value, Tensor):
                self.output[name].copy_(value)


def record_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records each launch of Triton's interpreter as one step."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph, RecordedGraph.current = RecordedGraph.current, None
        try:
            result = launch(self, *args, **kwargs)
        finally:
            RecordedGraph.current = graph
        if graph is not None:
            graph.steps.append(lambda: launch(self, *args, **kwargs))
        return result

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
