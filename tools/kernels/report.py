"""Compiles every kernel ahead of time, without a GPU, and reports what each needs: `python -m tools.kernels.report`.

Registers, stack and spills are read from Triton's own binary, since a second assembler run would use other options. The
exit code is 1 if a kernel does not compile, spills registers or needs more shared memory than its target has.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from tools.kernels.variant import TARGETS, KernelVariant

# one variant of every kernel at the shipped block sizes: head_dim 128, four query heads per KV head, or 20 of latents
QUICK = (
    r"^(decode_\w+-\w+(-K\dV\d)?-d128-g4-|decode_latent-K8V8-latents-h20-|(flash_forward|column_scores)-bf16-d128-padding-(sm_|gfx)"
    r"|past_(forward|scores)-K8V4-K4V2-bf16-d128-padding-(sm_|gfx)"
    r"|(store|load|copy)_tokens-K(8V4|4V2)-g11-d128|(find_victims|plan_rows|assign_pages|move_tokens)-K8V4-K4V2-d128|append-d128"
    r"|(moment|feedback|round_keys-K5V4)-d128|(store_new|leave_window|choose_codes)-K5V4_unscored-d128"
    r"|(sum_keys|fix_offsets|rotate)-K8V4_unscored-d128|(take_pages|advance)-K8V4_unscored-d64"
    r"|(decide|count|list|demote|close|level_window|level_new|advance)-K8V4-K4V2-d128)"
)
# bytes of shared memory available to a program: sm_80 code also runs on sm_86 and sm_89, which have the least
SHARED_LIMITS = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
OPS = tuple(sorted(path.stem for path in (Path(__file__).parent / "variants").glob("*.py")))
# triton's default; set explicitly because newer versions warn if it is left open
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@dataclass(frozen=True)
class KernelResources:
    """Resources of one compiled kernel.

    Attributes:
        registers: per thread (AMD: vector registers).
        spills: bytes of spill loads and stores in the code (AMD: spilled vector registers).
        stack, shared: bytes per thread and per program.
        instructions: number of instructions of the whole kernel; 0 on AMD.
        per_element: instructions per dequantised element in the loop of the high tier and, if there is one, the low
            tier; empty on AMD and for kernels that do not dequantise in a loop.
        error: reason why it did not compile; empty if it did.
    """

    name: str
    target: str
    registers: int = 0
    spills: int = 0
    stack: int = 0
    shared: int = 0
    instructions: int = 0
    per_element: tuple[float, ...] = ()
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.spills > 0 or self.shared > SHARED_LIMITS.get(self.target, self.shared)


def collect_variants(ops: Iterable[str] = OPS) -> list[KernelVariant]:
    """Returns every kernel variant that the given ops ship."""
    found: list[KernelVariant] = []
    for op in ops:
        found += importlib.import_module(f"{__package__}.variants.{op}").variants()
    return found


def compile_variant(variant: KernelVariant, target: str) -> Any:
    """Triton's compiled kernel (`asm`, `metadata`) of `variant` for `target`, such as `sm_90` or `gfx942`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constexprs else variant.signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in variant.constexprs.items()}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, parameter in enumerate(variant.kernel.params)
        if re.match(r"\*|i\d", signature[parameter.name]) and not parameter.do_not_specialize
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    return triton.compile(source, target=gpu, options=options)


def measure(variant: KernelVariant, target: str) -> KernelResources:
    """Compiles a variant and reads its resources; a compile error is returned, not raised."""
    try:
        compiled = compile_variant(variant, target)
        found = _nvidia(compiled, variant) if target.startswith("sm_") else _amd(compiled)
    except Exception as error:  # any stage of the compiler may fail, each with its own exception type
        lines = str(error).strip().splitlines() or [""]
        return KernelResources(variant.name, target, error=f"{type(error).__name__}: {lines[-1]}")
    return KernelResources(variant.name, target, shared=compiled.metadata.shared, **found)


def _nvidia(compiled: Any, variant: KernelVariant) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = tool("cuobjdump", "-res-usage", binary)
        code = disassembly(tool("nvdisasm", "-c", binary))
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if numbers is None:
        raise RuntimeError("cuobjdump did not report the registers")
    spills = sum(_access_bytes(op) for _, op, _ in code if re.match(r"(STL|LDL)\b", op))
    return {
        "registers": int(numbers[1]),
        "stack": int(numbers[2]),
        "spills": spills,
        "instructions": len(code),
        "per_element": _per_element(code, variant),
    }


def _amd(compiled: Any) -> dict[str, Any]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", compiled.asm["amdgcn"])
        if found is None:
            raise RuntimeError(f"the AMD metadata has no .{key}")
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count"),
        "stack": number("private_segment_fixed_size"),
    }


def tool(name: str, *arguments: object) -> str:
    """Output of a tool that comes with Triton.

    Raises:
        FileNotFoundError: this build of Triton has no such tool.
    """
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def _access_bytes(op: str) -> int:
    return 16 if ".128" in op else 8 if ".64" in op else 4


