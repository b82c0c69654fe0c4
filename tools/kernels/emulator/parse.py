"""Parses PTX text into instructions with numbered registers."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Register:
    """`width` in bytes; predicates are bool."""

    index: int
    width: int
    predicate: bool = False


@dataclass(frozen=True)
class Immediate:
    """Bits of a constant, negative if it was written with a minus sign."""

    bits: int


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or a variable."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    """{a, b, ...} or a|b; None for a part that is dropped."""

    parts: tuple[Register | Immediate | None, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """One instruction; `guard` is (register, negated), `place` the source line it came from."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str
    place: str


@dataclass
class Program:
    """A kernel.

    Attributes:
        parameters: (name, size in bytes) in order.
        threads: number of threads in a block.
        labels: position of the instruction after each label.
        registers: all registers, by index.
        special: register that stands in for each special register read, by name.
    """

    name: str
    parameters: list[tuple[str, int]]
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    special: dict[str, Register] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Reads a module with a single kernel.

    Raises:
        ValueError: part of the module is not understood.
    """
    header = re.search(r"\.visible \.entry (\w+)\s*\((.*?)\)\s*((?:\.\w+ [^\n]*\n)*)\{", text, re.DOTALL)
    if header is None:
        raise ValueError("the module has no kernel.")
    declared = re.findall(r"\.param \.[ubsf](\d+)[^,\n]*?(\w+)(?=,|\s*$)", header[2], re.M)
    parameters = [(name, int(bits) // 8) for bits, name in declared]
    threads = re.search(r"\.reqntid (\d+)", header[3])
    if threads is None:
        raise ValueError("the kernel does not say how many threads a block has.")
    program = Program(header[1], parameters, int(threads[1]))
    _Body(program).read(_statements(text[header.end() :]))
    return program


def _statements(body: str) -> list[str]:
    """Yields statements, labels with their colon, and scope braces, up to the end of the kernel."""
    lines = []
    for line in body.splitlines():
        line, _, comment = line.partition("//")
        if line.strip().startswith(".loc"):
            line = f".loc {comment.split('@[')[0].strip()};"
        lines.append(line)
    text = "\n".join(lines)
    found, at, depth = [], 0, 1
    token = re.compile(r"\s*(?:([{}])|([$\w]+:)(?!:)|([^;{}]*(?:\{[^;{}]*\}[^;{}]*)*);)")
    while depth:
        match = token.match(text, at)
        if match is None:
            raise ValueError(f"not understood: {text[at : at + 80]!r}")
        at = match.end()
        part = match[1] or match[2] or match[3].strip()
        depth += (part == "{") - (part == "}")
        found.append(" ".join(part.split()))
    return found[:-1]


class _Body:
    """Reads the statements of a kernel; names declared by inline assembly are local to its braces."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, Register]] = [{}]
        self.families: dict[str, str] = {}
        self.place = ""

    def read(self, statements: list[str]) -> None:
        for statement in statements:
            if statement == "{":
                self.scopes.append({})
            elif statement == "}":
                self.scopes.pop()
            elif statement.endswith(":"):
                self.program.labels[statement[:-1]] = len(self.program.instructions)
            elif statement.startswith(".loc"):
                self.place = statement[5:]
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif statement.startswith(".pragma") or not statement:
                continue
            else:
                self.program.instructions.append(self._instruction(statement))

    def _declare(self, statement: str) -> None:
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", statement)
        if match is None:
            raise ValueError(f"not understood: {statement!r}")
        for name in match[2].split(","):
            name = name.strip()
            if family := re.fullmatch(r"(%\w+?)<\d+>", name):
                self.families[family[1]] = match[1]
            else:
                self.scopes[-1][name] = self._new(match[1])

    def _new(self, kind: str) -> Register:
        width = 1 if kind == "pred" else int(re.sub(r"\D", "", kind)) // 8
        register = Register(len(self.program.registers), width, kind == "pred")
        self.program.registers.append(register)
        return register

    def _instruction(self, statement: str) -> Instruction:
        guard = None
        text = statement
        if match := re.match(r"@(!?)([%\w]+)\s+", statement):
            guard = (self._register(match[2]), match[1] == "!")
            statement = statement[match.end() :]
        opcode, _, rest = statement.partition(" ")
        operands = tuple(map(self._operand, _split(rest)))
        return Instruction(opcode, operands, guard, text, self.place)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(None if part == "_" else self._scalar(part) for part in _split(text[1:-1])))
        if "|" in text:
            return Vector(tuple(map(self._scalar, text.split("|"))))
        if text.startswith("["):
            match = re.fullmatch(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
            if match is None:
                raise ValueError(f"not understood: {text!r}")
            return Address(self._scalar(match[1]), int(match[2], 0) if match[2] else 0)
        return self._scalar(text)

    def _scalar(self, text: str) -> Register | Immediate | Symbol:
        if re.match(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"\d+\.\d+", text):
            return Immediate(struct.unpack("<I", struct.pack("<f", float(text)))[0])
        if re.match(r"-?\d", text):
            return Immediate(int(text.rstrip("U"), 0))
        return self._register(text) if self._is_register(text) else Symbol(text)

    def _is_register(self, name: str) -> bool:
        return name.startswith("%") or any(name in scope for scope in self.scopes)

    def _register(self, name: str) -> Register:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        family = re.match(r"(%[a-z]+)\d+$", name)
        if family and family[1] in self.families:
            register = self.scopes[0][name] = self._new(self.families[family[1]])
            return register
        if name not in self.program.special:
            self.program.special[name] = self._new("b32")
        return self.program.special[name]


def _split(text: str) -> list[str]:
    """Operands, split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
