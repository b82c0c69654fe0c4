"""Shared memory of a block, with the last writer and reader of each byte and the asynchronous copies in flight.

If different threads access the same byte and at least one of them changes it, a barrier must lie between the two: of
the block, or of the warp if both are in the same one.
"""

from __future__ import annotations

import numpy as np

from .values import SHARED_BASE, PtxError, Values

NOBODY, SEVERAL = -1, -2
WARP = 32


class SharedMemory:
    def __init__(self, size: int, threads: int) -> None:
        self.size = size
        self._data = np.full(size, 0xFF, np.uint8)
        self._written = np.zeros(size, bool)
        self._in_flight = np.zeros(size, bool)
        # who last wrote and read each byte, and when; readers also by warp
        self._writer, self._reader, self._reader_warp = (np.full(size, NOBODY, np.int16) for _ in range(3))
        self._write_time, self._read_time = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._now = 1
        self._block_barrier = 0
        # stored by threads since the last `fence.proxy.async`, so that wgmma need not see it
        self._unfenced = np.zeros(size, bool)
        # what such instructions are still reading
        self._held = np.zeros(size, bool)
        self._warp_barrier = np.zeros(-(-threads // WARP), np.int32)
        # copies: thread, group of the thread, offset, data
        self._copies: list[tuple[Values, Values, Values, Values]] = []
        self._committed = np.zeros(threads, np.int32)

    def barrier(self, warps: Values | None = None) -> None:
        """Notes that all threads of the block, or those of some warps, have reached a barrier."""
        if warps is None:
            self._block_barrier = self._now
        else:
            self._warp_barrier[warps] = self._now
        self._now += 1

    def fence(self) -> None:
        """Makes everything written so far visible to matrix instructions that read shared memory themselves."""
        self._unfenced[:] = False

    def hold(self, offsets: Values) -> None:
        """Protects 16-bit numbers from being overwritten until `release`."""
        self._held[offsets] = self._held[offsets + 1] = True

    def release(self) -> None:
        self._held[:] = False

    def load_fenced(self, thread: int, offsets: Values) -> Values:
        """Reads uint16 at each byte offset for a matrix instruction of the warp group of `thread`."""
        places = offsets.ravel() + SHARED_BASE
        data = self.load(np.full(places.size, thread), places, 2)
        if self._unfenced[offsets].any():
            raise PtxError("a matrix instruction reads what was stored after the last fence.proxy.async")
        return data.view(np.uint16).reshape(offsets.shape)

    def load(self, threads: Values, addresses: Values, width: int) -> Values:
        """Reads uint8 [n, width] from shared addresses (uint32 [n]) for the threads with these numbers."""
        at = self._places(addresses, width)
        who = np.broadcast_to(threads[:, None], at.shape)
        if self._in_flight[at].any():
            raise PtxError("shared memory is read that an asynchronous copy has not reached; a wait is missing")
        if not self._written[at].all():
            raise PtxError("shared memory is read that nobody wrote")
        self._refuse(~self._after(at, who, self._writer, self._write_time), who, "reads what", self._writer[at])
        self._note_readers(at.ravel(), who.ravel())
        return self._data[at]

    def store(self, threads: Values, addresses: Values, data: Values) -> None:
        at = self._places(addresses, data.shape[1])
        who = np.broadcast_to(threads[:, None], at.shape)
        if self._in_flight[at].any():
            raise PtxError("shared memory is written that an asynchronous copy is about to write")
        self._write(at, who, data)
        self._unfenced[at] = True

    def copy(self, threads: Values, addresses: Values, data: Values) -> None:
        """Begins an asynchronous copy; the data arrives when its group is waited for."""
        at = self._places(addresses, data.shape[1])
        who = np.broadcast_to(threads[:, None], at.shape)
        if self._in_flight[at].any():
            raise PtxError("two asynchronous copies write to the same shared memory")
        self._check_write(at, who, np.ones(at.shape, bool))
        self._in_flight[at] = True
        self._copies.append((threads, self._committed[threads], at, data))

    def commit(self, threads: Values) -> None:
        """Closes a group of copies for each of these threads."""
        self._committed[threads] += 1

    def wait(self, threads: Values, pending: int) -> None:
        """Completes all groups of these threads but the newest `pending`."""
        waiting = np.zeros(self._committed.size, bool)
        waiting[threads] = True
        left = []
        for owners, group, at, data in self._copies:
            done = waiting[owners] & (group < self._committed[owners] - pending)
            if done.any():
                self._in_flight[at[done]] = False
                self._write(at[done], np.broadcast_to(owners[done][:, None], at[done].shape), data[done])
                # compilers omit the fence if wgmma reads what such copies brought
                self._unfenced[at[done]] = False
            if not done.all():
                left.append((owners[~done], group[~done], at[~done], data[~done]))
        self._copies = left

    def _places(self, addresses: Values, width: int) -> Values:
        if np.any(addresses % width):
            bad = addresses[addresses % width != 0][0]
            raise PtxError(f"shared address {int(bad):#x} is not aligned to {width} bytes")
        offsets = addresses.astype(np.int64) - SHARED_BASE
        outside = (offsets < 0) | (offsets + width > self.size)
        if outside.any():
            raise PtxError(f"offset {int(offsets[outside][0])} lies outside the {self.size} bytes of shared memory")
        return offsets[:, None] + np.arange(width)

    def _after(self, at: Values, who: Values, last: Values, time: Values) -> Values:
        """Returns whether a barrier, or the order of one thread, orders the access of `who` after the last one."""
        previous, when = last[at], time[at]
        same_warp = (previous >= 0) & (previous // WARP == who // WARP)
        ordered = (when <= self._block_barrier) | (same_warp & (when <= self._warp_barrier[who // WARP]))
        return (previous == NOBODY) | (previous == who) | ordered

    def _write(self, at: Values, who: Values, data: Values) -> None:
        self._check_write(at, who, (self._data[at] != data) | ~self._written[at])
        self._data[at] = data
        if np.any(self._data[at] != data):
            raise PtxError("two threads write different data to the same shared memory")
        self._written[at] = True
        self._writer[at], self._write_time[at] = who, self._now
        self._reader[at] = self._reader_warp[at] = NOBODY

    def _check_write(self, at: Values, who: Values, changed: Values) -> None:
        if self._held[at].any():
            raise PtxError("shared memory is written that a matrix product still reads")
        self._refuse(
            changed & ~self._after(at, who, self._writer, self._write_time), who, "overwrites what", self._writer[at]
        )
        by_thread = self._after(at, who, self._reader, self._read_time)
        # several readers in one warp: a barrier of that warp is enough
        warp = self._reader_warp[at]
        by_warp = (warp == who // WARP) & (self._read_time[at] <= self._warp_barrier[who // WARP])
        self._refuse(changed & ~by_thread & ~by_warp, who, "overwrites, while it may still be read, what", warp)

    def _refuse(self, racing: Values, who: Values, does: str, other: Values) -> None:
        if racing.any():
            culprit, holder = int(who[racing][0]), int(other[racing][0])
            raise PtxError(f"thread {culprit} {does} another ({holder}) uses without a barrier between them")

    def _note_readers(self, at: Values, who: Values) -> None:
        stale = self._read_time[at] <= self._block_barrier
        self._reader[at[stale]] = self._reader_warp[at[stale]] = NOBODY
        before, warp = self._reader[at], who // WARP
        before_warp = self._reader_warp[at]
        self._reader[at] = np.where((before == NOBODY) | (before == who), who, SEVERAL)
        self._reader_warp[at] = np.where((before_warp == NOBODY) | (before_warp == warp), warp, SEVERAL)
        # if several threads read a byte at once, only the last has been noted
        self._reader[at[self._reader[at] != who]] = SEVERAL
        self._reader_warp[at[self._reader_warp[at] != warp]] = SEVERAL
        self._read_time[at] = self._now
