"""Training text for tiny-lm: copying, recall, chained sums and Python source, with a loss weight per character.

A document is a list of pieces `(text, weight)`. Only what can be predicted from the context has weight 1; the random
characters that set up a task have almost none, so that the model is not rewarded for guessing them.
"""

import functools
import random
import string
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

Piece = tuple[str, float]

PREDICTABLE = 1.0
TEXT = 0.5
FILLER = 0.1
SEPARATOR = 0.05
RANDOM = 0.02

SYMBOLS = string.ascii_letters + string.digits + "=+>;@?#|"
HELD_OUT_MODULES = 12


@functools.cache
def library_text(held_out: bool = False) -> str:
    """ASCII source of the Python standard library: the training modules, or the few held out for evaluation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for pattern in ("*.py", "*/*.py") for path in root.glob(pattern))
    names = [name for name in names if not any(part in f"/{name}" for part in ("/site-packages", "/lib2to3", "/test"))]
    random.Random(1).shuffle(names)
    names = names[:HELD_OUT_MODULES] if held_out else names[HELD_OUT_MODULES:]
    sources = (root.joinpath(name).read_text(encoding="utf-8", errors="ignore") for name in names)
    return "".join(sources).encode("ascii", "ignore").decode("ascii")


def excerpt(rng: random.Random, length: int, held_out: bool = False) -> str:
    """Returns `length` consecutive characters of library text."""
    source = library_text(held_out)
    start = rng.randrange(len(source) - length)
    return source[start : start + length]


def filler(rng: random.Random, length: int, held_out: bool = False) -> str:
    """One line of library text that cannot be mistaken for a fact or a question."""
    return excerpt(rng, length, held_out).translate(str.maketrans("\n@?", "   "))


def facts(rng: random.Random, length: int, held_out: bool = False) -> tuple[dict[str, str], list[Piece]]:
    """Lines `@key=dddd` among filler, about half of `length` characters: the pairs, and the pieces stating them."""
    key_length = rng.choice([2, 3])
    count = rng.randint(2, max(3, length // 50))
    pairs: dict[str, str] = {}
    pieces: list[Piece] = []
    written = 0
    while written < 0.55 * length and len(pairs) < count:
        key = "".join(rng.choices(string.ascii_lowercase, k=key_length))
        if key in pairs:
            continue
        pairs[key] = "".join(rng.choices(string.digits, k=4))
        pieces.append((f"@{key}={pairs[key]}\n", RANDOM))
        if rng.random() < 0.4:
            pieces.append((filler(rng, rng.randint(5, max(6, int(0.08 * length))), held_out) + "\n", FILLER))
        written = sum(len(text) for text, _ in pieces)
    return pairs, pieces


def recall(rng: random.Random, length: int) -> list[Piece]:
    """Facts, followed by questions `?key=dddd` about them, up to `length` characters."""
    pairs, pieces = facts(rng, length)
    keys = list(pairs)
    if rng.random() < 0.3:
        pieces.append((filler(rng, rng.randint(1, int(0.3 * length))) + "\n", FILLER))
    written = sum(len(text) for text, _ in pieces)
    while written < length:
        key = rng.choice(keys)
        question = [(f"?{key}=", RANDOM), (pairs[key], PREDICTABLE), ("\n", FILLER)]
        written += sum(len(text) for text, _ in question)
        pieces += question
    return pieces


def recall_prompt(rng: random.Random, length: int) -> tuple[str, str]:
    """A prompt of exactly `length` characters that ends in one question about its facts, and the answer."""
    if length < 64:
        raise ValueError(f"a recall prompt needs at least 64 characters, got {length}")
    pairs, pieces = facts(rng, length, held_out=True)
    key = rng.choice(list(pairs))
    stated = "".join(text for text, _ in pieces)
    question = f"?{key}="
    padding = filler(rng, length - len(stated) - len(question) - 1, held_out=True)
    return f"{stated}{padding}\n{question}", pairs[key]


def chain(rng: random.Random, length: int) -> list[Piece]:
    """`#a3b7|a3+b7>c0;...`: each operand shows the latest value of its letter; the result is the sum modulo 10."""
    names = rng.sample(string.ascii_lowercase, rng.randint(3, 12))
    values = {name: rng.randint(0, 9) for name in names}
    start = "#" + "".join(f"{name}{value}" for name, value in values.items()) + "|"
    pieces: list[Piece] = [(start, RANDOM)]
    for _ in range(max(1, (length - len(start)) // 9)):
        left, right, result = (rng.choice(names) for _ in range(3))
        total = (values[left] + values[right]) % 10
        for sign, name, value in (("", left, values[left]), ("+", right, values[right]), (">", result, total)):
            pieces += [(sign, SEPARATOR), (name, RANDOM), (str(value), PREDICTABLE)]
        pieces.append((";", SEPARATOR))
        values[result] = total
    return [*pieces, ("\n", SEPARATOR)]


def copying(rng: random.Random, length: int) -> list[Piece]:
    """One to four random lines, then the same in random order; a line is identified by its first character."""
    # Repeating them in the same order would teach distances rather than lookup.
    starts = rng.sample(SYMBOLS, rng.randint(1, 4))
    lines = [(start, "".join(rng.choices(SYMBOLS, k=rng.randint(3, 8))) + "\n") for start in starts]
    pieces: list[Piece] = [(start + rest, RANDOM) for start, rest in lines]
    written = sum(len(text) for text, _ in pieces)
    while written < length:
        start, rest = rng.choice(lines)
        pieces += [(start, RANDOM), (rest, PREDICTABLE)]
        written += len(start) + len(rest)
    return pieces


def library(rng: random.Random, length: int) -> list[Piece]:
    """Source text, which is partly predictable."""
    return [(excerpt(rng, length), TEXT)]


Task = Callable[[random.Random, int], list[Piece]]


def row(rng: random.Random, tasks: Mapping[Task, float], length: int) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of `length` characters: documents of tasks drawn by share, one after the other."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < length:
        (task,) = rng.choices(list(tasks), weights=list(tasks.values()))
        for text, weight in task(rng, rng.choice([length // 2, length])):
            ids += text.encode("ascii")
            weights += [weight] * len(text)
    return ids[:length], weights[:length]
