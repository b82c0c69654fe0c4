"""Precisions for heads, against trying every choice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hf_diffkv import Precision
from hf_diffkv.heads.allocation import HEAD_LADDER, LAST_RUNGS, Allocation, allocate, fields_for, loss_curve
from hf_diffkv.heads.lookup import SHIPPED
from hf_diffkv.heads.sensitivity import Sensitivity
from hf_diffkv.pages import PageLayout

K8V8 = Precision(8, 8)
ERRORS = {2: 0.2, 3: 0.036, 4: 0.008, 5: 0.0018, 6: 0.0005, 8: 0.00003}


def sensitivity(*heads: int, seed: int = 0, dim: int = 64) -> Sensitivity:
    rng = random.Random(seed)

    def drawn() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(10 ** rng.uniform(-6, -2) for _ in range(count)) for count in heads)

    shapes = tuple((count, dim, dim) for count in heads)
    return Sensitivity("llama", "0123", 2, shapes, drawn(), drawn(), ERRORS, ERRORS, 8, "4567")


def token_bytes(name: str, dim: int) -> int:
    precision = Precision.parse(name)
    layout = PageLayout.build(precision, precision, dim, dim, 2, metadata_bits=16, position_bytes=0)
    return layout.high.token_bytes


def layers_of(names: tuple[str, ...], heads: int) -> list[tuple[str, ...]]:
    return [layer for layer in product(names, repeat=heads) if len(set(layer)) <= 2]


def every_choice(given: Sensitivity, names: tuple[str, ...]) -> Iterator[tuple[float, float, tuple]]:
    """Ratio, loss and names of all of them."""
    dim = given.shapes[0][1]
    size = {name: token_bytes(name, dim) for name in names}
    dense = sum(shape[0] for shape in given.shapes) * 4 * dim

    def loss(layer: int, head: int, name: str) -> float:
        k_bits, v_bits = int(name[1]), int(name[3])
        key = given.keys[layer][head] * ERRORS[k_bits] / ERRORS[3]
        return key + given.values[layer][head] * ERRORS[v_bits] / ERRORS[2]

    for choice in product(*(layers_of(names, shape[0]) for shape in given.shapes)):
        flat = [(layer, head, name) for layer, names in enumerate(choice) for head, name in enumerate(names)]
        yield sum(size[name] for _, _, name in flat) / dense, sum(loss(*each) for each in flat), choice


def pairs_of(choice: tuple, *first: Any) -> int:
    """Different pairs, with `first` where a layer has one precision."""
    kinds = {frozenset((*layer, *first)) if len({*layer}) == 1 else frozenset(layer) for layer in choice}
    return sum(not any(kind < other for other in kinds) for kind in kinds)


@pytest.mark.parametrize("heads", [(3, 3), (4,), (2, 2, 2), (1, 1, 1, 1), (1, 3)])
@pytest.mark.parametrize("ladder", [HEAD_LADDER, ("K2V2", "K4V3", "K3V4")])
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_better_exists(heads: tuple[int, ...], ladder: tuple[str, ...], seed: int) -> None:
    given = sensitivity(*heads, seed=seed)
    choices = list(every_choice(given, ladder))
    for ratio in (0.16, 0.18, 0.2, 0.23, 0.27, 0.31, 0.5):
        within = [loss for taken, loss, _ in choices if taken <= ratio]
        if not within:
            continue
        found = allocate(given, ratio, ladder, most_pairs=None)
        assert found.loss == pytest.approx(min(within), rel=1e-9) and found.ratio <= ratio
        assert (found.ratio, found.loss) in [
            (pytest.approx(taken), pytest.approx(loss))
            for taken, loss, choice in choices
            if choice == tuple(tuple(precision.name for precision in layer) for layer in found.precisions)
        ]


@pytest.mark.parametrize("heads", [(3, 3), (2, 2, 2), (1, 1, 1), (1, 3)])
@pytest.mark.parametrize("highs", [("K8V8",), ("K8V8", "K6V5"), ("K6V5", "K5V4")])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_better_final_precisions_exist(heads: tuple[int, ...], highs: tuple[str, ...], seed: int) -> None:
    """For layers whose higher precision is one of `highs`; those of one precision may not need more than the first."""
    given, ladder = sensitivity(*heads, seed=seed), ("K3V2", "K4V3", "K6V5")
    names = tuple(dict.fromkeys((*ladder, *highs)))
    bits = {name: int(name[1]) + int(name[3]) for name in names}

    def fits(layer: tuple[str, ...]) -> bool:
        top = max(layer, key=bits.get)
        return top in highs if len(set(layer)) > 1 else bits[top] <= bits[highs[0]]

    choices = [each for each in every_choice(given, names) if all(map(fits, each[2]))]
    for ratio in (0.18, 0.2, 0.23, 0.31, 0.5):
        least = min(loss for taken, loss, _ in choices if taken <= ratio)
        found = allocate(given, ratio, ladder, None, highs)
        mine = tuple(tuple(precision.name for precision in layer) for layer in found.precisions)
        (own,) = [each for each in choices if each[2] == mine]
        assert own[1] == pytest.approx(least, rel=1e-9) and found.loss == pytest.approx(own[1])
        assert found.ratio == pytest.approx(own[0]) and found.ratio <= ratio
        few = allocate(given, ratio, ladder, 2, highs)
        assert pairs_of(few.precisions, Precision.parse(highs[0])) <= 2 and few.ratio <= ratio


@pytest.mark.parametrize("most", [2, 3])
def test_few_pairs_cost_little_more_than_the_best_few(most: int) -> None:
    ladder = ("K3V2", "K4V3", "K6V5")
    for seed in range(5):
        given = sensitivity(2, 2, 2, 2, seed=seed)
        choices = [(taken, loss) for taken, loss, choice in every_choice(given, ladder) if pairs_of(choice) <= most]
        for ratio in (0.18, 0.22, 0.27):
            found = allocate(given, ratio, ladder, most)
            assert pairs_of(found.precisions) <= most and found.ratio <= ratio
            assert found.loss <= 1.1 * min(loss for taken, loss in choices if taken <= ratio)


def check(found: Allocation, heads: int, ratio: float) -> None:
    assert found.ratio <= ratio
    assert all(len(layer) == heads and len(set(layer)) <= 2 for layer in found.precisions)


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_models_of_many_heads(heads: int) -> None:
    given = sensitivity(*[heads] * 24, dim=128)
    losses = []
    for ratio in (0.18, 0.19, 0.2, 0.22, 0.25, 0.3):
        free, six, four = (allocate(given, ratio, most_pairs=most) for most in (None, 6, 4))
        for found in (free, six, four):
            check(found, heads, ratio)
        assert free.loss <= six.loss <= four.loss
        assert pairs_of(six.precisions) <= 6 and pairs_of(four.precisions) <= 4
        assert ratio - six.ratio < 0.02
        losses.append(six.loss)
    assert losses == sorted(losses, reverse=True)


def test_one_precision_for_all_is_no_better() -> None:
    given = sensitivity(*[3] * 10)
    for name in HEAD_LADDER:
        ratio = token_bytes(name, 64) / 256
        uniform = sum(given.loss(layer, head, Precision.parse(name)) for layer in range(10) for head in range(3))
        assert allocate(given, ratio).loss <= uniform
    assert allocate(given, 1.0).precisions == ((Precision(6, 5),) * 3,) * 10


def test_what_cannot_be_met() -> None:
    given = sensitivity(3, 3)
    with pytest.raises(
        ValueError, match=r"K2V2 needs for every head, 0.141; raise it, or choose precisions yourself\."
    ):
        allocate(given, 0.1)
    for wrong in (0, -1, True, "0.2", None):
        with pytest.raises(ValueError, match="must be a number above 0"):
            allocate(given, wrong)
    with pytest.raises(ValueError, match="most_pairs=0 must be at least 1"):
        allocate(given, 0.2, most_pairs=0)
    with pytest.raises(ValueError, match="ladder is empty"):
        allocate(given, 0.2, [])
    with pytest.raises(ValueError, match="has groups"):
        allocate(given, 0.3, ["K4V3g2/1"])
    with pytest.raises(ValueError, match="K1V2: 1 bits were not measured"):
        allocate(given, 0.3, ["K1V2"])
    assert allocate(given, 1.0, ["K16V16"]).loss == 0


def test_figures_must_fit_the_heads() -> None:
    given = sensitivity(3, 3)
    with pytest.raises(ValueError, match=r"keys must have a number for each of \[3, 3\] heads"):
        replace(given, keys=given.keys[:1])
    with pytest.raises(ValueError, match="values has a number below 0"):
        replace(given, values=((-1.0, 0.0, 0.0),) * 2)
    with pytest.raises(ValueError, match="key_errors must have positive numbers by bits, 3 among them"):
        replace(given, key_errors={2: 0.1})
    for size in (0, "2", None):
        with pytest.raises(ValueError, match=f"element_bytes={size!r} must be an int of at least 1"):
            replace(given, element_bytes=size)
    with pytest.raises(ValueError, match="these are not the losses of a model's heads"):
        Sensitivity.from_dict({"keys": []})


def test_losses_at_the_ratios_of_the_ladder_and_at_others() -> None:
    given = sensitivity(2, 3)
    points = loss_curve({"sensitivity": given.to_dict()}, [0.21])
    ratios = {name: token_bytes(name, 64) / 256 for name in HEAD_LADDER}
    assert [point.ratio for point in points] == sorted([*ratios.values(), 0.21])
    assert [point.precision for point in points if point.precision] == list(HEAD_LADDER)
    for point in points:
        assert point.each_head == pytest.approx(allocate(given, point.ratio).loss, rel=1e-3)
        if point.precision is None:
            assert (point.ratio, point.one_for_all) == (0.21, None)
            continue
        k_bits, v_bits = int(point.precision[1]), int(point.precision[3])
        keys, values = (sum(map(sum, figures)) for figures in (given.keys, given.values))
        expected = keys * ERRORS[k_bits] / ERRORS[3] + values * ERRORS[v_bits] / ERRORS[2]
        assert point.one_for_all == pytest.approx(expected, rel=1e-3)
        assert point.each_head <= point.one_for_all * (1 + 1e-9)


def test_heads_that_were_not_measured_have_no_curve() -> None:
    assert loss_curve({"ratio": 0.2}) == ()


def test_a_ratio_below_the_ladder_is_refused() -> None:
    with pytest.raises(ValueError, match="target_ratio=0.1 is below what K2V2 needs"):
        loss_curve({"sensitivity": sensitivity(2).to_dict()}, [0.1])


def test_few_bits_for_low_ratios_alone() -> None:
    """Some heads get K2V2 where K3V2 of all takes too many bytes, if its loss was measured."""
    given, few = sensitivity(*[3] * 10), Precision(2, 2)
    least = token_bytes("K3V2", 64) / 256
    low, high = (allocate(given, ratio).precisions for ratio in (least - 0.001, least))
    assert any(few in layer for layer in low) and not any(few in layer for layer in high)
    unknown = replace(given, key_errors={bits: error for bits, error in given.key_errors.items() if bits > 2})
    with pytest.raises(ValueError, match="is below what K3V2 needs"):
        allocate(unknown, least - 0.001)


@pytest.mark.parametrize("ratio, most", [(0.2025, 1.14), (0.235, 1.11), (0.27, 1.14)])
@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"]
)
def test_final_precisions_of_measured_models(name: str, ratio: float, most: float) -> None:
    """The higher precision of a pair is one of few, and the loss at most `most` times that of any six pairs."""
    measured = Sensitivity.load(SHIPPED / f"{name}.json")
    precisions = fields_for({"sensitivity": measured.to_dict()}, ratio, until_full=True)[0]["head_precisions"]
    lost = 0.0
    for layer, heads in enumerate(precisions):
        highest = max({*heads}, key=lambda each: (each.k_bits + each.v_bits, each.k_bits))
        assert len({*heads}) == 1 or highest.name in LAST_RUNGS
        lost += sum(measured.loss(layer, head, each) for head, each in enumerate(heads))
    assert lost <= most * allocate(measured, ratio).loss
