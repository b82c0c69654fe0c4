"""Reads the operands of instructions: each becomes a function of a block's state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .parse import Immediate, Operand, Register, Symbol
from .state import BlockState
from .values import BITS, SHARED_BASE, TYPES, UnknownInstruction, Values, width_of

Reader = Callable[[BlockState], Values]


def reader(operand: Operand, type_: str) -> Reader:
    """Returns a function that reads an operand as numbers of a type; a wider register is truncated."""
    dtype = TYPES[type_]
    if isinstance(operand, Symbol):
        if operand.name != "global_smem":
            raise UnknownInstruction(f"{operand.name} has no address")
        operand = Immediate(SHARED_BASE)
    if isinstance(operand, Immediate):
        constant = constant_of(operand, type_)
        return lambda block: constant
    if not isinstance(operand, Register):
        raise UnknownInstruction(f"{operand} is no number")
    index, width = operand.index, width_of(type_)
    if operand.predicate:
        return lambda block: block.registers[index]
    if width == operand.width:
        return lambda block: block.registers[index].view(dtype)
    if width > operand.width:
        raise UnknownInstruction(f"a {type_} is read from a register of {operand.width} bytes")
    bits = BITS[width]
    return lambda block: block.registers[index].astype(bits).view(dtype)


def constant_of(operand: Immediate, type_: str) -> Values:
    """Returns a constant as one element, which numpy broadcasts over the threads."""
    if type_ == "pred":
        return np.array([operand.bits != 0])
    width = width_of(type_)
    return np.array([operand.bits % (1 << 8 * width)], dtype=BITS[width]).view(TYPES[type_])
