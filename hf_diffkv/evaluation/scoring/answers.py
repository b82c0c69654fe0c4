"""The final answer in a text that reasons first."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
ANSWER = re.compile(r"answer\s*(?:is|=|:)", re.IGNORECASE)
BOXES = ("\\boxed{", "\\fbox{")


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` of a text holds; None where there is none that ends."""
    start = max(text.rfind(box) for box in BOXES)
    if start < 0:
        return None
    start = text.index("{", start)
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start + 1 : position]
    return None


def behind_answer(text: str) -> str | None:
    """What follows the last `answer is` (or `Answer:`) of a text; None where there is none."""
    found = list(ANSWER.finditer(text))
    return text[found[-1].end() :] if found else None


def final_number(text: str) -> Fraction | None:
    """The number in the last box, else the first one behind the last `answer is`, else the last one of all."""
    for part, place in ((boxed(text), -1), (behind_answer(text), 0), (text, -1)):
        numbers = NUMBER.findall(part or "")
        if numbers:
            return Fraction(re.sub(r"[$,]", "", numbers[place]))
    return None


def final_choice(text: str, letters: str) -> str | None:
    """The letter in the last box, else behind the last `answer is`, else the last in brackets or by itself.

    Args:
        letters: those that may be chosen, for example "ABCD".
    """
    alone = rf"(?<![A-Za-z])([{letters}])(?![A-Za-z])"
    box = boxed(text)
    if box is not None and re.search(alone, re.sub(r"\\\w+", " ", box)):
        return re.search(alone, re.sub(r"\\\w+", " ", box))[1]
    behind = behind_answer(text)
    match = re.match(rf"[\s*_$(\[{{\\a-z]*?{alone}", behind) if behind is not None else None
    if match:
        return match[1]
    # a letter before a word in lower case is an article or a pronoun
    for pattern in (rf"\(([{letters}])\)", rf"^\W*([{letters}])\W*$", rf"{alone}(?! [a-z'])"):
        found = re.findall(pattern, text, re.MULTILINE)
        if found:
            return found[-1]
    return None
