"""Number of splits per row in decode attention, and what a device runs at once."""

from __future__ import annotations

import torch

from ..backend import INTERPRETER, device_of

MIN_BLOCKS = 2
MAX_SPLITS = 256
# keeps one long row among short ones from outlasting all others
MAX_SPLIT_TOKENS = 2048
# times in units of a 32-token block, on an H200 with one request of 8,192 tokens (docs/notes/kernels.md): a program's
# overhead besides its blocks, for dependent reads and instructions around its loops, and merging of MERGED splits
START_BLOCKS = 10
MERGED, MERGE_BLOCKS = 64, 3
NEARLY = 1.05
# an NVIDIA multiprocessor has four register files; a warp's registers must fit into one of them
REGISTER_FILES = 4


def choose_splits(rows: int, max_tokens: int, block: int, programs: int) -> int:
    """Returns the smallest number of splits per row that takes nearly the least time.

    A wave is the set of programs that the device runs at once. If the last wave is not full, the device is partly
    idle.

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


def warps_at_once(registers: int, held: int) -> int:
    """Returns how many warps fit on a multiprocessor, as CUDA counts them.

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
