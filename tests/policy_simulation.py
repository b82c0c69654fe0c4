"""Rules of policies other than DiffKV's, one head at a time and in plain Python (`dense_simulation.Rule`)."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from dense_simulation import HIGH, LOW, PRUNED, Head, Rule
from torch import Tensor

# registers "first_tokens"
runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_policy.py"))


def filled(head: Head, chosen: dict[int, int]) -> Tensor:
    """Returns levels [S]: pruned except for the given tokens."""
    level = torch.full_like(head.level, PRUNED)
    for token, value in chosen.items():
        level[token] = value
    return level


def from_least(head: Head, tokens: list[int]) -> list[int]:
    """Sorts tokens as they would be dropped: the least significant first, and of equal ones the oldest."""
    return sorted(tokens, key=lambda token: (float(head.mean[token]), int(head.index[token])))


class FirstTokens(Rule):
    """The rule of examples/own_policy.py."""

    def __init__(self, first: int = 4) -> None:
        self.kept = first

    def first(self, alpha_high: float, alpha_low: float) -> tuple[float, float]:
        return 0.0, 0.0

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        kept = [token for token in members.nonzero().flatten().tolist() if head.index[token] < self.kept]
        return filled(head, dict.fromkeys(kept, HIGH))

    def step(self, head: Head, candidate: int) -> list[tuple[int, int]]:
        return [(candidate, HIGH if head.index[candidate] < self.kept else PRUNED)]


class LeanKV(Rule):
    def __init__(self, high_cut: float = 0.05, low_cut: float = 0.0) -> None:
        self.high_cut, self.low_cut = high_cut, low_cut

    def first(self, alpha_high: float, alpha_low: float) -> tuple[float, float]:
        return 0.0, 0.0

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        order = from_least(head, members.nonzero().flatten().tolist())
        total, so_far, levels = sum(float(head.mean[token]) for token in order), 0.0, {}
        for token in order:
            so_far += float(head.mean[token])
            share = so_far / total
            levels[token] = PRUNED if share < self.low_cut else LOW if share < self.high_cut else HIGH
        for alpha, least in ((head.alpha_high, HIGH), (head.alpha_low, LOW)):
            above = [head.mean[token] for token in order if levels[token] >= least]
            if not order or len(above) == len(order):
                alpha.fill_(0.0)
            else:
                alpha.copy_(min(above) * head.n if above else torch.tensor(torch.inf))
        return filled(head, levels)
