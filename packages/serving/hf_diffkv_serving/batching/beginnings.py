"""Cuts prompts into parts, so that a beginning that several requests share is computed once and kept.

The state after a request's first tokens cannot be derived from the state after more of them (docs/prefixes.md). It is
therefore kept at the end of a forward, and a prompt that is cut is computed in parts. The sender of a request may mark
cuts, for example after a system message. If a request begins like an earlier one, their common beginning is a part too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hf_diffkv.prefixes.tokens import digests

# fewest tokens of a part
FEWEST_TOKENS = 64
# unmarked cuts are at its multiples, so that words shared by chance change nothing
CUT_STEP = 16
# tokens of all remembered prompts together
MOST_REMEMBERED = 1 << 20


class Beginnings:
    """Cuts of unfinished requests, by name, and the most recent prompts.

    Args:
        most_tokens: limit on the tokens of all remembered prompts.
    """

    def __init__(self, most_tokens: int = MOST_REMEMBERED) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        # latest prompt by its first tokens, hashed at every multiple of `FEWEST_TOKENS`
        self._last: dict[str, Tensor] = {}
        # each remembered prompt and its hashes, by the last of them
        self._remembered: OrderedDict[str, tuple[Tensor, list[str]]] = OrderedDict()
        self._prompts: dict[str, Tensor] = {}
        self._cuts: dict[str, list[int]] = {}
        self._resumed: dict[str, int] = {}

    def add(self, name: str, prompt: Sequence[int], marks: Iterable[int] = ()) -> None:
        """Adds a request.

        Args:
            marks: numbers of tokens after which to cut its prompt. Marks too close to others are dropped.
        """
        ids = torch.tensor(prompt, dtype=torch.int64)
        cuts: list[int] = []
        for mark in sorted(marks):
            _add(cuts, mark, ids.numel())
        shared = self._shared(ids)
        if shared:
            _add(cuts, shared, ids.numel())
            for other, known in self._prompts.items():
                if _alike(known, ids, shared):
                    _add(self._cuts[other], shared, known.numel())
        self._prompts[name], self._cuts[name] = ids, cuts
        self._remember(ids)

    def remove(self, name: str) -> None:
        """Removes a request that is done, failed or cancelled."""
        for known in (self._prompts, self._cuts, self._resumed):
            known.pop(name, None)

    def clear(self) -> None:
        """Forgets the requests but remembers their prompts."""
        for known in (self._prompts, self._cuts, self._resumed):
            known.clear()

    def resume(self, name: str, tokens: int) -> None:
        """Notes that the first `tokens` tokens of a request were kept."""
        self._resumed[name] = tokens

    def next_cut(self, name: str, position: int) -> int | None:
        """Returns the end of the next part of a request computed up to `position`, or None if that is its prompt's."""
        cuts = self._cuts.get(name, [])
        resumed = self._resumed.get(name, 0)
        least = resumed + FEWEST_TOKENS - 1 if resumed else 0
        place = bisect_right(cuts, max(position, least))
        return cuts[place] if place < len(cuts) else None

    def is_cut(self, name: str, position: int) -> bool:
        """Returns whether a part of a request ends at `position`."""
        return self.next_cut(name, position - 1) == position

    def without_twins(self, waiting: Sequence[str], kept: Mapping[str, int], under_way: Mapping[str, int]) -> list[str]:
        """Returns the requests that need not wait for another one to compute a part that they share.

        Args:
            waiting: names of waiting requests, in order of admission.
            kept: number of leading tokens that are kept, for some of them.
            under_way: number of prompt tokens computed so far, for each other request.
        """
        ahead, found = dict(under_way), []
        for name in waiting:
            ids, known = self._prompts.get(name), kept.get(name, 0)
            if ids is None or not any(self._computes(other, at, ids, known) for other, at in ahead.items()):
                found.append(name)
                ahead[name] = known
        return found

    def _computes(self, other: str, position: int, ids: Tensor, known: int) -> bool:
        """Returns whether `other`, computed up to `position`, will reach a common part longer than `known` tokens."""
        prompt = self._prompts.get(other)
        if prompt is None or not _alike(prompt, ids, FEWEST_TOKENS):
            return False
        cuts = [cut for cut in self._cuts[other] if cut > max(position, known) and cut < ids.numel()]
        return any(_alike(prompt, ids, cut) for cut in cuts)

    def _shared(self, ids: Tensor) -> int:
        """Returns the length of the longest beginning that `ids` shares with a prompt.

        It is a multiple of `CUT_STEP`, and 0 if the beginning is short.
        """
        hashes = digests(ids, range(FEWEST_TOKENS, ids.numel() + 1, FEWEST_TOKENS))
        for length, found in sorted(hashes.items(), reverse=True):
            other = self._last.get(found)
            if other is not None and _alike(other, ids, length):
                common = min(other.numel(), ids.numel())
                differs = (other[:common] != ids[:common]).nonzero()
                shared = min(int(differs[0]) if differs.numel() else common, ids.numel() - 1)
                return shared // CUT_STEP * CUT_STEP
        return 0

    def _remember(self, ids: Tensor) -> None:
        hashes = list(digests(ids, range(FEWEST_TOKENS, ids.numel() + 1, FEWEST_TOKENS)).values())
        if not hashes:
            return
        self._forget(hashes[-1])
        self._remembered[hashes[-1]] = (ids, hashes)
        self._last.update(dict.fromkeys(hashes, ids))
        self._tokens += ids.numel()
        while self._tokens > self._most_tokens:
            self._forget(next(iter(self._remembered)))

    def _forget(self, last: str) -> None:
        ids, hashes = self._remembered.pop(last, (None, []))
        if ids is not None:
            self._tokens -= ids.numel()
            for found in hashes:
                if self._last.get(found) is ids:
                    del self._last[found]


def check_marks(marks: Iterable[int], tokens: int) -> tuple[int, ...]:
    """Returns the sorted marks. Raises `ValueError` for one outside a prompt of `tokens` tokens."""
    found = tuple(sorted(set(marks)))
    if any(not isinstance(mark, int) or not 0 < mark < tokens for mark in found):
        raise ValueError(f"boundaries={list(found)} must be numbers of tokens above 0 and below the prompt's {tokens}.")
    return found


def _alike(one: Tensor, other: Tensor, tokens: int) -> bool:
    """Returns whether both begin with the same `tokens` tokens."""
    return min(one.numel(), other.numel()) >= tokens and torch.equal(one[:tokens], other[:tokens])


def _add(cuts: list[int], cut: int, tokens: int) -> None:
    """Adds a cut, in order, unless a part next to it would become too short."""
    place = bisect_right(cuts, cut)
    before = cuts[place - 1] if place else 0
    near_next = place < len(cuts) and cuts[place] - cut < FEWEST_TOKENS
    if cut - before >= FEWEST_TOKENS and cut < tokens and not near_next:
        cuts.insert(place, cut)
