"""Cuts of prompts, and requests that wait for others."""

from __future__ import annotations

import pytest
from hf_diffkv_serving.batching.beginnings import CUT_STEP, FEWEST_TOKENS, Beginnings, check_marks

N = FEWEST_TOKENS


def cuts(known: Beginnings, name: str, position: int = 0) -> list[int]:
    found = []
    while (cut := known.next_cut(name, position)) is not None:
        assert known.is_cut(name, cut) and not known.is_cut(name, cut + 1)
        found.append(cut)
        position = cut
    return found


def text(first: int, tokens: int) -> list[int]:
    return list(range(first, first + tokens))


def test_marks_are_cuts_where_parts_are_long_enough() -> None:
    known = Beginnings()
    known.add("a", text(0, 5 * N), [N - 1, N, 2 * N - 1, 2 * N, 5 * N - 1, 3 * N + 7])
    assert cuts(known, "a") == [N, 2 * N, 3 * N + 7, 5 * N - 1]
    assert cuts(known, "a", N + 1) == [2 * N, 3 * N + 7, 5 * N - 1]
    assert cuts(known, "unknown") == []
    known.remove("a")
    known.remove("a")
    assert cuts(known, "a") == []


def test_what_requests_have_in_common_is_a_part() -> None:
    """At a multiple, whatever words follow by chance; of those that are not done, all are cut there."""
    known, shared = Beginnings(), text(0, 3 * N + 2 * CUT_STEP + 3)
    known.add("a", shared + text(1000, 40))
    known.add("short", shared[: N - 1] + text(2000, 200))
    assert not cuts(known, "a") and not cuts(known, "short")
    known.add("b", shared + text(3000, 50))
    cut = 3 * N + 2 * CUT_STEP
    assert cuts(known, "a") == cuts(known, "b") == [cut]
    known.remove("a")
    # a little more in common than with the others
    known.add("c", shared + text(3000, 5) + text(4000, 9))
    assert cuts(known, "c") == [cut]
    # the same one again leaves something to compute
    known.add("d", shared[: 2 * N])
    assert cuts(known, "d") == [2 * N - CUT_STEP]
    known.add("e", text(0, N) + text(5000, 9))
    assert cuts(known, "e") == [N] and cuts(known, "b") == [2 * N - CUT_STEP, cut]


def test_marks_come_before_what_is_found() -> None:
    known, shared = Beginnings(), text(0, 4 * N)
    known.add("a", shared + text(1000, 40), [4 * N - 5])
    known.add("b", shared + text(2000, 40), [4 * N - 5])
    assert cuts(known, "a") == cuts(known, "b") == [4 * N - 5]


def test_a_part_behind_what_was_kept_is_long_enough() -> None:
    known = Beginnings()
    known.add("a", text(0, 9 * N), [2 * N, 4 * N])
    known.resume("a", N + 1)
    assert cuts(known, "a", N + 1) == [4 * N]
    known.add("b", text(7000, 9 * N), [2 * N, 3 * N])
    known.resume("b", 2 * N)
    assert cuts(known, "b", 2 * N) == [3 * N]
    known.clear()
    assert cuts(known, "b") == []


def test_prompts_are_forgotten_in_the_order_in_which_they_came() -> None:
    known = Beginnings(most_tokens=6 * N)
    for first in (0, 10_000, 20_000):
        known.add(str(first), text(first, 2 * N))
        known.remove(str(first))
    known.add("short", text(40_000, N - 1))
    # moves to the end, and pushes none out
    known.add("again", text(0, 2 * N))
    assert cuts(known, "again") == [2 * N - CUT_STEP]
    known.add("more", text(30_000, 2 * N))
    known.add("gone", text(10_000, 2 * N))
    assert cuts(known, "gone") == []
    known.add("there", text(0, 2 * N))
    assert cuts(known, "there") == [2 * N - CUT_STEP]
    assert known._tokens <= 6 * N and len(known._remembered) == 3


def test_one_of_several_computes_what_they_begin_with() -> None:
    known, shared = Beginnings(), text(0, 2 * N)
    for name in "abc":
        known.add(name, shared + text(ord(name) * 1000, 30))
    known.add("other", text(50_000, 200))
    waiting = ["a", "other", "b", "c"]
    assert known.without_twins(waiting, {}, {}) == ["a", "other"]
    # one of them is under way, and has come so far
    assert known.without_twins(waiting[1:], {}, {"a": 0}) == ["other"]
    assert known.without_twins(waiting[1:], {}, {"a": 2 * N - 1}) == ["other"]
    assert known.without_twins(waiting[1:], {}, {"a": 2 * N}) == ["other", "b"]
    # it is kept
    assert known.without_twins(waiting, dict.fromkeys("abc", 2 * N), {}) == waiting
    assert known.without_twins(waiting, {"b": 2 * N}, {"a": 0}) == ["other", "b"]
    known.remove("a")
    assert known.without_twins(["b", "c", "unknown"], {}, {"a": 0}) == ["b", "unknown"]


def test_marks_are_checked() -> None:
    assert check_marks([5, 3, 5], 6) == (3, 5) and check_marks((), 0) == ()
    for wrong in ([0], [6], [-1], [2.0]):
        with pytest.raises(ValueError, match=r"boundaries=.* below the prompt's 6"):
            check_marks(wrong, 6)
