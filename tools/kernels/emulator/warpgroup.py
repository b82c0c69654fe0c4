"""`wgmma`: matrix products by four warps that read shared memory themselves, from the PTX ISA.

Until its group is waited for, the result of a product may only be moved to another register, and the shared memory that
the product reads must not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .matrix import GROUP, PLACE, numbers
from .operands import Reader, reader
from .parse import Immediate, Instruction, Vector
from .state import BlockState, Step
from .values import SHARED_BASE, PtxError, UnknownInstruction, Values

# bytes per row of the swizzled pattern, by the two highest bits of a descriptor
SWIZZLES = {1: 128, 2: 64, 3: 32}


def warpgroup(instruction: Instruction) -> Step | None:
    """Returns the step of an instruction, or None for other kinds."""
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


def _all_together(act: Callable[[BlockState], None]) -> Step:
    def step(block: BlockState, mask: Values | None) -> None:
        if mask is not None:
            raise UnknownInstruction("wgmma where the block has branched apart")
        act(block)

    return step


def _product(instruction: Instruction) -> Step:
    """D = A B, or A B + D if a predicate says so; A from registers or shared memory, B from shared memory."""
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

    def multiply(block: BlockState) -> None:
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
    block: BlockState, descriptor: Reader, threads: slice, count: int, transposed: bool, type_: str
) -> tuple[Values, Values]:
    """[count, 16] numbers of a matrix in shared memory, the second dimension summed over, and their offsets."""
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

    Each pattern holds eight rows of `width` bytes. If not transposed, a row lies along the dimension that is summed
    over and patterns follow each other along the other one; if transposed, it is the reverse. Bits 4 to 6 of an address
    are then changed by bits 7 and up.
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
