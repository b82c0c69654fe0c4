"""Whose turn it is at a cache: a forward's, or that of whoever reads or changes it between two forwards.

A forward takes its turn with its first layer and gives it back with its last one. Whoever else comes meanwhile waits,
and turns are given in the order in which they were asked for.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType

from torch.nn import Module

from .errors import forward_under_way

# how long one waits before looking whether the forward that has the turn still runs
LOOK_SECONDS = 0.05
_MODULE_CODE = Module.__call__.__code__.co_filename
_all_turns: weakref.WeakSet[ForwardTurns] = weakref.WeakSet()


class _Use(Enum):
    """What a turn is for.

    FORWARD: a forward, which an error between two layers can end unnoticed. STEP: a forward that says when it ends,
    also after an error. BETWEEN: anything between two forwards.
    """

    FORWARD = 1
    STEP = 2
    BETWEEN = 3


class _Ticket:
    """A thread that waits for its turn; `granted` is held until it comes."""

    def __init__(self, thread: int, use: _Use) -> None:
        self.thread, self.use, self.granted = thread, use, threading.Lock()
        self.granted.acquire()


class ForwardTurns:
    """The turns at one cache. Copies and forked processes start with nobody's turn.

    Attributes:
        last_layer_came: whether the last layer of the forward that has the turn has its tokens.
        last_forward: the thread of the newest forward; None before the first.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[_Ticket] = deque()
        self._thread: int | None = None
        self._use: _Use | None = None
        # the layer of the forward that came last; in front of every layer where none is under way
        self._place = float("inf")
        self.last_layer_came = False
        self.last_forward: int | None = None
        _all_turns.add(self)

    def reach(self, layer_idx: int, comes_once: bool = True) -> None:
        """Notes that a forward comes to a layer; with the first one it takes its turn.

        Args:
            comes_once: a forward comes to this layer no more than once.
        """
        if layer_idx < self._place or comes_once and layer_idx == self._place:
            self._begin()
        self._place = layer_idx

    def _begin(self) -> None:
        thread = threading.get_ident()
        with self._mutex:
            ticket = None
            if self._thread != thread or self._use is _Use.FORWARD:
                if self._thread == thread:
                    # the forward before had fewer layers, or was broken off
                    self._pass_on()
                ticket = self._ask(thread, _Use.FORWARD)
        if ticket is not None:
            self._wait(ticket)
        self.last_layer_came, self.last_forward = False, thread

    def layer_done(self, is_last: bool, awaits_readers: bool) -> None:
        """Notes that a layer of a forward has its tokens, and ends the forward where all layers have theirs.

        Args:
            is_last: whether no layer of the cache comes after it.
            awaits_readers: whether later layers are still to read the layer's tokens.
        """
        self.last_layer_came |= is_last
        if self.last_layer_came and not awaits_readers:
            self.end()

    def end(self) -> None:
        """Ends the turn of a forward that is done or cannot go on; does nothing where there is none."""
        with self._mutex:
            if self._use is _Use.FORWARD:
                self._pass_on()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The turn of a forward that ends with the block."""
        nested = self._take(_Use.STEP, True)
        self.last_forward = threading.get_ident()
        try:
            yield
        finally:
            if not nested:
                self._give_back()

    @contextmanager
    def between(self, whatever_runs: bool = False) -> Iterator[None]:
        """A turn between two forwards; waits for the end of one that another thread runs.

        Args:
            whatever_runs: also within a forward of this thread, which will not go on.

        Raises:
            HandOverError: this thread's forward is under way.
        """
        nested = self._take(_Use.BETWEEN, whatever_runs)
        try:
            yield
        finally:
            if not nested:
                self._give_back()

    def _take(self, use: _Use, whatever_runs: bool) -> bool:
        """Waits for a turn; whether this thread had it already."""
        thread = threading.get_ident()
        with self._mutex:
            mine = self._thread == thread
            step, forward = mine and self._use is _Use.STEP, mine and self._use is _Use.FORWARD
            if not whatever_runs and (step or forward and _runs_a_module(sys._getframe())):
                raise forward_under_way()
            if forward:
                # it is over without its last layer
                self._grant(thread, use)
                return False
            if mine:
                return True
            ticket = self._ask(thread, use)
        if ticket is not None:
            self._wait(ticket)
        return False

    def _give_back(self) -> None:
        with self._mutex:
            self._pass_on()

    def _ask(self, thread: int, use: _Use) -> _Ticket | None:
        """Takes the turn where it is nobody's, else queues up."""
        if self._thread is None:
            self._grant(thread, use)
            return None
        ticket = _Ticket(thread, use)
        self._waiting.append(ticket)
        return ticket

    def _grant(self, thread: int, use: _Use) -> None:
        self._thread, self._use = thread, use

    def _pass_on(self) -> None:
        """Gives the turn to whoever has waited longest."""
        self._place = float("inf")
        if self._waiting:
            ticket = self._waiting.popleft()
            self._grant(ticket.thread, ticket.use)
            ticket.granted.release()
        else:
            self._thread = self._use = None

    def _wait(self, ticket: _Ticket) -> None:
        try:
            while not ticket.granted.acquire(timeout=LOOK_SECONDS):
                with self._mutex:
                    if self._thread is not None and not self._runs():
                        self._pass_on()
        except BaseException:
            with self._mutex:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                else:
                    self._pass_on()
            raise

    def _runs(self) -> bool:
        """Whether what has the turn still runs: its thread lives, and is within a module where that is a forward."""
        frame = sys._current_frames().get(self._thread)
        return frame is not None and (self._use is not _Use.FORWARD or _runs_a_module(frame))

    def __deepcopy__(self, memo: dict) -> ForwardTurns:
        return ForwardTurns()

    def __reduce__(self) -> tuple:
        return ForwardTurns, ()


def _runs_a_module(frame: FrameType | None) -> bool:
    """Whether `frame` was called, at whatever distance, by a module of PyTorch."""
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_CODE:
            return True
        frame = frame.f_back
    return False


def _start_anew() -> None:
    # the threads that had or awaited a turn are not in this process
    for turns in _all_turns:
        turns.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
