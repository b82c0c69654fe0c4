"""Memory of the tensors passed to a kernel. Every access must lie within one of them and be aligned."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from .values import PtxError, Values


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the address of the first byte of a tensor's elements and the address just past the last byte."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


class GlobalMemory:
    """Reads and writes real memory at real addresses, restricted to what belongs to `tensors`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(extent(tensor) for tensor in tensors if tensor.numel()):
            # views of the same memory may overlap
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self._starts = np.array([start for start, _ in merged], dtype=np.uint64)
        self._ends = np.array([end for _, end in merged], dtype=np.uint64)
        self._bytes = [
            np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start)) for start, end in merged
        ]

    def load(self, addresses: Values, width: int) -> Values:
        """Reads uint8 [n, width] from uint64 [n] addresses."""
        result = np.empty((addresses.size, width), np.uint8)
        for view, offsets, lanes in self._places(addresses, width):
            result[lanes] = view[offsets[:, None] + np.arange(width)]
        return result

    def store(self, addresses: Values, data: Values) -> None:
        """Writes uint8 [n, width] to uint64 [n] addresses. If several threads write to one place, the last one wins."""
        for view, offsets, lanes in self._places(addresses, data.shape[1]):
            view[offsets[:, None] + np.arange(data.shape[1])] = data[lanes]

    def _places(self, addresses: Values, width: int) -> list[tuple[Values, Values, Values | slice]]:
        """Checks addresses, and returns (bytes of a tensor, offsets, threads) for each tensor."""
        if np.any(addresses % width):
            bad = addresses[addresses % width != 0][0]
            raise PtxError(f"address {int(bad):#x} is not aligned to {width} bytes")
        segment = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (segment < 0) | (addresses + np.uint64(width) > self._ends[segment])
        if outside.any():
            raise PtxError(self._where(int(addresses[outside][0]), width, int(outside.sum())))
        found = []
        for index in np.unique(segment):
            lanes = slice(None) if (segment == index).all() else np.flatnonzero(segment == index)
            found.append((self._bytes[index], (addresses[lanes] - self._starts[index]).astype(np.int64), lanes))
        return found

    def _where(self, address: int, width: int, threads: int) -> str:
        if not len(self._starts):
            return f"{width} bytes at {address:#x}: the kernel was given no tensor"
        distances = [max(int(s) - address, address + width - int(e)) for s, e in zip(self._starts, self._ends)]
        nearest = int(np.argmin(distances))
        size = int(self._ends[nearest] - self._starts[nearest])
        return (
            f"{threads} thread(s) access {width} bytes outside all tensors, the first at offset "
            f"{address - int(self._starts[nearest])} of one of {size} bytes"
        )
