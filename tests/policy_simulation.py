"""The rules of all policies but DiffKV's, one head at a time and in plain Python; see `dense_simulation.Rule`."""

from __future__ import annotations

import math

import torch
from dense_simulation import HIGH, LOW, PRUNED, Head, Rule, algorithm_one
from torch import Tensor


def rounded(x: float) -> int:
    return math.floor(x + 0.5)


def uniform(seed: int, layer: int, head: int, position: int) -> int:
    """The number below 2**32 that belongs to a token."""
    mixed = 0
    for part in (seed, layer, head, position):
        mixed ^= part
        for multiplier, shift in ((0x7FEB352D, 15), (0x2C1B3C6D, 13)):
            mixed = (((mixed ^ (mixed >> 16)) + 0x9E3779B9) % 2**32) * multiplier % 2**32
            mixed ^= mixed >> shift
    return mixed


def filled(head: Head, chosen: dict[int, int]) -> Tensor:
    """Levels [S]: pruned but for the given tokens."""
    level = torch.full_like(head.level, PRUNED)
    for token, value in chosen.items():
        level[token] = value
    return level


def from_least(head: Head, tokens: list[int], value: dict[int, float] | None = None) -> list[int]:
    """Tokens in the order in which they would be dropped: the least first, of equal ones the oldest."""
    value = {token: float(head.mean[token]) for token in tokens} if value is None else value
    return sorted(tokens, key=lambda token: (value[token], int(head.index[token])))


class Budgeted(Rule):
    """Keeps so many of the tokens outside the window; what is generated stays."""

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def first(self, alpha_high: float, alpha_low: float) -> tuple[float, float]:
        return 0.0, 0.0

    def quota(self, outside: int) -> int:
        return rounded(self.budget * outside)

    def values(self, head: Head, tokens: list[int]) -> dict[int, float] | None:
        return None

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        tokens = members.nonzero().flatten().tolist()
        order = from_least(head, tokens, self.values(head, tokens))
        return filled(head, {token: HIGH for token in order[max(0, len(order) - self.quota(outside)) :]})


