"""Byte arrays that grow in place: address space is reserved once, and memory is taken on demand.

Growth neither copies nor moves anything, so peak memory equals the memory held. If the operating system cannot reserve
address space, the array grows by copying and `grows_in_place` is False. For CUDA devices, see `cuda_reserve.py`.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable

import torch

_logger = logging.getLogger("hf_diffkv")
# MAP_NORESERVE: the reservation is not counted as memory in use (Python names it only since 3.13)
_NO_RESERVE = {"linux": 0x4000, "darwin": 0x0040}
_FALLBACK_RESERVATION = 1 << 36
_LARGE_PAGE = 1 << 21
# memory taken in advance grows by at least 1 / GROWTH, because every extension is a driver call or a copy
GROWTH = 16
# exceptions raised when a device is out of memory
NO_MEMORY = (MemoryError, torch.OutOfMemoryError)

# reservations that grow in place on other device types; `cuda_reserve.py` adds its own
RESERVATIONS: dict[str, Callable[[torch.device], Reservation]] = {}


class Reservation:
    """Growing uint8 memory on one device.

    Attributes:
        device: device that holds the bytes.
        tensor: the memory, uint8 [at least committed].
        committed: number of usable bytes, which count as held.
        granularity: unit in which memory is taken, in bytes; 0 if that does not matter.
        slack: bytes held beyond `committed`.
    """

    grows_in_place = False
    granularity = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.committed = 0
        self.tensor = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def slack(self) -> int:
        return self.tensor.numel() - self.committed

    def commit(self, num_bytes: int, *, ahead: bool = False) -> None:
        """Makes the first `num_bytes` bytes usable and keeps their contents. Never shrinks.

        Args:
            num_bytes: number of usable bytes.
            ahead: whether extra memory may be taken for later growth.
        """
        if num_bytes > self.tensor.numel():
            size = max(num_bytes, self.tensor.numel() * (GROWTH + 1) // GROWTH) if ahead else num_bytes
            grown = torch.empty(size, dtype=torch.uint8, device=self.device)
            grown[: self.committed] = self.tensor[: self.committed]
            self.tensor = grown
        self.committed = max(self.committed, num_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Frees the memory beyond the first `num_bytes` bytes if the device can; what remains counts as `slack`."""
        if num_bytes < self.committed:
            self.tensor = self.tensor[:num_bytes].clone()
            self.committed = num_bytes

    def __deepcopy__(self, memo: dict) -> Reservation:
        return _restore(self.device, self.tensor[: self.committed])

    def __reduce__(self) -> tuple:
        return _restore, (self.device, self.tensor[: self.committed].clone())


class MappedReservation(Reservation):
    """Host memory in one large anonymous mapping; the system provides each page on first use."""

    grows_in_place = True
    slack = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE[sys.platform]
        self._mapping = mmap.mmap(-1, _host_memory(), flags=flags)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def commit(self, num_bytes: int, *, ahead: bool = False) -> None:
        if num_bytes > self.tensor.numel():
            raise MemoryError(
                f"the cache needs {num_bytes} bytes, more than this machine's memory of {self.tensor.numel()} bytes."
            )
        self._advise(num_bytes)
        self.committed = max(self.committed, num_bytes)

    def shrink(self, num_bytes: int) -> None:
        first = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.committed > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, self.committed - first)
        self.committed = min(self.committed, num_bytes)

    def _advise(self, num_bytes: int) -> None:
        """Requests huge pages wholly within the newly committed range.

        Without them, reading a long cache misses the processor's TLB at every other token. Nothing beyond the committed
        bytes is taken.
        """
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return
        start = self.tensor.data_ptr()
        first = -(-(start + self.committed) // _LARGE_PAGE) * _LARGE_PAGE - start
        last = (start + num_bytes) // _LARGE_PAGE * _LARGE_PAGE - start
        if last > first:
            try:
                self._mapping.madvise(mmap.MADV_HUGEPAGE, first, last - first)
            except OSError:
                pass  # the kernel has no huge pages


def reserve(device: torch.device) -> Reservation:
    """Returns the best kind of reservation that `device` supports."""
    if device.type == "cpu" and sys.platform in _NO_RESERVE:
        try:
            return MappedReservation(device)
        except (OSError, ValueError):
            pass  # address space is limited: grow by copying instead
    if device.type in RESERVATIONS and torch.version.hip is None:
        try:
            return RESERVATIONS[device.type](device)
        except (OSError, AttributeError, RuntimeError) as error:
            _logger.warning("the cache on %s grows by copying, and decode steps are not captured: %s", device, error)
    return Reservation(device)


def _restore(device: torch.device, data: torch.Tensor) -> Reservation:
    """Returns a new reservation that holds a copy of `data`."""
    reservation = reserve(device)
    reservation.commit(data.numel())
    reservation.tensor[: data.numel()] = data
    return reservation


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return _FALLBACK_RESERVATION
