"""Tables of field task records: means, paired differences and their intervals."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from hf_diffkv.evaluation.records import Record

# 40 cases: the method loses 8 of them and wins 2
DENSE_SCORES = [1.0] * 30 + [0.0] * 10
METHOD_SCORES = [0.0] * 8 + [1.0] * 22 + [1.0] * 2 + [0.0] * 8


@pytest.fixture
def tables(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("field_tasks.tables")


def records(method: str, scores: list[float], task: str = "vt", held: int = 50, digest: str = "d") -> list[Record]:
    return [
        Record(
            method,
            task,
            f"4096/{index}",
            f"{digest}{index}",
            metrics={"score": (score, 1.0)},
            bytes=held,
            dense_bytes=100,
            details={"generated_tokens": 20},
        )
        for index, score in enumerate(scores)
    ]


def test_paired_differences(tables: ModuleType) -> None:
    dense, mine = records("dense", DENSE_SCORES), records("diffkv", METHOD_SCORES)
    found = tables.difference(mine, dense)
    assert (found.better, found.worse) == (2, 8)
    assert found.estimate.mean == pytest.approx(-6 / 40)
    # for the mean of 40 differences with standard deviation 0.477, 1.96 standard errors are 0.148
    assert found.estimate.low == pytest.approx(-0.15 - 0.148, abs=0.03)
    assert found.estimate.high == pytest.approx(-0.15 + 0.148, abs=0.03)
    # cases in another order form the same pairs
    assert tables.difference(mine[::-1], dense).estimate.mean == found.estimate.mean


def test_equal_answers_differ_by_nothing(tables: ModuleType) -> None:
    dense = records("dense", DENSE_SCORES)
    found = tables.difference(records("diffkv", DENSE_SCORES), dense)
    assert (found.estimate.mean, found.estimate.low, found.estimate.high) == (0.0, 0.0, 0.0)


def test_only_the_same_cases_are_pairs(tables: ModuleType) -> None:
    dense = records("dense", [1.0, 1.0])
    assert tables.difference(records("diffkv", [0.0], digest="other"), dense) is None
    some = tables.difference(records("diffkv", [0.0] * 5), dense)
    assert (some.estimate.weight, some.worse) == (2.0, 2)
    failed = [Record("dense", "vt", "4096/0", "d0", error="no memory"), dense[1]]
    assert tables.difference(records("diffkv", [0.0, 0.0]), failed).estimate.weight == 1.0


def test_a_table(tables: ModuleType) -> None:
    found = [
        *records("diffkv", [0.5, 1.0], held=25),
        *records("dense", [1.0, 1.0], held=100),
        *records("dense", [1.0, 0.0], task="cwe", held=100),
        *records("diffkv", [1.0, 0.0], task="cwe", held=25),
        *records("quanto:4", [1.0], held=30),
        Record("quanto:4", "vt", "4096/1", "d1", error="ValueError: no"),
    ]
    lines = tables.tables(found).splitlines()
    assert lines[0] == "**ruler 4096**"
    assert lines[2] == (
        "| method | real bytes | vt | cwe | mean | difference to dense (95 %) | better, worse | tokens | answers |"
    )
    assert lines[4] == "| `dense` | 100.0% | 100.0 | 50.0 | 75.0 | - | - | 20 | 4 |"
    assert lines[5] == "| `quanto:4` | 30.0% | 100.0 | - | - | +0.0 (+0.0 to +0.0) | 0, 0 | 20 | 1 of 2 |"
    assert lines[6].startswith("| `diffkv` | 25.0% | 75.0 | 50.0 | 62.5 | -12.5 (")
    assert lines[6].endswith("| 0, 1 | 20 | 4 |")
    assert lines[8] == "- `quanto:4` failed: ValueError: no"


def test_suites_and_lengths_have_tables_of_their_own(tables: ModuleType) -> None:
    longer = [Record("dense", "vt", "8192/0", "x", metrics={"score": (1.0, 1.0)}, details={"generated_tokens": 1})]
    alone = [Record("dense", "gsm8k", "a-1", "x", metrics={"score": (1.0, 1.0)}, details={"generated_tokens": 1})]
    text = tables.tables([*records("dense", [1.0]), *longer, *alone])
    assert [line for line in text.splitlines() if line.startswith("**")] == [
        "**gsm8k**",
        "**ruler 4096**",
        "**ruler 8192**",
    ]
    assert "| method | real bytes | gsm8k | difference" in text


def test_rows_that_are_asked_for(tables: ModuleType) -> None:
    found = [*records("diffkv", [1.0]), *records("quanto:4", [1.0]), *records("dense", [1.0])]
    rows = [line.split(" | ")[0] for line in tables.tables(found, ["quanto:4", "diffkv"]).splitlines()[4:]]
    assert rows == ["| `quanto:4`", "| `diffkv`"]
    # the reference counts even without its own row
    assert "+0.0 (+0.0 to +0.0)" in tables.tables(found, ["diffkv"])


def test_a_summary_has_groups_of_tasks_and_the_mean_over_tasks(tables: ModuleType) -> None:
    scores = {"niah_single_1": 1.0, "vt": 0.5, "cwe": 0.25, "fwe": 0.0, "qa_1": 1.0}
    needles = [f"niah_{name}" for name in ("single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")]
    scores |= dict.fromkeys([*needles, "niah_multivalue", "niah_multiquery"], 0.0)
    found = [*(record for task, score in scores.items() for record in records("dense", [score], task))]
    lines = tables.summary([*found, *records("dense", [1.0, 0.0], "qa_2")], ["dense"]).splitlines()
    assert lines[0].startswith(
        "| method | real bytes | needles, 8 tasks | `vt`, `cwe`, `fwe` | `qa_1`, `qa_2` | mean |"
    )
    # 1 / 8, .75 / 3, (1 + .5) / 2, and (1 + .75 + 1.5) / 13
    assert lines[2] == "| `dense` | 50.0% | 12.5 | 25.0 | 75.0 | 25.0 | - | - | 20 | 14 |"
    # a group that lacks one of its tasks has no mean
    assert tables.summary(found, ["dense"]).splitlines()[2].startswith("| `dense` | 50.0% | 12.5 | 25.0 | - | - |")


def test_an_overview_compares_over_the_cases_that_a_method_had(tables: ModuleType) -> None:
    dense = [*records("dense", [1.0, 0.0, 0.0], held=100), *records("dense", [1.0], "cwe", held=100)]
    mine = [*records("diffkv", [1.0, 0.0, 1.0], held=25), *records("diffkv", [0.0], "cwe", held=25)]
    some = records("quanto:4", [0.5, 0.0], held=30)
    lines = tables.overview({"one": [*dense, *mine, *some], "two": dense}, ["dense", "diffkv", "quanto:4"]).splitlines()
    assert lines == [
        "| method | one | two |",
        "| --- | --- | --- |",
        "| `dense` | 66.7 (100.0%) | 66.7 (100.0%) |",
        "| `diffkv` | 33.3 (25.0%) | - |",
        "| `quanto:4` | 25.0 (30.0%), 2 cases, dense 50.0 | - |",
    ]
