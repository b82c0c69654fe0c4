"""Work recorded on a CUDA device.

`torch.cuda.graph` has three drawbacks here. Its single capture stream belongs to the device that captured first. Other
threads must not allocate while it captures. Finally, a capture that is invalidated, for example by a model that
synchronizes with the device, leaves the thread on the capture stream and the device's allocator and random generator in
the middle of a capture, so that they fail from then on.
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
    """Recorded work on a CUDA device.

    Args:
        device: CUDA device with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Any]) -> Any:
        """Records `work` without running it; `replay` fills its tensors.

        Raises:
            RuntimeError: `work` did something that cannot be recorded. This and any error of `work` itself leave
                PyTorch as it was before.
        """
        with _alone(), torch.cuda.stream(_stream(self._device)):
            torch.cuda.synchronize()
            # within a capture, the allocator cannot reclaim cached memory
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
        """Makes the allocator give up the memory of a capture that did not end."""
        with suppress(RuntimeError):
            self._graph.pool()
            return  # it ended, and the graph frees its memory itself
        _invalidated.append(self._graph)
        for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(RuntimeError, AttributeError):
                getattr(torch._C, undo)(self._device.index, pool)


@contextmanager
def _alone() -> Iterator[None]:
    """Lets one capture run at a time, without garbage collection, as freeing objects may invalidate a capture."""
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
    """Gives the device's default generator a throwaway state within the block.

    Up to PyTorch 2.11, a capture changes the mode of the state it begins with, so other threads could not draw numbers
    until it ended, and none ever could if it did not. A forward that draws numbers therefore cannot be captured there.
    """
    generator = torch.cuda.default_generators[device.index]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(torch.Generator(device))
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)
