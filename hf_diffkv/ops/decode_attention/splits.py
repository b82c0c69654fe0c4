"""Number of decode attention programs that a device runs at once, and the resulting number of splits per row."""

from __future__ import annotations

import torch

from ...pages import PageLayout
from ..backend import INTERPRETER, device_of

MIN_BLOCKS = 2
MAX_SPLITS = 256
# keeps one long row among short ones from outlasting all others
MAX_SPLIT_TOKENS = 2048
# times in blocks of 32 tokens, on an H200 with one request of 8,192 tokens (docs/notes/kernels.md): of a program
# besides its blocks, for dependent reads and the instructions around its loops, and of merging so many splits
START_BLOCKS = 10
MERGED, MERGE_BLOCKS = 64, 3
NEARLY = 1.05
# gfx942: a compute unit has four parts, each with registers for one wave of this kernel
HIP_WAVES = 4
# an NVIDIA multiprocessor has four register files; a warp's registers must fit into one of them
REGISTER_FILES = 4
# the interpreter runs programs one by one; this number makes tests use splits
INTERPRETER_PROGRAMS = 20


def choose_splits(rows: int, max_tokens: int, block: int, programs: int) -> int:
    """Returns the smallest number of splits per row that takes nearly the least time.

    A wave is the set of programs that the device runs at once. The device is partly idle in a last wave that is not
    full.

    Args:
        rows: batch size times number of KV heads.
        max_tokens: tokens of the longest row.
        block: tokens per step.
        programs: number of programs that the device runs at once.
    """
    blocks = max(1, -(-max_tokens // block))
    most = min(max(1, -(-blocks // MIN_BLOCKS)), MAX_SPLITS)
    least = min(-(-max_tokens // MAX_SPLIT_TOKENS), most)

    def duration(splits: int) -> int:
        waves = -(-max(rows, 1) * splits // programs)
        return waves * (max(-(-blocks // splits), MIN_BLOCKS) + START_BLOCKS) + MERGE_BLOCKS * -(-splits // MERGED)

    durations = {splits: duration(splits) for splits in range(max(least, 1), most + 1)}
    return min(splits for splits, taken in durations.items() if taken <= NEARLY * min(durations.values()))


def programs_per_processor(
    layout: PageLayout, block: int, num_warps: int, num_stages: int, registers: int, device: torch.device
) -> int:
    """Returns the number of `attend_kernel` programs that fit a multiprocessor's registers and shared memory.

    Args:
        layout: layout of the pages.
        block: tokens per step.
        num_warps: warps per program.
        num_stages: stages of software pipelining.
        registers: upper bound on the registers per thread.
        device: device of the tensors.
    """
    backend = backend_of(device)
    if backend == "cpu":
        return INTERPRETER_PROGRAMS
    if backend == "hip":
        return max(1, HIP_WAVES // num_warps)
    limits = device_of(device)
    row = max(tier.key_row + tier.value_row for tier in (layout.high, layout.low))
    # prefetched rows, and 3 KiB for everything else, including 1 KiB for the system
    shared = max(num_stages - 1, 1) * block * row + 3072
    by_registers = warps_at_once(registers, limits.registers) // num_warps
    return max(1, min(by_registers, limits.shared // shared))


def warps_at_once(registers: int, held: int) -> int:
    """Returns how many warps fit a multiprocessor, as CUDA counts them.

    Args:
        registers: registers per thread.
        held: registers of the multiprocessor.
    """
    return REGISTER_FILES * (held // REGISTER_FILES // (-(-registers // 8) * 256))


def backend_of(device: torch.device) -> str:
    """Returns the compiler backend of the kernels: "cuda", "hip", or "cpu" for Triton's interpreter."""
    target = device_of(device).target
    if target == INTERPRETER:
        return "cpu"
    return "cuda" if target.startswith("sm_") else "hip"
