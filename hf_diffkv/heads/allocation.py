"""Allocates a precision to each KV head for the lowest predicted loss within a number of bytes.

Head losses are assumed to add up. The heads of a layer share at most two precisions, a pair. The best choice for each
layer and number of bytes is found first, then the optimal sum over layers by dynamic programming. If this takes more
pairs than allowed, pairs are dropped one by one, always the one that costs least. Then single pairs are exchanged while
that helps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any

import numpy as np

from ..arguments import as_ratio
from ..pages.layout import uniform_token_bytes
from ..precision import Precision, as_precision
from .sensitivity import Sensitivity

# docs/calibration.md compares this ladder with others
HEAD_LADDER = ("K3V2", "K3V3", "K4V3", "K5V4", "K6V5")
# for ratios that the other cannot reach; at higher ones it loses more on some models (docs/notes/quality-studies.md)
DEEP_LADDER = ("K2V2", *HEAD_LADDER)
# for rows of latents (docs/latent.md), whose rotary keys need 8 bits
LATENT_LADDER = ("K8V3", "K8V4", "K8V5", "K8V6", "K8V8")
# each pair needs its own store
MOST_PAIRS = 6
# higher of a layer's two final precisions under a budget, which its heads pass on the way from K8V8; layers whose heads
# end at the same precision pass the first
LAST_RUNGS = ("K6V5", "K5V4")
# keys of a configuration's calibration
SENSITIVITY, TARGET_RATIO = "sensitivity", "target_ratio"
# number of neighbouring choices of pairs that are tried in turn
TRIALS = 10
# the one or two precisions of a layer, as positions in the ladder
Kind = frozenset[int]
# loss of a layer, and ladder positions of its heads
LayerChoice = tuple[float, tuple[int, ...]]


@dataclass(frozen=True)
class Allocation:
    """Precisions of a model's heads.

    Attributes:
        precisions: one precision for each compressed layer and KV head.
        ratio: bytes of a stored token over its bytes in the model's dtype, over all layers and heads.
        loss: predicted mean KL to the dense cache, in nats.
    """

    precisions: tuple[tuple[Precision, ...], ...]
    ratio: float
    loss: float


def allocate(
    sensitivity: Sensitivity,
    target_ratio: float,
    ladder: Sequence[Precision | str] | None = None,
    most_pairs: int | None = MOST_PAIRS,
    highs: Sequence[Precision | str] = (),
) -> Allocation:
    """Allocates the precisions of lowest predicted loss.

    With `highs`, they are the final precisions of a cache with a budget, where the higher of a layer's two precisions
    is one of `highs`.

    Args:
        target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype, not counting windows.
        ladder: precisions to choose from; None uses `ladder_of` for the model and ratio.
        most_pairs: maximum number of different pairs in the model; None means no limit.
        highs: higher precisions of pairs, which are added to the ladder.

    Raises:
        ValueError: the smallest precision does not reach the ratio, or precisions were not measured or do not fit the
            heads.
    """
    if most_pairs is not None and most_pairs < 1:
        raise ValueError(f"most_pairs={most_pairs} must be at least 1.")
    higher = tuple(as_precision("highs", precision) for precision in highs)
    as_ratio("target_ratio", target_ratio)
    given = ladder_of(sensitivity, target_ratio) if ladder is None else ladder
    chosen = tuple(dict.fromkeys((*(as_precision("ladder", precision) for precision in given), *higher)))
    if not chosen:
        raise ValueError("ladder is empty; give precisions to choose from.")
    check_ratio(target_ratio, sensitivity.shapes, sensitivity.element_bytes, chosen)
    problem = _Problem(sensitivity, chosen, tuple(map(chosen.index, higher)))
    budget = math.floor(target_ratio * problem.dense_bytes + 1e-9)
    found = problem.solve(budget, problem.kinds())
    return problem.allocation(found if most_pairs is None else _with_fewer(problem, budget, found, most_pairs))


def ladder_of(sensitivity: Sensitivity, target_ratio: float = 1.0) -> tuple[str, ...]:
    """Returns the precisions to choose from for a model's rows at a ratio, by increasing size."""
    if sensitivity.latent:
        return LATENT_LADDER
    least = _ratio(as_precision("ladder", HEAD_LADDER[0]), sensitivity.shapes, sensitivity.element_bytes)
    deep = target_ratio < least and sensitivity.knows(Precision.parse(DEEP_LADDER[0]))
    return DEEP_LADDER if deep else HEAD_LADDER


