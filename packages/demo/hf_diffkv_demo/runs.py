"""Runs of visitors: each waits for the model, shows both caches' progress, and can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Condition, Event
from typing import Any

from .figures import difference, figures, message
from .generation import CacheRun, Entered, Generator, InputError, Request, Result
from .heads import NOTHING, Place, coloured_text, overview, place_in
from .memory_line import memory_line

# what a page shows, by name
Update = dict[str, Any]
# nothing from an earlier run stays next to a new one's output
EMPTY: Update = {
    "status": message("Checking the input ..."),
    "dense": "",
    "diffkv": "",
    "memory": "",
    "figures": "",
    "difference": "",
    "result": None,
    "overview": NOTHING,
    "text": "",
    "fold": False,
}
# a closed browser is only noticed when something is sent to it
REPEAT_SECONDS = 1.0


class Line:
    """First come, first served. The first in line has the turn until it leaves.

    A ticket is an event, set once its turn is no longer wanted, before or during it.
    """

    def __init__(self) -> None:
        self._tickets: list[Event] = []
        self._changed = Condition()

    def join(self) -> Event:
        """Returns a ticket at the end."""
        ticket = Event()
        with self._changed:
            self._tickets.append(ticket)
        return ticket

    def before(self, ticket: Event) -> int:
        """Returns the number of tickets before `ticket`, including the one whose turn it is."""
        with self._changed:
            return self._tickets.index(ticket)

    def wait(self, ticket: Event, before: int, seconds: float) -> None:
        """Waits until the number of tickets before `ticket` is no longer `before`, it is stopped, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.is_set() or self._tickets.index(ticket) != before, seconds)

    def stop(self, ticket: Event) -> None:
        """Stops the visitor who waits or runs with `ticket`."""
        ticket.set()
        with self._changed:
            self._changed.notify_all()

    def leave(self, ticket: Event) -> None:
        """Gives up the place."""
        with self._changed:
            self._tickets.remove(ticket)
            self._changed.notify_all()


class Runs:
    """The runs of all visitors on one model, one after the other."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self._line = Line()
        self._tickets: dict[str, list[Event]] = {}

    def run(self, visitor: str, enter: Callable[[], Entered], place: Place) -> Iterator[Update]:
        """Runs a visitor's input and yields the changes on the page.

        Args:
            visitor: key by which `stop` finds the visitor's runs.
            enter: function that returns the input; it may raise `InputError`.
            place: head whose text to show.
        """
        ticket = self._line.join()
        self._tickets.setdefault(visitor, []).append(ticket)
        try:
            yield EMPTY
            asked = enter()
            task = self.generator.prepare(asked)
            while (before := self._line.before(ticket)) and not ticket.is_set():
                yield _status(f"Waiting for the model: {before} before you.")
                self._line.wait(ticket, before, REPEAT_SECONDS)
            found: Result | None = None
            with closing(self.generator.run(task)) as steps:
                while found is None and not ticket.is_set():
                    dense, compressed, found = next(steps)
                    yield self._progress(task, dense, compressed)
                if found is None:
                    yield _status("Stopping ...")
            if found is None:
                yield _status("Stopped.")
                return
            yield self._done(found, asked.setting, place)
        except InputError as error:
            yield {"status": message(str(error), error=True)}
        finally:
            self._tickets[visitor].remove(ticket)
            if not self._tickets[visitor]:
                del self._tickets[visitor]
            self._line.leave(ticket)

    def stop(self, visitor: str) -> None:
        """Ends what the visitor runs or waits for. Text that was written stays."""
        for ticket in self._tickets.get(visitor, []):
            self._line.stop(ticket)

    def _progress(self, task: Request, dense: CacheRun, compressed: CacheRun) -> Update:
        """Returns the text and memory of both runs and the progress of the current one."""
        name, side = ("DiffKV", compressed) if compressed.arrivals else ("DynamicCache", dense)
        layers, tokens = self.generator.num_layers, task.max_new_tokens
        if side.tokens:
            said, part = f"{name} is generating: {len(side.tokens)} of {tokens} tokens.", len(side.tokens) / tokens
        else:
            said = f"{name} reads the prompt of {task.tokens:,} tokens: {side.layers} of {layers} layers done."
            part = side.layers / max(1, layers)
        return {
            "dense": dense.text,
            "diffkv": compressed.text,
            "memory": memory_line(dense, compressed, task.tokens + tokens),
            "status": message(said, done=min(1.0, part)),
        }

    def _done(self, found: Result, setting: str, place: Place) -> Update:
        place, generated = place_in(found, place), len(found.compressed.tokens)
        return {
            **_status(f"Done: a prompt of {found.prompt_tokens:,} tokens, {generated} generated."),
            "figures": figures(found, setting),
            "difference": difference(found),
            "result": found,
            "place": place,
            **look(found, place),
        }


def look(result: Result | None, place: Place) -> Update:
    """Returns the picture of a setting, with the head `place` selected, and its text if tokens are chosen."""
    if result is None:
        return {"overview": NOTHING, "text": "", "fold": False}
    text = coloured_text(result, place)
    return {"overview": overview(result, place), "text": text, "fold": bool(text)}


def _status(text: str) -> Update:
    return {"status": message(text)}
