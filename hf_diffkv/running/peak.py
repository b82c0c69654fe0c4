"""Measures the peak memory of one device between two points of a program."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from ..pages.cuda_reserve import mapped_bytes, peak_mapped_bytes, reset_peak_mapped

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory from the creation of this object until `read`.

    On CUDA, it is the peak of PyTorch's allocations on the device plus the peak of memory that caches mapped
    themselves. Elsewhere, it is the resident memory of the whole process, so it needs a separate process.

    Attributes:
        base: bytes at the start; None if the platform cannot tell.
        source: description of the kind of measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base: int | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            reset_peak_mapped(device)
            self.base = torch.cuda.memory_allocated(device) + mapped_bytes(device)
            self.source = "torch.cuda.max_memory_allocated, and the most that pages took"
        elif _reset_resident_peak():
            self.base = _resident("VmRSS")
            self.source = "peak resident memory of the process after loading (VmHWM)"
        else:
            self.source = "peak resident memory of the process, loading included (ru_maxrss)"

    def read(self) -> tuple[int | None, int | None]:
        """Returns the peak in bytes and its increase over the start, each None if the platform cannot tell."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) + peak_mapped_bytes(self.device)
        else:
            peak = _lifetime_peak() if self.base is None else _resident("VmHWM")
        return peak, None if self.base is None or peak is None else peak - self.base


def _reset_resident_peak() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _resident(name: str) -> int:
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)[1])


def _lifetime_peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
