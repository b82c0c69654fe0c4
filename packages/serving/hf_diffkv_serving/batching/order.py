"""Order in which the waiting requests of continuous batching get memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hf_diffkv.prefixes.stats import ExpectedPrefix

# later requests that may get memory before an earlier one
MOST_OVERTAKEN = 32
# waiting requests, earliest first, that are ordered and announced to the prefix store
LOOK_AHEAD = 32


class AdmissionOrder:
    """CaR's order: requests whose prefix is in the device's memory, then those without one, then those whose prefix
    has to be loaded there; among equals, and beyond `LOOK_AHEAD`, in order of arrival.

    Args:
        most_overtaken: number of later requests that may get memory before a request, which is then the next one.
    """

    def __init__(self, most_overtaken: int = MOST_OVERTAKEN) -> None:
        self.most_overtaken = most_overtaken
        self._overtaken: dict[str, int] = {}

    def sort(self, waiting: Sequence[str], expected: Mapping[str, ExpectedPrefix], busy: bool = False) -> list[str]:
        """Returns the requests to give memory to, in order.

        Args:
            waiting: names in order of arrival.
            expected: expected prefixes of some of them.
            busy: whether there are other requests to compute; requests whose prefix is being loaded are then left out.
        """
        for name in waiting:
            if self._overtaken.get(name, 0) >= self.most_overtaken:
                return [name]
        if busy:
            waiting = [name for name in waiting if name not in expected or not expected[name].loading]
        return sorted(waiting, key=lambda name: _turn(expected.get(name)))

    def note(self, waiting: Sequence[str], admitted: Collection[str]) -> None:
        """Notes which of the waiting requests, in order of arrival, got memory."""
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
