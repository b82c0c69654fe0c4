"""Memory of a CUDA device that grows in place, by the driver's virtual memory management.

Addresses are reserved once for as much as the device has; memory is mapped behind them as it is needed. What stands in
it never moves, so a captured graph stays valid while the cache grows. PyTorch's allocator knows nothing of this memory:
`mapped_bytes` and `peak_mapped_bytes` account for it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch

from .reserve import GROWTH, RESERVATIONS, Reservation

_OUT_OF_MEMORY = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
# held while a stream is captured: to wait for a whole device would invalidate the capture, in whatever thread
capture_lock = threading.Lock()
# what nobody holds any more, but has not been given back yet
_dropped: list[tuple[Any, int, int, int, list[tuple[int, int, int]]]] = []
_now: dict[int, int] = {}
_peak: dict[int, int] = {}


class CudaDriverError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        code: the driver's `CUresult`.
    """

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed with CUDA error {code}")
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationFlags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DeviceMemory:
    """Reserved addresses with memory mapped behind the first `mapped` bytes; given back when nobody holds the object.

    Args:
        library: the CUDA driver, `ctypes.CDLL`.
        index: of the device.
        size: bytes of addresses.

    Raises:
        CudaDriverError: the driver refuses.
    """

    def __init__(self, library: Any, index: int, size: int) -> None:
        self._library = library
        self.index = index
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, index))
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value
        self.size = -(-size // self.granularity) * self.granularity
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), *map(_wide, (self.size, 0, 0, 0)))
        self.address = address.value
        self.mapped = 0
        self._parts: list[tuple[int, int, int]] = []
        self._finalizer = weakref.finalize(self, _give_back, library, index, self.address, self.size, self._parts)
        # at exit the driver may be gone, and takes everything back by itself
        self._finalizer.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}

    def extend(self, num_bytes: int) -> None:
        """Maps memory behind the first `num_bytes`. Raises `CudaDriverError`; nothing has changed then."""
        more = -(-num_bytes // self.granularity) * self.granularity - self.mapped
        if more <= 0:
            return
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), _wide(more), ctypes.byref(self._properties), _wide(0))
        start = self.address + self.mapped
        try:
            self._call("cuMemMap", *map(_wide, (start, more, 0, handle.value, 0)))
        except CudaDriverError:
            self._library.cuMemRelease(handle)
            raise
        access = _Access(_Location(_ON_DEVICE, self.index), _READ_WRITE)
        try:
            self._call("cuMemSetAccess", _wide(start), _wide(more), ctypes.byref(access), _wide(1))
        except CudaDriverError:
            self._library.cuMemUnmap(_wide(start), _wide(more))
            self._library.cuMemRelease(handle)
            raise
        self._parts.append((start, more, handle.value))
        self.mapped += more
        _count(self.index, more)

    def shrink(self, num_bytes: int) -> None:
        """Takes away what was mapped wholly behind the first `num_bytes`, once nothing that was launched uses it."""
        if not self._parts or self._parts[-1][0] < self.address + num_bytes:
            return
        torch.cuda.synchronize(self.index)
        while self._parts and self._parts[-1][0] >= self.address + num_bytes:
            start, length, handle = self._parts.pop()
            _unmap_part(self._library, self.index, start, length, handle)
            self.mapped -= length

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CudaDriverError(name, code)


def _wide(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def _give_back(*memory: Any) -> None:
    _dropped.append(memory)
    give_back_dropped()


def give_back_dropped() -> None:
    """Gives back what nobody holds any more; what cannot be given back now waits for the next call."""
    # while a stream is captured, and where garbage is collected within this function, another call will do
    if not _dropped or not capture_lock.acquire(blocking=False):
        return
    try:
        if not torch.cuda.is_current_stream_capturing():
            waiting = [_dropped.pop() for _ in range(len(_dropped))]
            _dropped.extend(memory for memory in waiting if not _unmap(*memory))
    finally:
        capture_lock.release()


def _unmap(library: Any, index: int, address: int, size: int, parts: list[tuple[int, int, int]]) -> bool:
    """Whether it was done; not while kernels that were launched may still use the memory."""
    try:
        torch.cuda.synchronize(index)
    except RuntimeError:
        return False
    for start, length, handle in parts:
        _unmap_part(library, index, start, length, handle)
    library.cuMemAddressFree(_wide(address), _wide(size))
    return True


def _unmap_part(library: Any, index: int, start: int, length: int, handle: int) -> None:
    library.cuMemUnmap(_wide(start), _wide(length))
    library.cuMemRelease(_wide(handle))
    _count(index, -length)


def _count(index: int, more: int) -> None:
    _now[index] = _now.get(index, 0) + more
    _peak[index] = max(_peak.get(index, 0), _now[index])


def mapped_bytes(device: torch.device) -> int:
    """Bytes mapped on `device` now, beside what PyTorch's allocator holds."""
    return _now.get(_index(device), 0)


def peak_mapped_bytes(device: torch.device) -> int:
    """The most bytes that were mapped since `reset_peak_mapped`."""
    return _peak.get(_index(device), 0)


def reset_peak_mapped(device: torch.device) -> None:
    _peak[_index(device)] = mapped_bytes(device)


class CudaReservation(Reservation):
    """Device memory behind addresses reserved for as much as the device has."""

    grows_in_place = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.committed = device, 0
        self._memory = DeviceMemory(driver(), _index(device), total_bytes(device))
        # PyTorch asks the driver where the first byte lives
        self._extend(1)
        self.tensor = as_tensor(self._memory, device)

    @property
    def granularity(self) -> int:
        return self._memory.granularity

    @property
    def slack(self) -> int:
        return self._memory.mapped - self.committed

    def commit(self, num_bytes: int, *, ahead: bool = False) -> None:
        memory = self._memory
        if num_bytes > memory.size:
            raise MemoryError(
                f"the cache needs {num_bytes} bytes, more than the device's memory of {memory.size} bytes."
            )
        more = min(memory.mapped + memory.mapped // GROWTH // memory.granularity * memory.granularity, memory.size)
        if not (ahead and memory.mapped < num_bytes < more and self._takes(more)):
            self._extend(num_bytes)
        self.committed = max(self.committed, num_bytes)

    def shrink(self, num_bytes: int) -> None:
        # PyTorch asks where the first byte lives
        self._memory.shrink(max(num_bytes, 1))
        self.committed = min(self.committed, num_bytes)

    def _takes(self, num_bytes: int) -> bool:
        """Maps memory if the device has it to spare."""
        try:
            self._memory.extend(num_bytes)
        except CudaDriverError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            return False
        return True

    def _extend(self, num_bytes: int) -> None:
        """Maps memory; takes it from PyTorch's cache if need be. Raises `MemoryError`."""
        if self._takes(num_bytes):
            return
        give_back_dropped()
        with capture_lock, torch.cuda.device(self.device):
            torch.cuda.empty_cache()
        if not self._takes(num_bytes):
            raise MemoryError(
                f"{self.device} has no memory left for {num_bytes} bytes of cache; use a smaller batch, larger "
                "alpha_low, or set max_bytes."
            )


def driver() -> Any:
    """The CUDA driver's library; `OSError` where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def as_tensor(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """uint8 [size] over all reserved addresses; the tensor keeps `memory` alive."""
    return torch.as_tensor(memory, device=device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


RESERVATIONS["cuda"] = CudaReservation
