"""Makes a program executable: each instruction becomes a function of a block's state, a step."""

from __future__ import annotations

import numpy as np

from .arithmetic import operation
from .exchange import exchange
from .operands import reader
from .parse import Immediate, Instruction, Program, Vector
from .state import BlockState, Step
from .transfers import transfer
from .values import BITS, TYPES, UnknownInstruction, Values, width_of
from .warpgroup import warpgroup

CONTROL = ("bra", "ret", "bar.sync")


class Code:
    """A program made executable.

    Attributes:
        runs: number of times each instruction was reached.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.runs = np.zeros(len(program.instructions), np.int64)
        self.steps = [self._explained(instruction) for instruction in program.instructions]

    def _explained(self, instruction: Instruction) -> Step | None:
        try:
            return _step(instruction)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{instruction.text} ({instruction.place}): {error}") from error


def is_control(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(CONTROL)


def _step(instruction: Instruction) -> Step | None:
    """Returns the step of an instruction, or None for control flow, which `Block` executes."""
    if is_control(instruction):
        return None
    kinds = (_special, transfer, exchange, warpgroup, _arithmetic)
    step = next(step for kind in kinds if (step := kind(instruction)) is not None)
    if instruction.guard is None:
        return step
    register, negated = instruction.guard

    def guarded(block: BlockState, mask: Values | None) -> None:
        chosen = block.registers[register.index] ^ negated
        chosen = chosen if mask is None else chosen & mask
        if chosen.all():
            step(block, None)
        elif chosen.any():
            step(block, chosen)

    return guarded


def _special(instruction: Instruction) -> Step | None:
    """Barriers of a warp, and moves that pack or unpack registers."""
    if instruction.opcode == "bar.warp.sync":
        if instruction.operands != (Immediate(-1),):
            raise UnknownInstruction(instruction.text)
        return lambda block, mask: block.shared.barrier(block.whole_warps(mask))
    if not instruction.opcode.startswith("mov."):
        return None
    target, source = instruction.operands
    if isinstance(source, Vector):
        width = width_of(instruction.opcode[4:]) // len(source.parts)
        readers = [reader(part, f"b{8 * width}") for part in source.parts]

        def pack(block: BlockState, mask: Values | None) -> None:
            parts = np.stack([block.spread(read(block)) for read in readers], 1)
            block.write(target, parts.view(BITS[width * len(readers)])[:, 0], mask)

        return pack
    if isinstance(target, Vector):
        width = width_of(instruction.opcode[4:]) // len(target.parts)
        whole = reader(source, instruction.opcode[4:])

        def unpack(block: BlockState, mask: Values | None) -> None:
            parts = block.spread(whole(block)).copy().view(BITS[width])
            for register, values in zip(target.parts, parts.reshape(-1, len(target.parts)).T):
                if register is not None:
                    block.write(register, np.ascontiguousarray(values), mask)

        return unpack
    return None


def _arithmetic(instruction: Instruction) -> Step:
    found = operation(instruction.opcode)
    if found is None:
        raise UnknownInstruction(instruction.opcode)
    target, *sources = instruction.operands
    if len(sources) != len(found.sources):
        raise UnknownInstruction(instruction.text)
    readers = [reader(source, type_) for source, type_ in zip(sources, found.sources)]
    signed = found.result[0] == "s"
    compute, dtype = found.compute, np.dtype(TYPES[found.result])

    def run(block: BlockState, mask: Values | None) -> None:
        values = compute(*[read(block) for read in readers])
        if values.dtype != dtype and found.result != "pred":
            raise TypeError(f"{instruction.opcode} gives {values.dtype}")
        if isinstance(target, Vector):
            # one predicate for each half
            for register, part in zip(target.parts, values.T):
                block.write(register, np.ascontiguousarray(part), mask)
        else:
            block.write(target, values, mask, signed)

    return run
