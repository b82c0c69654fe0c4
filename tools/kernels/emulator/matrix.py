"""`mma.sync` and `ldmatrix`: which thread of a warp holds which element, from the PTX ISA."""

from __future__ import annotations

import numpy as np

from .values import UnknownInstruction, Values, bf16_to_f32

LANE = np.arange(32)
GROUP, PLACE = LANE // 4, LANE % 4


def mma(opcode: str, a: Values, b: Values, c: Values) -> Values:
    """D = A B + C of m16n8k16, for all warps at once.

    Args:
        a, b: uint32 [4 or 2, warps, 32], two 16-bit floats each. c: float32 [4, warps, 32].

    Returns:
        float32 [4, warps, 32]. Products are summed in float64 and rounded once, at least as accurately as hardware.
    """
    shape, types = opcode.split(".")[3], opcode.split(".")[6:]
    if (
        shape != "m16n8k16"
        or opcode.split(".")[4:6] != ["row", "col"]
        or types
        not in (
            ["f32", "f16", "f16", "f32"],
            ["f32", "bf16", "bf16", "f32"],
        )
    ):
        raise UnknownInstruction(opcode)
    warps = a.shape[1]
    left, right, sums = np.empty((warps, 16, 16)), np.empty((warps, 16, 8)), np.empty((warps, 16, 8))
    for register in range(4):
        row, column = GROUP + 8 * (register % 2), 2 * PLACE + 8 * (register // 2)
        for half, part in enumerate(numbers(a[register], types[1])):
            left[:, row, column + half] = part
    for register in range(2):
        row = 2 * PLACE + 8 * register
        for half, part in enumerate(numbers(b[register], types[2])):
            right[:, row + half, GROUP] = part
    for register in range(4):
        sums[:, GROUP + 8 * (register // 2), 2 * PLACE + register % 2] = c[register]
    sums = (left @ right + sums).astype(np.float32)
    return np.stack([sums[:, GROUP + 8 * (register // 2), 2 * PLACE + register % 2] for register in range(4)])


def numbers(words: Values, type_: str) -> tuple[Values, Values]:
    """Returns the lower and upper half of each word as numbers."""
    pair = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    numbers = pair.view(np.float16) if type_ == "f16" else bf16_to_f32(pair)
    return numbers[..., 0], numbers[..., 1]


def collect(words: Values, transposed: bool) -> Values:
    """Reverses `distribute`, for `stmatrix`."""
    pairs = np.ascontiguousarray(words).view(np.uint16)
    rows = pairs.reshape(*words.shape[:2], 8, 8).swapaxes(0, 1)
    return rows.swapaxes(2, 3) if transposed else rows


def distribute(rows: Values, transposed: bool) -> Values:
    """Distributes 8x8 matrices over the threads of a warp, as `ldmatrix` does.

    Args:
        rows: uint16 [warps, matrices, 8, 8].

    Returns:
        uint32 [matrices, warps, 32]: elements 2 (lane % 4) and the next of row lane / 4, or of column lane / 4 if
        transposed.
    """
    if transposed:
        rows = rows.swapaxes(2, 3)
    pairs = np.ascontiguousarray(rows.swapaxes(0, 1)).view(np.uint32)
    return pairs.reshape(*pairs.shape[:2], 32)