def check_ratio(
    target_ratio: Any,
    shapes: Sequence[tuple[int, int, int]],
    element_bytes: int,
    ladder: Sequence[Precision | str] = DEEP_LADDER,
) -> None:
    """Raises `ValueError` for an invalid ratio, or one that the smallest precision of `ladder` does not reach.

    Args:
        shapes: number of KV heads, key_dim and value_dim of each layer.
        element_bytes: bytes of an element of the model's dtype.
    """
    as_ratio("target_ratio", target_ratio)
    precisions = [as_precision("ladder", each) for each in ladder]
    ratios = {precision.name: _ratio(precision, shapes, element_bytes) for precision in precisions}
    name, least = min(ratios.items(), key=lambda item: item[1])
    if target_ratio < least:
        raise ValueError(
            f"target_ratio={target_ratio} is below what {name} needs for every head, {least:.3f}; raise it, or choose "
            "precisions yourself."
        )


def ratio_of(precision: Precision | str, calibration: Mapping[str, Any]) -> float:
    """Returns a stored token's bytes over its bytes in the model's dtype if all heads have one precision."""
    values = calibration[SENSITIVITY]
    return _ratio(as_precision("precision", precision), values["shapes"], values["element_bytes"])


def _ratio(precision: Precision, shapes: Sequence[Sequence[int]], element_bytes: int) -> float:
    taken = sum(heads * uniform_token_bytes(precision, key, value, element_bytes) for heads, key, value in shapes)
    return taken / sum(heads * (key + value) * element_bytes for heads, key, value in shapes)


