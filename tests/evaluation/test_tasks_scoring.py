"""Rules of scoring, by cases made by hand."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from hf_diffkv.evaluation.scoring.answers import boxed, final_choice, final_number
from hf_diffkv.evaluation.scoring.latex import final_latex, normalise, same_answer
from hf_diffkv.evaluation.scoring.overlap import f1, found_strings, rouge_l, similarity


def test_found_strings() -> None:
    assert found_strings("The codes are 123 and ABC.", ["123", "abc", "9"]) == pytest.approx(2 / 3)
    assert found_strings("", ["x"]) == 0


@pytest.mark.parametrize(
    ("text", "expected", "score"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "the black cat", 2 / 3),
        ("cat cat cat", "cat", 0.5),
        ("sat cat", "cat sat", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_f1(text: str, expected: str, score: float) -> None:
    assert f1(text, expected) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "expected", "score"),
    [
        ("the cat sat on the mat", "The cat sat on the mat.", 1.0),
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("", "a", 0.0),
    ],
)
def test_rouge_l(text: str, expected: str, score: float) -> None:
    assert rouge_l(text, expected) == pytest.approx(score)


def test_rouge_l_by_subsequences() -> None:
    rng = random.Random(0)
    for _ in range(30):
        mine, theirs = ([rng.choice("abc") for _ in range(rng.randrange(1, 8))] for _ in range(2))
        # all subsequences, one for each set of chosen words
        found = [
            {tuple(w for i, w in enumerate(words) if chosen >> i & 1) for chosen in range(1 << len(words))}
            for words in (mine, theirs)
        ]
        common = max(map(len, found[0] & found[1]))
        assert rouge_l(" ".join(mine), " ".join(theirs)) == pytest.approx(2 * common / (len(mine) + len(theirs)))


def test_similarity() -> None:
    assert similarity("return x", "return x") == 1
    assert similarity("abcd", "abxd") == pytest.approx(0.75)
    assert similarity("", "x") == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 apples and 4 pears. The answer is 7.", 7),
        ("The answer is 12 apples, not 13.", 12),
        ("The answer is 5. No, the answer is $1,234.50!", Fraction("1234.5")),
        ("So it is \\boxed{42}. The answer is 41", 42),
        ("first 3, then -18", -18),
        ("**Answer:** .5", Fraction(1, 2)),
        ("The answer is unclear: 8 or 9", 8),
        ("The answer is not known. 3 and 4", 3),
        ("\\boxed{x} and 6", 6),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: object) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("the answer is B", "B"),
        ("Answer: **D**", "D"),
        ("The answer is (A). Wait, the answer is (B).", "B"),
        ("It is \\boxed{\\text{C}} and not (D)", "C"),
        ("The correct answer is option A.", "A"),
        ("(A) is wrong, so I choose (B)", "B"),
        ("B", "B"),
        ("B.", "B"),
        ("C is a letter; a choice is D", "D"),
        ("The answer is (E).", None),
        ("A good question", None),
        ("ABC", None),
        ("", None),
    ],
)
def test_final_choice(text: str, letter: str | None) -> None:
    assert final_choice(text, "ABCD") == letter


def test_boxed() -> None:
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed(r"\fbox{3}") == "3"
    assert boxed(r"\boxed{1") is None
    assert boxed("1") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $x=\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        ("Final Answer: The final answer is $[2,5)$. I hope it is correct.", "[2,5)"),
        (r"The answer is \(x^2\).", "x^2"),
        ("The answer is 3.5. More follows", "3.5"),
        ("**Answer:** 7", "7"),
        ("I do not know", None),
        ("The answer is", None),
    ],
)
def test_final_latex(text: str, answer: str | None) -> None:
    assert final_latex(text) == answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac1{2}", "1/2"),
        (r"\frac{1}2", "0.5"),
        (r"-\frac{2}{3}", "-2/3"),
        (".5", "0.50"),
        ("10,000", "10000"),
        (r"10{,}000", "10000"),
        (r"10,\!000", "10000"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"2\sqrt3", r"2 \sqrt{3}"),
        (r"\left(1, 2\right)", "(1,2)"),
        (r"(\frac12, 3)", "(0.5,3.0)"),
        (r"[2, 5)", r"\left[2,5\right)"),
        (r"x = 5", "5"),
        (r"x \in [1,2]", "[1,2]"),
        (r"5\text{ cm}", "5"),
        (r"5\text{ cm}^2", "5"),
        (r"50\%", "50"),
        (r"\$5", "5"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"\text{even}", "even"),
        (r"\mathrm{A}", "A"),
        ("7.", "7"),
        (r"\(x+1\)", "x + 1"),
        (r"1,\ 2", "1,2"),
        ("3.0", "3"),
        ("+4", "4"),
    ],
)
def test_answers_that_mean_the_same(answer: str, expected: str) -> None:
    assert same_answer(answer, expected)
    assert same_answer(expected, answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1", "2"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "1,2"),
        ("1,2", "12"),
        (r"\sqrt{2}", "2"),
        ("x", "y"),
        (r"\frac{1}{0}", "1"),
        ("", "0"),
        ("-1", "1"),
        (r"x\leftarrow 1", "x1"),
    ],
)
def test_answers_that_differ(answer: str, expected: str) -> None:
    assert not same_answer(answer, expected)
    assert not same_answer(expected, answer)


def test_rows_of_a_matrix_stay_apart() -> None:
    matrix = r"\begin{pmatrix}1\\ 2\end{pmatrix}"
    assert normalise(matrix) == r"\begin{pmatrix}1\\2\end{pmatrix}"
    assert same_answer(matrix, r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
