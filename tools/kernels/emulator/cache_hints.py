"""Cache hints: they change no result, but the policy that an access names must have been created before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .operands import reader
from .parse import Immediate, Instruction
from .state import BlockState, Step
from .values import PtxError, UnknownInstruction, Values

HINT = ".L2::cache_hint"
# the only one supported: evict everything that is accessed first
POLICY = "createpolicy.fractional.L2::evict_first.b64"
ALL = Immediate(0x3F800000)
MADE = np.uint64(0x12F0_0000_0000_0001)


def without_hint(instruction: Instruction) -> Instruction:
    """Returns the access with its hint removed."""
    if HINT not in instruction.opcode:
        return instruction
    opcode = instruction.opcode.replace(HINT, "").replace(".L1::evict_first", "")
    return replace(instruction, opcode=opcode, operands=instruction.operands[:-1])


def with_checked_hint(instruction: Instruction, access: Step) -> Step:
    """Returns `access`, preceded by a check of the policy that `instruction` names."""
    if HINT not in instruction.opcode:
        return access
    policy = reader(instruction.operands[-1], "b64")

    def run(block: BlockState, mask: Values | None) -> None:
        if (block.spread(policy(block))[block.lanes(mask)] != MADE).any():
            raise PtxError(f"a cache hint that no createpolicy has made: {instruction.text}")
        access(block, mask)

    return run


def create_policy(instruction: Instruction) -> Step:
    target, fraction = instruction.operands
    if instruction.opcode != POLICY or fraction != ALL:
        raise UnknownInstruction(instruction.text)
    return lambda block, mask: block.write(target, MADE, mask)
