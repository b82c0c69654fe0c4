r"""Answers in LaTeX that mean the same: `\dfrac12` is `\frac{1}{2}` is 0.5."""

from __future__ import annotations

import re
from fractions import Fraction

from .answers import behind_answer, boxed

REMOVED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\q?quad|\\(?:displaystyle|limits)(?![a-z])"  # how it is set
    r"|(?<!\\)\\[!,;: ]|\^\{?\\circ\}?|\\degree|\\?%|\\?\$"  # spaces, units without letters
)
STYLES = re.compile(r"\\(?:mathrm|mathbf|mathbb|textbf|textit|boldsymbol|operatorname|text|mbox)\s*\{([^{}]*)\}")
UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")
FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")
DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# one argument of \frac or \sqrt that has no braces
BARE = r"(\d|[a-zA-Z])"


def final_latex(text: str) -> str | None:
    """The final answer: the last box, else what stands behind the last `answer is`, up to the end of the sentence."""
    box = boxed(text)
    if box is not None:
        return box
    behind = behind_answer(text)
    if behind is None:
        return None
    formula = re.match(r"[\s:*]*(?:\$([^$]+)\$|\\\((.+?)\\\))", behind)
    if formula:
        return formula[1] or formula[2]
    sentence = re.split(r"\.(?:\s|$)|\n", behind.strip(), maxsplit=1)[0]
    return sentence.strip(" *") or None


def normalise(answer: str) -> str:
    """One way to write `answer`: no spaces, no units, no styles, plain fractions with all their braces."""
    text = answer.strip().rstrip(".").strip()
    text = re.sub(r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", lambda m: m[1] or m[2], text)
    # commas within numbers, before what stands between them is removed
    text = text.replace("{,}", ",").replace(",\\!", ",")
    text = UNIT.sub("", REMOVED.sub("", text).strip())
    text = STYLES.sub(r"\1", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(rf"\\frac\s*{BARE}\s*{BARE}", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"\\frac\s*{BARE}\s*\{{", r"\\frac{\1}{", text)
    text = re.sub(rf"(\\frac\{{[^{{}}]*\}})\s*{BARE}", r"\1{\2}", text)
    text = re.sub(rf"\\sqrt\s*{BARE}", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"^[a-zA-Z](?:\([a-z]\))?(?:=|\\in(?![a-z]))", "", text)
    if THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)


def same_answer(answer: str, expected: str) -> bool:
    """Whether two answers are written the same after `normalise`, or are equal numbers, part by part."""
    return _same(normalise(answer), normalise(expected))


def _same(mine: str, theirs: str) -> bool:
    if mine == theirs:
        return True
    first, second = _parts(mine), _parts(theirs)
    if len(first) == len(second) > 1:
        return all(_same(a, b) for a, b in zip(first, second))
    return _value(mine) is not None and _value(mine) == _value(theirs)


def _parts(text: str) -> list[str]:
    """What commas outside of inner brackets part; the outer brackets, where there are any, are parts too."""
    ends = [text[:1], text[-1:]] if text[:1] in tuple("([") and text[-1:] in tuple(")]") else []
    parts, depth = [""], 0
    for character in text[1:-1] if ends else text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [*ends[:1], *parts, *ends[1:]] if len(parts) > 1 else parts


def _value(text: str) -> Fraction | None:
    fraction = FRACTION.fullmatch(text)
    if fraction and int(fraction[3]):
        return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] else 1)
    return Fraction(text) if DECIMAL.fullmatch(text) else None
