"""Models the speed of the compiled decode loops on a GPU, from their machine code and one multiprocessor.

    python -m tools.kernels.model_decode
    python -m tools.kernels.model_decode --match 'K5V4.*d128-g4' --target sm_80 --markdown

Every variant of `attend_kernel` is compiled ahead of time, and each of its loops over pages runs in `scoreboard.py`,
driven by the control codes of its machine code. A batch of rows of equal length, all at one level, then takes several
waves of programs. Each program makes three dependent reads first, and executes the code before and after the loops.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.kernels import report as kernel_report
from tools.kernels import scoreboard
from tools.kernels.variant import KernelVariant

ROWS, TOKENS = 256, 8192
# the presets, and the precisions used in the papers
DEFAULT = r"^decode_attend-(\w+_unscored|K8V4-K4V2|K8V8)-d128-g4-"


@dataclass(frozen=True)
class Loop:
    """The loop of a decode kernel over the pages of one level.

    Attributes:
        registers: registers of the kernel, per thread.
        spills: number of load and store instructions of the kernel that spill registers.
        shared: bytes of shared memory per program.
        warps: number of warps resident on a multiprocessor.
        depth: number of blocks whose rows fit in shared memory together.
        per_element: instructions per dequantised element.
        port: cycles per block on the shared-memory port, which all warps share.
        cycles: cycles per block with all warps running.
        loop_share: share of the peak memory bandwidth while the loop runs.
        share: share of the peak memory bandwidth over `ROWS` rows of `TOKENS` tokens, including program start-up and
            the idle part of the last wave.
    """

    name: str
    level: str
    registers: int
    spills: int
    shared: int
    warps: int
    depth: int
    per_element: float
    port: int
    cycles: float
    loop_share: float
    share: float


def model(variant: KernelVariant, target: str) -> Iterator[Loop]:
    """The loops of a variant of `attend_kernel`."""
    from hf_diffkv.ops.decode_attention.splits import choose_splits

    compiled = kernel_report.compile_variant(variant, target)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = kernel_report.tool("cuobjdump", "-res-usage", binary)
        code, labels = scoreboard.parse(kernel_report.tool("nvdisasm", "-c", "-hex", binary))
    processor = scoreboard.PROCESSORS[target]
    registers, shared = int(re.search(r"REG:(\d+)", usage)[1]), compiled.metadata.shared
    programs = processor.resident(registers, shared, variant.num_warps)
    block, levels = variant.constexprs["BLOCK"], [("high", variant.constexprs["HIGH"])]
    if not variant.constexprs["ONE_TIER"]:
        levels.append(("low", variant.constexprs["LOW"]))
    loops = scoreboard.inner_loops(code, labels)
    outside = len(code) - sum(map(len, loops))
    start = 3 * processor.latency + outside * programs * variant.num_warps / scoreboard.SCHEDULERS
    bodies = [body for body in loops if any(each.pipe == "matrix" for each in body)]
    for body, (level, tier) in zip(bodies, levels):
        metadata = tier.key_metadata * tier.k_groups + tier.value_metadata * tier.v_groups
        read = block * (tier.key_row + tier.value_row + metadata)
        warps = programs * variant.num_warps
        cycles = scoreboard.cycles_per_round(body, warps, read / variant.num_warps, processor)
        loop_share = programs * read / cycles / processor.peak
        at_once = programs * processor.count
        splits = choose_splits(ROWS, TOKENS, block, at_once)
        blocks, waves = -(-TOKENS // block), -(-ROWS * splits // at_once)
        busy = ROWS * blocks * cycles / (at_once * waves * (-(-blocks // splits) * cycles + start))
        yield Loop(
            name=variant.name,
            level=level,
            registers=registers,
            spills=sum(each.name in ("LDL", "STL") for each in code),
            shared=shared,
            warps=warps,
            depth=scoreboard.buffer_depth(body),
            per_element=32 * variant.num_warps * len(body) / (block * (tier.key_dim + tier.value_dim)),
            port=scoreboard.port_cycles(body),
            cycles=cycles,
            loop_share=loop_share,
            share=loop_share * busy,
        )


HEADER = (
    "kernel",
    "level",
    "registers",
    "warps",
    "shared",
    "buffers",
    "per element",
    "port",
    "cycles",
    "loop",
    "batch",
)


def cells(loop: Loop) -> tuple[str, ...]:
    numbers = (loop.registers, loop.warps, loop.shared, loop.depth)
    shares = (f"{loop.loop_share:.0%}", f"{loop.share:.0%}")
    return (
        loop.name,
        loop.level,
        *map(str, numbers),
        f"{loop.per_element:.2f}",
        f"{loop.port}",
        f"{loop.cycles:.0f}",
        *shares,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default=DEFAULT, help="only variants whose name contains this regular expression")
    parser.add_argument("--target", default="sm_90", choices=sorted(scoreboard.PROCESSORS))
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print one JSON object per loop")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by an interpreter; unset it.")
    chosen = [
        variant
        for variant in kernel_report.collect_variants(["decode_attention"])
        if "attend" in variant.name and options.target in variant.targets and re.search(options.match, variant.name)
    ]
    if not chosen:
        parser.error("no variant fits --match.")
    separator = " | " if options.markdown else "  "
    if not options.json:
        print(separator.join(HEADER))
    for variant in chosen:
        for loop in model(variant, options.target):
            print(json.dumps(asdict(loop)) if options.json else separator.join(cells(loop)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
