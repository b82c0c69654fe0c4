"""How far two generations agree, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """How far two runs wrote the same tokens: up to the first difference, and position by position."""

    tokens: int
    until_difference: int
    equal: int

    @classmethod
    def of(cls, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Agreement:
        """Compares the token ids of every turn; where one turn is longer, its further tokens differ."""
        pairs: list[tuple[int | None, int | None]] = []
        for a, b in zip(first, second):
            length = max(len(a), len(b))
            pairs += zip([*a, *[None] * (length - len(a))], [*b, *[None] * (length - len(b))])
        same = [a == b for a, b in pairs]
        return cls(len(same), same.index(False) if False in same else len(same), sum(same))
