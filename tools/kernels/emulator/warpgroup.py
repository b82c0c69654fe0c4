"""`wgmma`: matrix products of four warps that read shared memory themselves, from the PTX ISA.

Until its group is waited for nobody may use the result of a product, except by moving it to another register, or
change what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .matrix import GROUP, PLACE, numbers
from .parse import Address, Immediate, Instruction, Register, Vector
from .values import SHARED_BASE, PtxError, Reader, UnknownInstruction, Values, reader

if TYPE_CHECKING:
    from .block import Block, Step
    from .shared_memory import SharedMemory

# bytes of a row of the swizzled pattern, by the two highest bits of a descriptor
SWIZZLES = {1: 128, 2: 64, 3: 32}


def warpgroup(instruction: Instruction) -> Step | None:
    """What executes an instruction; None where it is of another kind."""
    opcode = instruction.opcode
    if opcode.startswith("fence.proxy.async"):
        return lambda block, mask: block.shared.fence()
    if not opcode.startswith("wgmma."):
        return None
    if opcode == "wgmma.fence.sync.aligned":
        return _all_together(lambda block: None)
    if opcode == "wgmma.commit_group.sync.aligned":
        return _all_together(lambda block: block.products.commit())
    if opcode == "wgmma.wait_group.sync.aligned":
        (pending,) = instruction.operands
        return _all_together(lambda block: block.products.wait(pending.bits, block.shared))
    return _product(instruction)


class Products:
    """What products of one block are under way, by groups that are numbered as they are committed.

    Attributes:
        registers: group of every register that holds a result which is not there yet.
    """

    def __init__(self) -> None:
        self.registers: dict[int, int] = {}
        self._open = 0
        self._reading: list[tuple[int, Values]] = []

    def begin(self, results: Iterable[Register], offsets: Iterable[Values], shared: SharedMemory) -> None:
        self.registers |= {register.index: self._open for register in results}
        for at in offsets:
            self._reading.append((self._open, at))
            shared.hold(at)

    def commit(self) -> None:
        self._open += 1

    def wait(self, pending: int, shared: SharedMemory) -> None:
        """Ends all groups but the newest `pending`."""
        done = self._open - pending
        self.registers = {index: group for index, group in self.registers.items() if group >= done}
        self._reading = [(group, at) for group, at in self._reading if group >= done]
        shared.release()
        for _, at in self._reading:
            shared.hold(at)

    def check(self, instruction: Instruction) -> None:
        """Before an instruction: it must not read a result that is not there; what it moves is not there either.

        Raises:
            PtxError: it does.
        """
        early = [self.registers[index] for index in sources(instruction) if index in self.registers]
        if instruction.opcode.startswith("mov."):
            target = instruction.operands[0]
            for register in target.parts if isinstance(target, Vector) else (target,):
                self.registers.pop(register.index, None)
                if early:
                    self.registers[register.index] = max(early)
        elif early and not instruction.opcode.startswith("wgmma.mma_async"):
            raise PtxError("the result of a matrix product is read before it was waited for")


@cache
def sources(instruction: Instruction) -> tuple[int, ...]:
    """Registers that an instruction reads."""
    found: list[int] = [] if instruction.guard is None else [instruction.guard[0].index]
    first = 0 if instruction.opcode.startswith(("st", "cp", "bra")) else 1
    for position, operand in enumerate(instruction.operands):
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        for part in parts:
            if isinstance(part, Address):
                found += [part.base.index] if isinstance(part.base, Register) else []
            elif isinstance(part, Register) and position >= first:
                found.append(part.index)
    return tuple(found)


def _all_together(act: Callable[[Block], None]) -> Step:
    def step(block: Block, mask: Values | None) -> None:
        if mask is not None:
            raise UnknownInstruction("wgmma where the block has branched apart")
        act(block)

    return step


def _product(instruction: Instruction) -> Step:
    """D = A B, or A B + D where a predicate says so; A from registers or shared memory, B from shared memory."""
    shape = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2", instruction.opcode)
    if shape is None:
        raise UnknownInstruction(instruction.opcode)
    columns, type_ = int(shape[1]), shape[2]
    target, left, right, add, scale_a, scale_b, *transposed = instruction.operands
    if (scale_a, scale_b) != (Immediate(1), Immediate(1)) or len(target.parts) != columns // 2:
        raise UnknownInstruction(instruction.text)
    in_registers = isinstance(left, Vector)
    *left_transposed, right_transposed = (flag == Immediate(1) for flag in transposed)
    accumulate = reader(add, "pred")
    sums = [reader(part, "f32") for part in target.parts]
    descriptor = reader(right, "u64")
    left_readers = [reader(part, "b32") for part in left.parts] if in_registers else [reader(left, "u64")]

    def multiply(block: Block) -> None:
        wanted = block.spread(accumulate(block))
        if wanted.any() != wanted.all():
            raise PtxError("threads disagree on whether a matrix product adds")
        result = np.zeros((len(sums), block.threads.size), np.float32)
        if wanted[0]:
            result[:] = np.stack([block.spread(read(block)) for read in sums])
        read_offsets = []
        for first in range(0, block.threads.size, 128):
            threads = slice(first, first + 128)
            b, offsets = _from_shared(block, descriptor, threads, columns, right_transposed, type_)
            read_offsets.append(offsets)
            if in_registers:
                words = np.stack([block.spread(read(block))[threads] for read in left_readers])
                a = _rows(words.reshape(4, 4, 32), type_)
            else:
                a, offsets = _from_shared(block, left_readers[0], threads, 64, left_transposed[0], type_)
                read_offsets.append(offsets)
            product = a.astype(np.float64) @ b.T.astype(np.float64)
            for index in range(len(sums)):
                row = 16 * np.arange(4)[:, None] + GROUP + 8 * (index // 2 % 2)
                column = 8 * (index // 4) + 2 * PLACE + index % 2
                result[index, threads] = (result[index, threads] + product[row, column].ravel()).astype(np.float32)
        for register, values in zip(target.parts, result):
            block.write(register, values, None)
        block.products.begin(target.parts, read_offsets, block.shared)

    return _all_together(multiply)


def _rows(words: Values, type_: str) -> Values:
    """A [64, 16] from the four registers of four warps, uint32 [4, 4, 32]."""
    rows = np.empty((4, 16, 16))
    for register in range(4):
        row, column = GROUP + 8 * (register % 2), 2 * PLACE + 8 * (register // 2)
        for half, part in enumerate(numbers(words[register], type_)):
            rows[:, row, column + half] = part
    return rows.reshape(64, 16)


def _from_shared(
    block: Block, descriptor: Reader, threads: slice, count: int, transposed: bool, type_: str
) -> tuple[Values, Values]:
    """[count, 16] numbers of a matrix in shared memory, the second dimension the one that is summed over; offsets."""
    given = block.spread(descriptor(block))[threads]
    if np.any(given != given[0]):
        raise PtxError("threads of a warp group disagree on a matrix descriptor")
    offsets = element_offsets(int(given[0]), count, transposed) - SHARED_BASE
    if offsets.min() < 0 or offsets.max() + 2 > block.shared.size:
        raise PtxError("a matrix descriptor points outside shared memory")
    pairs = block.shared.load_fenced(threads.start, offsets)
    low, _ = numbers(pairs.astype(np.uint32), type_)
    return low, offsets


def element_offsets(descriptor: int, count: int, transposed: bool) -> Values:
    """Shared addresses of the elements [count, 16] (16-bit numbers) of a swizzled matrix.

    Rows of `width` bytes stand eight to a pattern. Not transposed, such a row lies along the dimension that is summed
    over and patterns follow each other along the other one; transposed, it is the reverse. Bits 4 to 6 of an address
    are then changed by those from 7 on.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    mode, base = descriptor >> 62, descriptor >> 49 & 7
    if mode not in SWIZZLES or base:
        raise UnknownInstruction(f"matrix descriptor {descriptor:#x}")
    width = SWIZZLES[mode]
    row, depth = np.arange(count)[:, None], np.arange(16)[None, :]
    if transposed:
        along, across = divmod(row, width // 2), divmod(depth, 8)
        offset = along[1] * 2 + along[0] * leading + across[1] * width + across[0] * stride
    else:
        offset = row % 8 * width + row // 8 * stride + depth * 2
    address = start + offset
    return address ^ (address >> 7 & (width // 16 - 1)) << 4
