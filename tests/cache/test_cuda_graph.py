"""Effects of a capture on PyTorch, with CUDA faked on the CPU."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from hf_diffkv.cache import cuda_graph
from hf_diffkv.cache.cuda_graph import CudaGraph

DEVICES = [torch.device("cuda", index) for index in range(2)]


class FakeCuda:
    """State that PyTorch 2.11 keeps while capturing."""

    def __init__(self) -> None:
        self.device = 0
        self.stream: object = "default"
        self.recording: set[tuple[int, tuple[int, int]]] = set()
        self.released: list[tuple[int, tuple[int, int]]] = []
        self.begun: list[tuple[int, object, str]] = []
        self.invalid = self.instantiable = False
        self.generators = tuple(FakeGenerator() for _ in DEVICES)

    @contextlib.contextmanager
    def use(self, stream: torch.device) -> Iterator[None]:
        before = self.device, self.stream
        self.device, self.stream = stream.index, stream
        try:
            yield
        finally:
            self.device, self.stream = before

    def end_allocation(self, device: int, pool: tuple[int, int]) -> None:
        if (device, pool) not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove((device, pool))

    def graph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeGenerator:
    def __init__(self, device: object = None) -> None:
        self.state = SimpleNamespace(capturing=False)

    def graphsafe_get_state(self) -> FakeGenerator:
        twin = FakeGenerator()
        twin.state = self.state
        return twin

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self.state = other.state

    def draw(self) -> None:
        if self.state.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.ended = cuda, False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.place, self.state = (self.cuda.device, pool), self.cuda.generators[self.cuda.device].state
        self.state.capturing = True
        self.cuda.recording.add(self.place)
        self.cuda.begun.append((self.cuda.device, self.cuda.stream, capture_error_mode))

    def capture_end(self) -> None:
        if self.cuda.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.recording.remove(self.place)
        self.state.capturing = False
        self.ended = True
        if not self.cuda.instantiable:
            raise RuntimeError("CUDA error: out of memory")

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.place[1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    fake.instantiable = True
    handles = iter(range(1, 100))
    for name, value in {
        "CUDAGraph": fake.graph,
        "Stream": lambda device: device,
        "stream": fake.use,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, next(handles)),
        "default_generators": fake.generators,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", FakeGenerator)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocation, raising=False)
    release = lambda device, pool: fake.released.append((device, pool))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(cuda_graph, "_invalidated", [])
    cuda_graph._stream.cache_clear()
    yield fake
    cuda_graph._stream.cache_clear()


def assert_as_before(cuda: FakeCuda) -> None:
    assert (cuda.device, cuda.stream) == (0, "default")
    assert not cuda.recording
    assert gc.isenabled() and not cuda_graph.capture_lock.locked()
    for generator in cuda.generators:
        generator.draw()


def test_a_capture(cuda: FakeCuda) -> None:
    states = [generator.state for generator in cuda.generators]

    def work() -> str:
        assert not gc.isenabled()
        # other threads may draw random numbers
        cuda.generators[0].draw()
        return "output"

    assert CudaGraph(DEVICES[0]).capture(work) == "output"
    # other threads may allocate
    assert cuda.begun == [(0, DEVICES[0], "thread_local")]
    assert [generator.state for generator in cuda.generators] == states
    assert not cuda.released and not cuda_graph._invalidated
    assert_as_before(cuda)


def test_every_device_captures_on_a_stream_of_its_own(cuda: FakeCuda) -> None:
    for device in (*DEVICES, DEVICES[0]):
        CudaGraph(device).capture(lambda: None)
    assert [(device, stream) for device, stream, _ in cuda.begun] == [
        (0, DEVICES[0]),
        (1, DEVICES[1]),
        (0, DEVICES[0]),
    ]
    assert_as_before(cuda)


def reads(cuda: FakeCuda) -> None:
    cuda.invalid = True
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def spoiled(cuda: FakeCuda) -> None:
    cuda.invalid = True


def no_room(cuda: FakeCuda) -> None:
    cuda.instantiable = False


def fails(cuda: FakeCuda) -> None:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    "work, error, message, invalidated",
    [
        (reads, RuntimeError, "not permitted when stream is capturing", True),
        (spoiled, RuntimeError, "a previous error during capture", True),
        (no_room, RuntimeError, "out of memory", False),
        (fails, KeyError, "no such layer", False),
    ],
)
def test_a_capture_that_fails_leaves_pytorch_as_it_was(
    cuda: FakeCuda, work: Callable[[FakeCuda], None], error: type, message: str, invalidated: bool
) -> None:
    states = [generator.state for generator in cuda.generators]
    graph = CudaGraph(DEVICES[1])
    with pytest.raises(error, match=message):
        graph.capture(lambda: work(cuda))
    assert [generator.state for generator in cuda.generators] == states
    assert_as_before(cuda)
    # PyTorch releases the memory of captures that ended, but not that of others, and keeps their addresses
    assert cuda.released == ([(1, (0, 1))] if invalidated else [])
    assert cuda_graph._invalidated == ([graph._graph] if invalidated else [])
    cuda.invalid, cuda.instantiable = False, True
    CudaGraph(DEVICES[1]).capture(lambda: None)
    assert_as_before(cuda)


class WatchedLock:
    """Reports when a thread has to wait for it."""

    def __init__(self) -> None:
        self.lock, self.awaited = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.awaited.set()
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_one_capture_at_a_time(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, order = WatchedLock(), []
    monkeypatch.setattr(cuda_graph, "capture_lock", lock)

    def work() -> None:
        other.start()
        assert lock.awaited.wait(60)
        order.append("first")

    other = threading.Thread(target=lambda: CudaGraph(DEVICES[0]).capture(lambda: order.append("second")))
    CudaGraph(DEVICES[0]).capture(work)
    other.join()
    assert order == ["first", "second"]


def test_garbage_collection_that_was_off_stays_off(cuda: FakeCuda) -> None:
    gc.disable()
    try:
        CudaGraph(DEVICES[0]).capture(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()
