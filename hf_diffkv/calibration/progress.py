"""Progress and remaining time of a measurement of heads: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time

from tqdm.auto import tqdm

BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
# lower bound on the elapsed time, so that a rate can be computed
LEAST_SECONDS = 1e-6


class Progress:
    """Reports progress through documents on stderr.

    Args:
        work: total work, in any unit; time is assumed to be proportional to it.
    """

    def __init__(self, count: int, work: float, quiet: bool = False) -> None:
        self._count, self._work, self._quiet = count, work, quiet
        self._done, self._whole, self._name = 0.0, 0, ""
        self._estimated = False
        self._started = self._begun = time.perf_counter()
        self._bar = tqdm(total=work, disable=quiet or None, dynamic_ncols=True, bar_format=BAR_FORMAT)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def say(self, text: str) -> None:
        """Prints a line next to the bar."""
        if not self._quiet:
            self._bar.write(text, file=sys.stderr)
            sys.stderr.flush()

    def resume(self, documents: int) -> None:
        """Reports documents that were measured before."""
        self._whole = documents
        if documents:
            verb = "was" if documents == 1 else "were"
            self.say(f"{documents} of {_documents(self._count)} {verb} measured before")

    def begin(self, name: str) -> None:
        self._name, self._begun = name, time.perf_counter()
        self._bar.set_description(name)

    def advance(self, work: float) -> None:
        self._done += work
        self._bar.update(work)

    def estimate(self) -> None:
        """Prints the estimated total time once, at the rate so far."""
        if not self._estimated:
            self._estimated = True
            self.say(f"{_documents(self._count - self._whole)}, about {self._left()}")

    def end(self) -> None:
        self._whole += 1
        if not self._bar.disable:
            return
        left = self._count - self._whole
        rest = f"{_documents(left)} left, about {self._left()}" if left else "all are measured"
        seconds = _duration(time.perf_counter() - self._begun)
        self.say(f"document {self._whole} of {self._count} ({self._name}) took {seconds}; {rest}")

    def _left(self) -> str:
        """Returns the time left at the rate so far, in words."""
        rate = self._done / max(time.perf_counter() - self._started, LEAST_SECONDS)
        return _duration(max(0.0, self._work - self._done) / rate)


def _documents(count: int) -> str:
    return "1 document" if count == 1 else f"{count} documents"


def _duration(seconds: float) -> str:
    """Formats seconds for reading, such as 4 min 10 s."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
