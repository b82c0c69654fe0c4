"""How many programs of decode attention a device runs at once, and into how many splits rows are therefore cut."""

from __future__ import annotations

import torch

from ...pages import PageLayout
from ..backend import INTERPRETER, device_of

MIN_BLOCKS = 2
MAX_SPLITS = 256
# so that one long row among short ones does not outlast all others
MAX_SPLIT_TOKENS = 2048
# what a program takes beside its blocks, in blocks: three reads one after the other, and the instructions before and
# after its loops
START_BLOCKS = 2
NEARLY = 1.05
# gfx942: four compute units' parts, each with registers for one wave of this kernel
HIP_WAVES = 4
# parts of an NVIDIA multiprocessor, each with registers of its own: a warp's must fit into one of them
REGISTER_FILES = 4
# the interpreter runs one program after the other; so many for tests to have splits
INTERPRETER_PROGRAMS = 20


def choose_splits(rows: int, max_tokens: int, block: int, programs: int) -> int:
    """The fewest splits per row that take nearly least time.

    A wave is what the device runs at once. Where the last one is not full, the device idles for the rest of it.

    Args:
        rows: batch * KV heads.
        max_tokens: of the longest row.
        block: tokens per step.
        programs: that the device runs at once.
    """
    blocks = max(1, -(-max_tokens // block))
    most = min(max(1, -(-blocks // MIN_BLOCKS)), MAX_SPLITS)
    least = min(-(-max_tokens // MAX_SPLIT_TOKENS), most)

    def duration(splits: int) -> int:
        waves = -(-max(rows, 1) * splits // programs)
        return waves * (max(-(-blocks // splits), MIN_BLOCKS) + START_BLOCKS)

    durations = {splits: duration(splits) for splits in range(max(least, 1), most + 1)}
    # what is merged grows with every split
    return min(splits for splits, taken in durations.items() if taken <= NEARLY * min(durations.values()))


def programs_per_processor(
    layout: PageLayout, block: int, num_warps: int, num_stages: int, registers: int, device: torch.device
) -> int:
    """Programs of `attend_kernel` that a multiprocessor has registers and shared memory for.

    Args:
        registers: at most so many per thread.
    """
    backend = backend_of(device)
    if backend == "cpu":
        return INTERPRETER_PROGRAMS
    if backend == "hip":
        return max(1, HIP_WAVES // num_warps)
    limits = device_of(device)
    row = max(tier.key_row + tier.value_row for tier in (layout.high, layout.low))
    # rows that were copied ahead, and 3 KiB of all else, one of them the system's
    shared = max(num_stages - 1, 1) * block * row + 3072
    by_registers = warps_at_once(registers, limits.registers) // num_warps
    return max(1, min(by_registers, limits.shared // shared))


def warps_at_once(registers: int, held: int) -> int:
    """Warps of so many registers per thread that a multiprocessor with `held` of them runs, as CUDA counts them."""
    return REGISTER_FILES * (held // REGISTER_FILES // (-(-registers // 8) * 256))


def backend_of(device: torch.device) -> str:
    """What compiles the kernels: "cuda", "hip", or "cpu" for Triton's interpreter."""
    target = device_of(device).target
    if target == INTERPRETER:
        return "cpu"
    return "cuda" if target.startswith("sm_") else "hip"
