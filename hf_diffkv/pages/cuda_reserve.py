"""CUDA memory that grows in place, through the driver's virtual memory management.

An address range as large as the device's memory is reserved once, and memory is mapped into it on demand. The contents
never move, so a captured graph stays valid while the cache grows. PyTorch's allocator does not count this memory;
`mapped_bytes` and `peak_mapped_bytes` do.
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
# held during stream capture: a device-wide synchronisation in any thread would invalidate the capture
capture_lock = threading.Lock()
# memory without an owner that has not been freed yet
_dropped: list[tuple[Any, int, int, int, list[tuple[int, int, int]]]] = []
_now: dict[int, int] = {}
_peak: dict[int, int] = {}


class CudaDriverError(RuntimeError):
    """Raised when a call to the CUDA driver fails.

    Attributes:
        code: `CUresult` of the driver.
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
    """The driver's `CUmemAllocationProp`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    ]


class _Access(ctypes.Structure):
    """The driver's `CUmemAccessDesc`."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DeviceMemory:
    """Reserved address range whose first `mapped` bytes have memory; freed when the object is collected.

    Args:
        library: CUDA driver, `ctypes.CDLL`.
        index: index of the device.
        size: size of the address range in bytes.

    Raises:
        CudaDriverError: a call to the driver failed.
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
        # at exit, the driver may already be unloaded, and it frees everything itself
        self._finalizer.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}

    def extend(self, num_bytes: int) -> None:
        """Maps memory for the first `num_bytes` bytes. Raises `CudaDriverError` if that fails; nothing has changed."""
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
        """Unmaps memory wholly beyond the first `num_bytes`, after all launched kernels have finished."""
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
    """Frees memory without an owner; memory that cannot be freed now waits for the next call."""
    # left to a later call during stream capture, or if garbage collection re-enters this function
    if not _dropped or not capture_lock.acquire(blocking=False):
        return
    try:
        if not torch.cuda.is_current_stream_capturing():
            waiting = [_dropped.pop() for _ in range(len(_dropped))]
            _dropped.extend(memory for memory in waiting if not _unmap(*memory))
    finally:
        capture_lock.release()


def _unmap(library: Any, index: int, address: int, size: int, parts: list[tuple[int, int, int]]) -> bool:
    """Frees one address range and its memory; returns False if launched kernels may still use it."""
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
    """Returns the bytes mapped on `device`, which PyTorch's allocator does not count."""
    return _now.get(_index(device), 0)


def peak_mapped_bytes(device: torch.device) -> int:
    """Returns the peak number of bytes mapped on `device` since `reset_peak_mapped`."""
    return _peak.get(_index(device), 0)


def reset_peak_mapped(device: torch.device) -> None:
    _peak[_index(device)] = mapped_bytes(device)


class CudaReservation(Reservation):
    """Growing device memory in an address range as large as the device's memory."""

    grows_in_place = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.committed = device, 0
        self._memory = DeviceMemory(driver(), _index(device), total_bytes(device))
        # PyTorch asks the driver for the device of the first byte
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
        # the first byte stays mapped, because PyTorch asks for its device
        self._memory.shrink(max(num_bytes, 1))
        self.committed = min(self.committed, num_bytes)

    def _takes(self, num_bytes: int) -> bool:
        """Maps memory for `num_bytes` bytes; returns False if the device is out of memory."""
        try:
            self._memory.extend(num_bytes)
        except CudaDriverError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            return False
        return True

    def _extend(self, num_bytes: int) -> None:
        """Maps memory, emptying PyTorch's cache if necessary. Raises `MemoryError` if there is not enough."""
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
    """Loads the CUDA driver's library. Raises `OSError` if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def as_tensor(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """Returns a uint8 [size] tensor over the whole address range, which keeps `memory` alive."""
    return torch.as_tensor(memory, device=device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


RESERVATIONS["cuda"] = CudaReservation
