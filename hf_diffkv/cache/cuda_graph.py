"""Work recorded on a CUDA device.

`torch.cuda.graph` would do, but for three things: its one capture stream belongs to whichever device captured first;
while it captures, other threads must not allocate; and a capture that is invalidated, as by a model that waits for the
device, leaves the thread on the capture stream, and allocator and random generator of the device in the middle of a
capture, where they fail from then on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from ..pages.cuda_reserve import capture_lock, give_back_dropped

# PyTorch keeps the addresses of graphs whose capture was invalidated
_invalidated: list[torch.cuda.CUDAGraph] = []


class CudaGraph:
    """One recorded piece of work on a CUDA device.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Any]) -> Any:
        """Records `work` without running it; its tensors are filled by `replay`.

        Raises:
            What `work` raises, and `RuntimeError` where it did something that cannot be recorded; PyTorch is as before.
        """
        with _alone(), torch.cuda.stream(_stream(self._device)):
            torch.cuda.synchronize()
            # within a capture the allocator cannot take back what it keeps for others
            torch.cuda.empty_cache()
            pool = torch.cuda.graph_pool_handle()
            try:
                with _spare_generator(self._device):
                    self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                output = work()
            except BaseException:
                with suppress(RuntimeError):
                    self._end(pool)
                raise
            self._end(pool)
            return output

    def replay(self) -> None:
        self._graph.replay()

    def _end(self, pool: tuple[int, int]) -> None:
        try:
            self._graph.capture_end()
        except BaseException:
            self._abandon(pool)
            raise

    def _abandon(self, pool: tuple[int, int]) -> None:
        """Has the allocator give up the memory of a capture that did not end."""
        with suppress(RuntimeError):
            self._graph.pool()
            return  # it ended, and the graph gives its memory back by itself
        _invalidated.append(self._graph)
        for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(RuntimeError, AttributeError):
                getattr(torch._C, undo)(self._device.index, pool)


@contextmanager
def _alone() -> Iterator[None]:
    """One capture at a time; no garbage is collected within, as what is freed by the way may invalidate it."""
    try:
        with capture_lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                if collects:
                    gc.enable()
    finally:
        give_back_dropped()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _spare_generator(device: torch.device) -> Iterator[None]:
    """Within, the device's default generator has a state of no account.

    Up to PyTorch 2.11 a capture changes the mode of the state it begins with: other threads could not draw numbers
    until it ends, and after one that never ends nobody could. So a forward that draws numbers cannot be captured there.
    """
    generator = torch.cuda.default_generators[device.index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device))
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