def disassembly(text: str) -> list[tuple[int, str, int | None]]:
    """Address, opcode and, for branches to a label, target address of every instruction of `nvdisasm -c`."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: list[tuple[int, str, str | None]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            waiting.append(label[1])
        elif code := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            address = int(code[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting = []
            jump = re.search(r"`\((\.L_\w+)\)", code[3]) if code[2].startswith("BRA") else None
            found.append((address, code[2], jump[1] if jump else None))
    return [(address, op, labels.get(label) if label else None) for address, op, label in found]


def _per_element(code: Sequence[tuple[int, str, int | None]], variant: KernelVariant) -> tuple[float, ...]:
    """Instructions per key and value element in the high and low tier's loops of a decode kernel.

    These are its first two innermost loops with matrix instructions; one iteration handles BLOCK tokens of a tier.
    """
    constants = variant.constexprs
    if not {"HIGH", "LOW", "BLOCK", "MODE"} <= set(constants):
        return ()
    loops = [(target, address) for address, _, target in code if target is not None and target < address]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [[op for address, op, _ in code if first <= address <= last] for first, last in sorted(inner)]
    bodies = [body for body in bodies if any(re.match(r"[HIQ]G?MMA\b", op) for op in body)]
    found = []
    tiers = [constants["HIGH"]] + [constants["LOW"]] * (not constants["ONE_TIER"])
    for body, tier in zip(bodies, tiers):
        elements = constants["BLOCK"] * (tier.key_dim + tier.value_dim)
        found.append(round(32 * variant.num_warps * len(body) / elements, 3))
    return tuple(found)


def measure_all(jobs: Sequence[tuple[str, str]], processes: int) -> Iterator[KernelResources]:
    """Resources of (variant name, target) pairs, in order; variants with identical code are compiled once."""
    variants = _variants_by_name()
    keys = [_identity(variants[name], target) for name, target in jobs]
    first: dict[str, tuple[str, str]] = {}
    for key, job in zip(keys, jobs):
        first.setdefault(key, job)
    found: dict[str, KernelResources] = {}
    with ExitStack() as running:
        measured: Iterator[KernelResources] = map(_measure_named, first.values())
        if processes > 1:
            # fresh processes, because a compiler forked midway may hang
            pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
            measured = running.enter_context(pool).map(_measure_named, first.values())
        for (name, _), key in zip(jobs, keys):
            if key not in found:
                found[key] = next(measured)
            yield replace(found[key], name=name)


def _measure_named(job: tuple[str, str]) -> KernelResources:
    return measure(_variants_by_name()[job[0]], job[1])


@cache
def _variants_by_name() -> dict[str, KernelVariant]:
    return {variant.name: variant for variant in collect_variants()}


def _identity(variant: KernelVariant, target: str) -> str:
    """Returns a key that two variants share if the compiler cannot tell them apart."""
    parts = (
        variant.kernel.fn.__qualname__,
        sorted(variant.signature.items()),
        sorted(variant.constexprs.items(), key=str),
    )
    return repr((*parts, variant.num_warps, variant.num_stages, variant.options, target))


def format_markdown(results: Sequence[KernelResources]) -> str:
    """The report as a Markdown table."""
    lines = ["| kernel | target | registers | spills | shared bytes | instructions | per element, high / low |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in results:
        cells = (r.registers, r.spills, r.shared, r.instructions or "", " / ".join(f"{x:.2f}" for x in r.per_element))
        lines.append(f"| {r.name} | {r.target} | " + " | ".join(map(str, cells)) + " |" + (r.error and f" {r.error}"))
    return "\n".join(lines)


def format_table(results: Sequence[KernelResources]) -> str:
    """The report as text, one line per kernel and target."""
    header = ("kernel", "target", "registers", "spills", "stack", "shared", "instr/element")
    lines = [header]
    for r in results:
        if r.error:
            lines.append((r.name, r.target, "failed", r.error, "", "", ""))
            continue
        ratio = " ".join(f"{x:.2f}" for x in r.per_element)
        lines.append((r.name, r.target, *map(str, (r.registers, r.spills, r.stack, r.shared)), ratio))
    widths = [max(len(line[i]) for line in lines if line[2] != "failed" or i < 3) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.kernels.report", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="for example sm_80 sm_90 gfx942")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--match", default="", help="only variants whose name contains this regular expression")
    parser.add_argument("--quick", action="store_true", help="one variant of every kernel")
    parser.add_argument("-j", "--processes", type=int, default=1, help="compile in so many processes")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", action="store_true", help="print one JSON object per kernel instead of a table")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler by an interpreter; unset it.")
    jobs = [
        (variant.name, target)
        for variant in collect_variants(options.ops)
        if re.search(options.match, variant.name) and (not options.quick or re.search(QUICK, variant.name))
        for target in options.targets
        if target in variant.targets
    ]
    if not jobs:
        parser.error("no kernel variant fits --match and --targets.")
    results = []
    # no progress bar without a terminal
    for result in tqdm(measure_all(jobs, options.processes), total=len(jobs), unit=" kernels", disable=None):
        results.append(result)
        if options.json:
            print(json.dumps({"triton": version("triton"), **asdict(result)}), flush=True)
    if options.markdown:
        print(format_markdown(results))
    elif not options.json:
        print(format_table(results))
    failed = [f"{r.name} for {r.target}" for r in results if r.failed]
    if failed:
        print(f"not compiled, spilled or too much shared memory: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