class SnapKV(Budgeted):
    def __init__(self, budget: float = 0.3, pool: int = 5) -> None:
        super().__init__(budget)
        self.pool = pool

    def values(self, head: Head, tokens: list[int]) -> dict[int, float]:
        at = {int(head.index[token]): float(head.mean[token]) for token in tokens}
        reach = range(-(self.pool // 2), self.pool // 2 + 1)
        return {
            token: sum(at.get(int(head.index[token]) + offset, 0.0) for offset in reach) / self.pool for token in tokens
        }


class Pyramid(SnapKV):
    def __init__(self, layer: int, layers: int, budget: float = 0.3, pool: int = 5, beta: float = 20.0) -> None:
        most = min(1.0, budget * (2 - 1 / beta))
        super().__init__(most - 2 * (most - budget) * layer / (layers - 1), pool)


class H2O(Budgeted):
    def __init__(self, budget: float = 0.3, minimum: int = 64) -> None:
        super().__init__(budget)
        self.minimum = minimum

    def quota(self, outside: int) -> int:
        return max(self.minimum, super().quota(outside))

    def step(self, head: Head, candidate: int) -> list[tuple[int, int]]:
        stored = (head.level == HIGH).nonzero().flatten().tolist()
        if len(stored) < self.minimum:
            return [(candidate, HIGH)]
        if not stored:
            return [(candidate, PRUNED)]
        least = from_least(head, stored)[0]
        if head.mean[candidate] > head.mean[least]:
            return [(candidate, HIGH), (least, PRUNED)]
        return [(candidate, PRUNED)]


class Chosen(Rule):
    """A token is kept or not by what and where it is."""

    def first(self, alpha_high: float, alpha_low: float) -> tuple[float, float]:
        return 0.0, 0.0

    def level(self, head: Head, token: int) -> int:
        raise NotImplementedError

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        return filled(head, {token: self.level(head, token) for token in members.nonzero().flatten().tolist()})

    def step(self, head: Head, candidate: int) -> list[tuple[int, int]]:
        return [(candidate, self.level(head, candidate))]


class Streaming(Chosen):
    def __init__(self, sinks: int = 4) -> None:
        self.sinks = sinks

    def level(self, head: Head, token: int) -> int:
        return HIGH if head.index[token] < self.sinks else PRUNED


class Random(Chosen):
    def __init__(self, layer: int, budget: float = 0.3, pinned: int = 4, seed: int = 0) -> None:
        self.layer, self.budget, self.pinned, self.seed = layer, budget, pinned, seed

    def level(self, head: Head, token: int) -> int:
        position = int(head.index[token])
        drawn = uniform(self.seed, self.layer, head.head, position) / 2**32
        return HIGH if position < self.pinned or drawn < self.budget else PRUNED


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


class Share(Rule):
    def __init__(self, layer: int, share: float = 0.25, prune: float = 0.0, by: str = "significance", seed: int = 0):
        self.layer, self.share, self.prune, self.by, self.seed = layer, share, prune, by, seed

    def first(self, alpha_high: float, alpha_low: float) -> tuple[float, float]:
        return 1.0, 0.1 if self.prune else 0.0

    def value(self, head: Head, token: int) -> float:
        if self.by == "random":
            return uniform(self.seed, self.layer, head.head, int(head.index[token]))
        # one product in float32, as ties are decided there
        return float(head.mean[token] * head.norm[token]) if self.by == "contribution" else float(head.mean[token])

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        tokens = members.nonzero().flatten().tolist()
        order = from_least(head, tokens, {token: self.value(head, token) for token in tokens})
        kept = order[max(0, len(order) - (outside - rounded(self.prune * outside))) :]
        may_rise = [token for token in kept if head.level[token] != LOW]
        high = may_rise[max(0, len(may_rise) - rounded(self.share * len(kept))) :]
        if high:
            head.alpha_high.copy_((min(head.mean[token] for token in high) * head.n).clamp(1e-6, 1e6))
        if kept and self.prune:
            head.alpha_low.copy_((min(head.mean[token] for token in kept) * head.n).clamp(1e-6, 1e6))
        return filled(head, {token: HIGH if token in high else LOW for token in kept})

    def step(self, head: Head, candidate: int) -> list[tuple[int, int]]:
        if self.by == "random":
            drawn = self.value(head, candidate) / 2**32
            if drawn < self.prune:
                return [(candidate, PRUNED)]
            return [(candidate, HIGH if drawn >= 1 - self.share * (1 - self.prune) else LOW)]
        n = torch.tensor(float(head.n))
        high_error, low_error = self.errors(head, int(head.index[candidate]) - head.sinks)
        low = head.alpha_low / n
        if self.prune:
            low = low * torch.exp(4 * low_error)
        if self.share == 1:
            high = low
        elif self.share == 0:
            high = torch.tensor(torch.inf)
        else:
            high = head.alpha_high * torch.exp(4 * high_error) / n
        return algorithm_one(head.level, head.mean, candidate, torch.minimum(low, high), high)

    def follow(self, head: Head, candidate: int) -> None:
        if self.by == "random":
            return
        errors = self.errors(head, int(head.index[candidate]) - head.sinks + 1)
        for alpha, error, moves in zip((head.alpha_high, head.alpha_low), errors, (True, self.prune > 0)):
            if moves:
                alpha.copy_((alpha * torch.exp(0.1 * error)).clamp(1e-6, 1e6))

    def errors(self, head: Head, outside: int) -> tuple[Tensor, Tensor]:
        high, kept = (
            torch.tensor(float(sum(int(level) in of for level in head.level))) for of in ((HIGH,), (LOW, HIGH))
        )
        wanted = (1 - self.prune) * torch.tensor(float(outside))
        return tuple(
            ((have - want) / (0.02 * of + 1)).clamp(-2, 2)
            for have, want, of in ((high, self.share * kept, kept), (kept, wanted, wanted))
        )
