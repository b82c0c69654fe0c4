"""Turns to use a cache, taken by forwards and by code that reads or changes the cache between two forwards.

A forward takes its turn with its first layer and gives it back with its last one, while other threads wait. Turns are
granted in the order of the requests.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import FrameType

from torch.nn import Module

from .errors import forward_under_way

# interval at which a waiting thread checks whether the forward that has the turn still runs
LOOK_SECONDS = 0.05
_MODULE_CODE = Module.__call__.__code__.co_filename
_all_turns: weakref.WeakSet[ForwardTurns] = weakref.WeakSet()


class _Use(Enum):
    """Purpose of a turn.

    FORWARD: a forward, which an error between two layers can end unnoticed. STEP: a forward that reports its end, even
    after an error. BETWEEN: anything between two forwards.
    """

    FORWARD = 1
    STEP = 2
    BETWEEN = 3


class ForwardTurns:
    """Turns to use one cache. In copies and forked processes, no thread has the turn at first.

    Attributes:
        last_layer: index of the layer that forwards end with; -1 if unknown.
        halfway: whether a forward that had reached Transformers' own layers ended before its last layer.
        last_layer_came: whether the last layer of the current forward has its tokens.
        last_forward: identifier of the newest forward's thread; None before the first.
        outer: number of module frames around the `generate()` call that runs forwards, which do not belong to them.
    """

    def __init__(self, last_layer: int = -1, halfway: bool = False) -> None:
        self.last_layer, self.halfway = last_layer, halfway
        # notified when the turn is free; its lock guards the turn
        self._freed = threading.Condition()
        # an object for each thread that waits, in the order of their requests
        self._waiting: deque[object] = deque()
        self._thread: int | None = None
        self._use: _Use | None = None
        # index of the layer that the current forward reached last; infinite if none is under way, so that any layer
        # starts a forward
        self._place = float("inf")
        # calls by which it has reached that layer
        self._calls: set[tuple] = set()
        # layer that the current forward must reach; Transformers' own layers do not tell whether they missed one
        self._until = -1
        self.last_layer_came = False
        self.last_forward: int | None = None
        self.outer = 0
        _all_turns.add(self)

    def reach(self, layer_idx: int, call: tuple = ("update",), is_stock: bool = False) -> bool:
        """Notes that a forward reaches a layer, and takes the forward's turn with the first one.

        Args:
            layer_idx: index of the layer in the model.
            call: name and further arguments of the call, which a forward makes at most once in a layer.
            is_stock: whether it is one of Transformers' own layers.

        Returns:
            Whether it is the forward's first layer.
        """
        begins = layer_idx < self._place or layer_idx == self._place and call in self._calls
        if begins:
            self._begin()
        if begins or layer_idx > self._place:
            self._calls.clear()
        self._calls.add(call)
        self._place = layer_idx
        if is_stock:
            self._until = self.last_layer
        return begins

    def _begin(self) -> None:
        thread = threading.get_ident()
        with self._freed:
            if self._thread == thread and self._use is _Use.FORWARD:
                # the previous forward had fewer layers, or was aborted
                self._free()
            if self._thread != thread:
                self._wait(thread, _Use.FORWARD)
        self.last_layer_came, self.last_forward = False, thread

    def layer_done(self, is_last: bool, awaits_readers: bool) -> None:
        """Notes that a layer of a forward has its tokens, and ends the forward once all layers have theirs.

        Args:
            is_last: whether no layer of the cache comes after it.
            awaits_readers: whether later layers are still to read the layer's tokens.
        """
        self.last_layer_came |= is_last
        if self.last_layer_came and not awaits_readers:
            self.end()

    def end(self, undone: bool = False) -> None:
        """Ends the turn of a forward that is done or cannot continue; does nothing if there is none.

        Args:
            undone: whether the cache is as it was before the forward.
        """
        with self._freed:
            if self._use is _Use.FORWARD:
                if undone:
                    self._until = -1
                self._free()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Takes the turn for a forward that ends with the block."""
        with self._turn(_Use.STEP, True):
            self.last_forward = threading.get_ident()
            yield

    def between(self, whatever_runs: bool = False) -> AbstractContextManager[None]:
        """Takes a turn between two forwards, after waiting for another thread's forward to end.

        Args:
            whatever_runs: whether to allow it within a forward of this thread, which will not continue.

        Raises:
            HandOverError: this thread's forward is under way.
        """
        return self._turn(_Use.BETWEEN, whatever_runs)

    def within_module(self) -> bool:
        """Returns whether this thread is within a module, as in a forward."""
        return module_frames(sys._getframe()) > self.outer

    @contextmanager
    def _turn(self, use: _Use, whatever_runs: bool) -> Iterator[None]:
        nested = self._take(use, whatever_runs)
        try:
            yield
        finally:
            if not nested:
                with self._freed:
                    self._free()

    def _take(self, use: _Use, whatever_runs: bool) -> bool:
        """Waits for a turn. Returns whether this thread had it already."""
        thread = threading.get_ident()
        with self._freed:
            mine = self._thread == thread
            step, forward = mine and self._use is _Use.STEP, mine and self._use is _Use.FORWARD
            if not whatever_runs and (step or forward and self.within_module()):
                raise forward_under_way()
            if forward:
                # the forward is over without its last layer
                self._leave()
                self._use = use
            elif not mine:
                self._wait(thread, use)
            return mine and not forward

    def _wait(self, thread: int, use: _Use) -> None:
        """Takes the turn after all threads that asked for it earlier."""
        mine = object()
        self._waiting.append(mine)
        try:
            while self._thread is not None or self._waiting[0] is not mine:
                if not self._freed.wait(LOOK_SECONDS) and self._thread is not None and not self._runs():
                    self._free()
        finally:
            self._waiting.remove(mine)
        self._thread, self._use = thread, use

    def _free(self) -> None:
        """Gives up the turn."""
        self._leave()
        self._thread = self._use = None
        self._freed.notify_all()

    def _leave(self) -> None:
        """Notes that no forward is under way."""
        self.halfway |= self._place < self._until
        self._place, self._until = float("inf"), -1

    def _runs(self) -> bool:
        """Returns whether the turn's thread is alive and, for a forward, within a module."""
        frame = sys._current_frames().get(self._thread)
        return frame is not None and (self._use is not _Use.FORWARD or module_frames(frame) > self.outer)

    def __deepcopy__(self, memo: dict) -> ForwardTurns:
        return ForwardTurns(self.last_layer, self.halfway)

    def __reduce__(self) -> tuple:
        return ForwardTurns, (self.last_layer, self.halfway)


def module_frames(frame: FrameType | None) -> int:
    """Counts the frames of PyTorch modules among `frame` and its callers."""
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename == _MODULE_CODE
        frame = frame.f_back
    return found


def _start_anew() -> None:
    # the threads that had or awaited a turn do not exist in this process
    for turns in _all_turns:
        turns.__init__(turns.last_layer, turns.halfway or turns._place < turns._until)  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