def fields_for(
    calibration: Mapping[str, Any] | None, target_ratio: float, until_full: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of a configuration for a ratio, and its calibration.

    Args:
        calibration: calibration with the measured loss of heads, as `hf-diffkv calibrate` writes it.
        target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype.
        until_full: whether these are final precisions of a cache with a budget.

    Raises:
        ValueError: the calibration has no such measurements, or the ratio cannot be met (`allocate`).
    """
    if calibration is None or SENSITIVITY not in calibration:
        raise ValueError(
            "this configuration does not record what a model's heads lose; `hf-diffkv calibrate --model MODEL` "
            "measures it and writes one that does, for DiffKVConfig.from_pretrained."
        )
    found = _allocated(json.dumps(calibration[SENSITIVITY], sort_keys=True), target_ratio, until_full)
    chosen = {TARGET_RATIO: target_ratio, "ratio": found.ratio, "predicted_kl": found.loss}
    # levels are unused but checked
    best = as_precision("ladder", LATENT_LADDER[-1])
    levels = {"high": best, "low": best} if calibration[SENSITIVITY].get("latent") else {}
    return {"head_precisions": found.precisions, **levels}, {**calibration, **chosen}


@lru_cache(maxsize=16)
def _allocated(sensitivity: str, target_ratio: float, until_full: bool) -> Allocation:
    """Caches `allocate` by the sensitivity as JSON, as every cache of a model needs the same allocation."""
    given = Sensitivity.from_dict(json.loads(sensitivity))
    rungs = LAST_RUNGS if not given.latent else LATENT_LADDER[-1:]
    highs = tuple(name for name in rungs if until_full and given.knows(Precision.parse(name)))
    return allocate(given, target_ratio, highs=highs)


@dataclass(frozen=True)
class Loss:
    """Predicted mean KL of the following tokens to the dense cache's, in nats.

    Attributes:
        ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype, over all compressed layers.
        each_head: loss with the precision that `allocate` chooses for each head.
        precision: name of the precision that has exactly this ratio if all heads have it, or None.
        one_for_all: loss with this precision for all heads, or None.
    """

    ratio: float
    each_head: float
    precision: str | None = None
    one_for_all: float | None = None


def loss_curve(calibration: Mapping[str, Any], ratios: Iterable[float] = ()) -> tuple[Loss, ...]:
    """Returns losses by increasing size, at `ratios` and the ladder's ratios; empty if heads were not measured.

    Raises:
        ValueError: the smallest precision does not reach a ratio.
    """
    if SENSITIVITY not in calibration:
        return ()
    sensitivity = Sensitivity.from_dict(calibration[SENSITIVITY])
    uniform = {ratio_of(name, calibration): name for name in ladder_of(sensitivity)}
    return tuple(
        one_for_all(uniform[ratio], calibration) if ratio in uniform else Loss(ratio, allocate(sensitivity, ratio).loss)
        for ratio in sorted({*uniform, *ratios})
    )


def one_for_all(precision: Precision | str, calibration: Mapping[str, Any]) -> Loss:
    """Returns bytes and loss with one precision for all heads, and the loss of the best choice within these bytes.

    Raises:
        ValueError: the bits were not measured.
    """
    sensitivity = Sensitivity.from_dict(calibration[SENSITIVITY])
    chosen, ratio = as_precision("precision", precision), ratio_of(precision, calibration)
    heads = [(layer, head) for layer, shape in enumerate(sensitivity.shapes) for head in range(shape[0])]
    loss = sum(sensitivity.loss(layer, head, chosen) for layer, head in heads)
    return Loss(ratio, allocate(sensitivity, ratio).loss, chosen.name, loss)


@dataclass(frozen=True)
class _Solution:
    """A choice of precisions.

    Attributes:
        places: ladder positions by layer and head.
        loss: predicted loss; infinite if nothing fits.
        price: additional loss per byte saved.
    """

    places: tuple[tuple[int, ...], ...]
    loss: float
    price: float = 0.0


def _with_fewer(problem: _Problem, budget: int, found: _Solution, most: int) -> _Solution:
    allowed = problem.kinds()
    while len(problem.stores(found)) > most:
        fewer = [allowed - {kind} for kind in problem.stores(found)]
        trials = [(problem.solve(budget, kinds), kinds) for kinds in problem.promising(fewer, found.price)]
        found, allowed = min(trials, key=lambda trial: trial[0].loss)
        if found.loss == math.inf:
            found = problem.solve(budget, {problem.kind_of({problem.least})})
    while True:
        others = problem.promising(_neighbours(problem, problem.stores(found), most), found.price)
        solved = (problem.solve(budget, kinds) for kinds in others)
        better = [trial for trial in solved if trial.loss < found.loss and len(problem.stores(trial)) <= most]
        if not better:
            return found
        found = min(better, key=lambda trial: trial.loss)


def _neighbours(problem: _Problem, stores: set[Kind], most: int) -> Iterator[set[Kind]]:
    """Yields sets of kinds that differ from `stores` by one pair, exchanged or added."""
    for other in problem.kinds() - stores:
        given_up = [{kind} for kind in stores] + [set()] * (len(stores) < most)
        for old in given_up:
            kept = stores - old | {other}
            yield kept | ({frozenset([place]) for kind in kept for place in kind} & problem.kinds())


class _Problem:
    """Bytes and losses of each layer's heads at each precision of the ladder."""

    def __init__(self, sensitivity: Sensitivity, ladder: tuple[Precision, ...], highs: tuple[int, ...] = ()) -> None:
        self.ladder, self.highs, size = ladder, highs, sensitivity.element_bytes
        self.dense_bytes = sum(heads * (key + value) * size for heads, key, value in sensitivity.shapes)
        self.bytes = [
            [uniform_token_bytes(p, key, value, size) for p in ladder] for _, key, value in sensitivity.shapes
        ]
        self.heads = [shape[0] for shape in sensitivity.shapes]
        self.losses = [
            np.array([[sensitivity.loss(layer, head, p) for p in ladder] for head in range(heads)])
            for layer, heads in enumerate(self.heads)
        ]
        # position of the precision with the fewest bytes over all heads
        self.least = min(range(len(ladder)), key=self._size)

    def kinds(self) -> set[Kind]:
        """Returns all pairs and all single precisions; with `highs`, pairs whose higher precision is one of them."""
        places = range(len(self.ladder))
        if self.highs:
            pairs = ((first, place) for first in self.highs for place in places if place != first)
            return {frozenset(pair) for pair in pairs if self._size(pair[1]) < self._size(pair[0])}
        return {frozenset(kind) for count in (1, 2) for kind in combinations(places, count)}

    def _size(self, place: int) -> int:
        return sum(heads * sizes[place] for heads, sizes in zip(self.heads, self.bytes))

    def kind_of(self, places: Iterable[int]) -> Kind:
        """Returns the kind of a layer with these positions."""
        return frozenset(places) | (frozenset(self.highs[:1]) if len({*places}) == 1 else frozenset())

    def stores(self, solution: _Solution) -> set[Kind]:
        """Returns the kinds that each need a store."""
        kinds = {self.kind_of(layer) for layer in solution.places}
        kinds = {kind for kind in kinds if not any(kind < other for other in kinds)}
        # a layer with only that precision can share the store of any pair with it
        alone = frozenset(self.highs[:1])
        return kinds - {alone} | {alone | {self.least}} if alone in kinds and alone else kinds

    def allocation(self, solution: _Solution) -> Allocation:
        taken = sum(sizes[place] for sizes, places in zip(self.bytes, solution.places) for place in places)
        precisions = tuple(tuple(self.ladder[place] for place in places) for places in solution.places)
        return Allocation(precisions, taken / self.dense_bytes, float(solution.loss))

    def solve(self, budget: int, kinds: set[Kind]) -> _Solution:
        """Minimises the loss within `budget` bytes per token, taking each layer's precisions from one of `kinds`."""
        options: list[dict[int, LayerChoice]] = [{} for _ in self.heads]
        for best, choices in zip(options, self._options):
            for kind in kinds:
                for taken, choice in choices[kind].items():
                    if taken not in best or choice < best[taken]:
                        best[taken] = choice
        least = [min(best, default=0) for best in options]
        room = budget - sum(least)
        if room < 0 or not all(options):
            return _Solution((), math.inf)
        unit = math.gcd(*(taken - start for best, start in zip(options, least) for taken in best)) or 1
        return _knapsack(options, least, unit, room // unit)

    def promising(self, choices: Iterable[set[Kind]], price: float) -> list[set[Kind]]:
        """Returns the `TRIALS` choices of lowest loss if bytes have a price instead of a limit."""

        def paid(options: dict[int, LayerChoice]) -> float:
            return min((loss + price * taken for taken, (loss, _) in options.items()), default=math.inf)

        least = {kind: np.array([paid(options[kind]) for options in self._options]) for kind in self.kinds()}

        def order(kinds: set[Kind]) -> tuple[float, list[list[int]]]:
            # positions break ties, in an order that does not depend on hashes
            lost = np.min([least[kind] for kind in kinds], axis=0)
            return float(lost.sum()), sorted(sorted(kind) for kind in kinds)

        return sorted(choices, key=order)[:TRIALS]

    @cached_property
    def _options(self) -> list[dict[Kind, dict[int, LayerChoice]]]:
        """Best positions of the heads with their loss, by layer, kind and bytes."""
        return [{kind: self._best(layer, kind) for kind in self.kinds()} for layer in range(len(self.heads))]

    def _best(self, layer: int, kind: Kind) -> dict[int, LayerChoice]:
        heads, losses, sizes = self.heads[layer], self.losses[layer], self.bytes[layer]
        if len(kind) == 1:
            (place,) = kind
            return {heads * sizes[place]: (float(losses[:, place].sum()), (place,) * heads)}
        low, high = sorted(kind, key=lambda place: sizes[place])
        # heads with the largest gain first
        order = np.argsort(losses[:, high] - losses[:, low], kind="stable")
        found: dict[int, LayerChoice] = {}
        # a layer whose heads all have the same precision is in the store of a pair with the first of `highs`
        whole = low in self.highs[:1] or high in self.highs[:1]
        for count in range(0, heads + 1) if whole else range(1, heads):
            places = np.full(heads, low)
            places[order[:count]] = high
            taken = count * sizes[high] + (heads - count) * sizes[low]
            loss = float(losses[np.arange(heads), places].sum())
            if taken not in found or loss < found[taken][0]:
                found[taken] = loss, tuple(places.tolist())
        return found


def _knapsack(options: list[dict[int, LayerChoice]], least: list[int], unit: int, room: int) -> _Solution:
    """Chooses one option per layer for the least total loss.

    Args:
        options: loss and positions by bytes, for each layer.
        least: bytes of each layer's smallest option.
        room: units that may be taken in addition to the sum of `least`.
    """
    best = np.zeros(room + 1)
    taken = []
    for layer, start in zip(options, least):
        after = np.full(room + 1, math.inf)
        used = np.zeros(room + 1, dtype=np.int64)
        for size, (loss, _) in layer.items():
            units = (size - start) // unit
            if units <= room:
                better = best[: room + 1 - units] + loss
                found = better < after[units:]
                after[units:][found] = better[found]
                used[units:][found] = size
        best = after
        taken.append(used)
    places, left = [], room
    for layer, start, used in zip(reversed(options), reversed(least), reversed(taken)):
        size = int(used[left])
        places.append(layer[size][1])
        left -= (size - start) // unit
    step = max(1, room // 20)
    price = (best[room - step] - best[room]) / (step * unit) if step <= room and best[room - step] < math.inf else 0.0
    return _Solution(tuple(reversed(places)), float(best[room]), float(price))
