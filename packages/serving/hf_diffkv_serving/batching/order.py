"""Which of the requests that wait in continuous batching gets memory first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hf_diffkv.prefixes.stats import ExpectedPrefix

# requests that may get memory before one that came earlier
MOST_OVERTAKEN = 32
# waiting requests, from the one that came first on, that are ordered and announced to the prefix store
LOOK_AHEAD = 32


class AdmissionOrder:
    """CaR's order: requests whose prefix is in the device's memory, then those without one, then those whose prefix
    has to be brought there; among equals, and beyond `LOOK_AHEAD`, the one that came first.

    Args:
        most_overtaken: once so many later ones have got memory before a request, no other gets any until it has.
    """

    def __init__(self, most_overtaken: int = MOST_OVERTAKEN) -> None:
        self.most_overtaken = most_overtaken
        self._overtaken: dict[str, int] = {}

    def sort(self, waiting: Sequence[str], expected: Mapping[str, ExpectedPrefix], busy: bool = False) -> list[str]:
        """Those to be given memory, in this order.

        Args:
            waiting: names, in the order in which they came.
            expected: what is known of the prefixes of some.
            busy: there are others to be computed, so those whose prefix is being loaded are left out.
        """
        for name in waiting:
            if self._overtaken.get(name, 0) >= self.most_overtaken:
                return [name]
        if busy:
            waiting = [name for name in waiting if name not in expected or not expected[name].loading]
        return sorted(waiting, key=lambda name: _turn(expected.get(name)))

    def note(self, waiting: Sequence[str], admitted: Collection[str]) -> None:
        """Says which of those that waited, in the order in which they came, have got memory."""
        overtaken, later = {}, 0
        for name in reversed(waiting):
            if name in admitted:
                later += 1
            else:
                overtaken[name] = self._overtaken.get(name, 0) + later
        self._overtaken = overtaken


def _turn(expected: ExpectedPrefix | None) -> int:
    if expected is None or expected.tier is None:
        return 1
    return 0 if expected.resident else 2
