"""Instructions that the threads of a warp execute together: shuffles, reductions and matrix products."""

from __future__ import annotations

import numpy as np

from . import matrix
from .operands import reader
from .parse import Immediate, Instruction, Operand
from .state import BlockState, Step
from .values import TYPES, PtxError, UnknownInstruction, Values

LANE = np.arange(32)


def exchange(instruction: Instruction) -> Step | None:
    """Returns the step of an instruction, or None for other kinds."""
    name, *modifiers = instruction.opcode.split(".")
    if name == "shfl":
        return _shuffle(instruction, modifiers)
    if name == "redux":
        return _reduce(instruction, modifiers)
    if name == "mma":
        return _mma(instruction)
    return None


def _everyone(operand: Operand, block: BlockState, mask: Values | None) -> None:
    """Checks that all threads of the warps take part, and that the member mask names them all."""
    block.whole_warps(mask)
    if np.any(reader(operand, "u32")(block) != 0xFFFFFFFF):
        raise PtxError("the member mask leaves threads out")


def source_lane(mode: str, argument: Values, control: Values) -> Values:
    """Returns the lane that each lane reads in `shfl.sync`; arguments [..., 32]."""
    clamp, segment = control & 31, (control >> 8) & 31
    first = LANE & segment
    last = first | (clamp & ~segment & 31)
    if mode == "up":
        lane = LANE - argument
        return np.where(lane >= last, lane, LANE)
    if mode == "bfly":
        lane = LANE ^ argument
    elif mode == "down":
        lane = LANE + argument
    else:
        lane = first | (argument & ~segment & 31)
    return np.where(lane <= last, lane, LANE)


def _shuffle(instruction: Instruction, modifiers: list[str]) -> Step:
    sync, mode, type_ = modifiers
    if sync != "sync" or mode not in ("bfly", "up", "down", "idx") or type_ != "b32":
        raise UnknownInstruction(instruction.opcode)
    target, source, argument, control, members = instruction.operands
    values, lanes, limits = reader(source, "u32"), reader(argument, "s32"), reader(control, "s32")

    def shuffle(block: BlockState, mask: Values | None) -> None:
        _everyone(members, block, mask)
        shape = (block.threads.size // 32, 32)

        def warps(numbers: Values) -> Values:
            return block.spread(numbers).reshape(shape)

        picked = source_lane(mode, warps(lanes(block)).astype(np.int64), warps(limits(block)).astype(np.int64))
        block.write(target, np.take_along_axis(warps(values(block)), picked, 1).ravel(), mask)

    return shuffle


REDUCE = {"add": np.sum, "max": np.max, "min": np.min}


def _reduce(instruction: Instruction, modifiers: list[str]) -> Step:
    sync, name, type_ = modifiers
    if sync != "sync" or name not in REDUCE or type_ not in ("s32", "u32"):
        raise UnknownInstruction(instruction.opcode)
    target, source, members = instruction.operands
    values = reader(source, type_)

    def reduce(block: BlockState, mask: Values | None) -> None:
        _everyone(members, block, mask)
        rows = block.spread(values(block)).reshape(-1, 32)
        found = REDUCE[name](rows.astype(np.int64), axis=1).astype(TYPES[type_])
        block.write(target, np.repeat(found, 32), mask)

    return reduce


def _mma(instruction: Instruction) -> Step:
    target, *sources = (operand.parts for operand in instruction.operands)
    if any(isinstance(part, Immediate) for part in target):
        raise UnknownInstruction(instruction.text)
    left, right, sums = sources
    readers = [
        [reader(part, type_) for part in parts] for parts, type_ in ((left, "b32"), (right, "b32"), (sums, "f32"))
    ]

    def multiply(block: BlockState, mask: Values | None) -> None:
        block.whole_warps(mask)
        a, b, c = (np.stack([block.spread(read(block)).reshape(-1, 32) for read in parts]) for parts in readers)
        for register, values in zip(target, matrix.mma(instruction.opcode, a, b, c)):
            block.write(register, np.ascontiguousarray(values).ravel(), mask)

    return multiply
