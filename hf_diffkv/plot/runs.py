"""A text in runs of one colour, by the levels of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .palette import mixed

LONGEST_WORD = 24
TextT = TypeVar("TextT", bound="LevelledText")


@dataclass(frozen=True)
class ColourRun:
    """Neighbouring tokens of one colour, `start` to `stop` - 1, and the shares of heads at each level."""

    start: int
    stop: int
    shares: tuple[tuple[str, float], ...]
    generated: bool

    @property
    def colour(self) -> str | None:
        """None for padding, which has no level."""
        return mixed(dict(self.shares)) if self.shares else None

    @property
    def said(self) -> str:
        """The levels in words."""
        return ", ".join(name if share == 1 else f"{name} {share:.0%}" for name, share in self.shares if share)


@dataclass(frozen=True)
class LevelledText:
    """A text, and how many heads have each of its tokens at each level.

    Attributes:
        pieces: text of each token.
        counts: heads at each level, for each token.
        title: what the levels are of.
        generated_from: the first token that the model wrote.
        unit: what pieces are, tokens or words.
    """

    pieces: Sequence[str]
    counts: Mapping[str, Sequence[int]]
    title: str
    generated_from: int | None = None
    unit: str = "tokens"

    def words(self: TextT) -> TextT:
        """The same text with a colour for each word, the mean of its tokens' and heads' colours.

        A word has the space in front of it, is no longer than `LONGEST_WORD` characters where tokens are not, and
        is either of the prompt or generated.
        """
        starts = list(self._word_starts())
        spans = list(zip(starts, [*starts[1:], len(self.pieces)]))
        first = self.generated_from
        return type(self)(
            ["".join(self.pieces[start:stop]) for start, stop in spans],
            {name: [sum(counts[start:stop]) for start, stop in spans] for name, counts in self.counts.items()},
            self.title,
            None if first is None else sum(start < first for start in starts),
            "words",
        )

    def _word_starts(self) -> Iterator[int]:
        """The first token of each word."""
        before, length = "", 0
        for index, piece in enumerate(self.pieces):
            new = piece[:1].isspace() and not before.isspace()
            if index in (0, self.generated_from) or new or length + len(piece) > LONGEST_WORD:
                yield index
                length = 0
            before, length = piece[-1:] or before, length + len(piece)

    def runs(self) -> Iterator[ColourRun]:
        """The text in its order, in runs of one colour."""
        first = len(self.pieces) if self.generated_from is None else self.generated_from
        for (shares, generated), tokens in itertools.groupby(
            range(len(self.pieces)), key=lambda i: (self._shares(i), i >= first)
        ):
            members = list(tokens)
            yield ColourRun(members[0], members[-1] + 1, shares, generated)

    def _shares(self, token: int) -> tuple[tuple[str, float], ...]:
        heads = sum(counts[token] for counts in self.counts.values())
        return tuple((name, counts[token] / heads) for name, counts in self.counts.items()) if heads else ()

    def totals(self) -> dict[str, float]:
        """Each level's share of all tokens and heads."""
        sums = {name: sum(counts) for name, counts in self.counts.items()}
        return {name: count / max(1, sum(sums.values())) for name, count in sums.items()}
