"""Whose turn it is, where many want one model."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class Ticket:
    """A place in a `Line`.

    Attributes:
        stopped: set once nobody wants the turn any more, before or in it.
    """

    stopped: threading.Event = field(default_factory=threading.Event)


class Line:
    """First come, first served. The first of the line has the turn until it leaves."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._changed = threading.Condition()

    def join(self) -> Ticket:
        """A place at the end."""
        ticket = Ticket()
        with self._changed:
            self._tickets.append(ticket)
        return ticket

    def before(self, ticket: Ticket) -> int:
        """How many are before `ticket`, the one whose turn it is included; 0 for that one."""
        with self._changed:
            return self._tickets.index(ticket)

    def wait(self, ticket: Ticket, before: int, seconds: float) -> None:
        """Until there are not `before` others before `ticket` any more, it is stopped, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.stopped.is_set() or self._tickets.index(ticket) != before, seconds)

    def stop(self, ticket: Ticket) -> None:
        """Tells whoever waits or works with `ticket` that it is not wanted any more."""
        ticket.stopped.set()
        with self._changed:
            self._changed.notify_all()

    def leave(self, ticket: Ticket) -> None:
        """Gives the place up."""
        with self._changed:
            self._tickets.remove(ticket)
            self._changed.notify_all()
