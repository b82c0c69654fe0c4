"""Simulates a multiprocessor that runs one loop of a compiled kernel for ever, from its warps' control codes.

Every NVIDIA instruction since Volta encodes how many cycles its warp stalls after it, which of six scoreboards it sets
when its operands are read or its result is ready, and which it waits for. The model issues at most one instruction per
scheduler and cycle, keeps the pipes, the shared-memory port and a queue to memory busy, and completes asynchronous
copies after a latency. It models bank conflicts only for single-word reads, no instruction cache misses, and contention
between multiprocessors only as an equal share of bandwidth. It is therefore optimistic: with K5V4 it predicts 82 % of
peak bandwidth where an H200 reached 57 %.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_diffkv.ops.decode_attention.splits import warps_at_once

WARM_UP, MEASURED = 8, 25
SCHEDULERS = 4
# operations that may queue for the shared-memory port, in its cycles
PORT_QUEUE = 16
# cycles until an access has read its registers
READ_CYCLES = 14
# an instruction occupies a scheduler for this many cycles, by pipe; 32 lanes over a quarter multiprocessor's units
PIPE_CYCLES = {"matrix": 8, "special": 8, "float": 1, "other": 1}
PIPE_CYCLES |= dict.fromkeys(("integer", "multiply", "access", "uniform"), 2)
LATENCIES = {"HMMA": 33, "IMMA": 33, "LDSM": 33, "LDS": 30, "SHFL": 24, "MUFU": 22, "F2F": 22, "I2F": 22}
OTHER_LATENCY = 14
PIPES = {
    **dict.fromkeys(("HMMA", "IMMA", "QGMMA"), "matrix"),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F", "POPC"), "special"),
    **dict.fromkeys(("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"), "float"),
    **dict.fromkeys(("LDS", "LDSM", "STS", "STSM", "LDG", "STG", "LDGSTS", "LDL", "STL", "SHFL", "ATOMS"), "access"),
    **dict.fromkeys(("BRA", "BAR", "DEPBAR", "LDGDEPBAR", "NOP", "WARPSYNC", "BSSY", "BSYNC"), "other"),
    "IMAD": "multiply",
}


@dataclass(frozen=True)
class Processor:
    """A multiprocessor and its share of a device.

    Attributes:
        count: multiprocessors of the device.
        peak: bytes per cycle of memory bandwidth for each of them, from the data sheet.
        reached: share of the peak that long reads reach at best.
        registers, warps, programs: number that fit on the multiprocessor at once.
        shared: bytes of shared memory.
        latency, cache_latency: cycles of a read from memory under load, and from the L2 cache.
    """

    name: str
    count: int
    peak: float
    registers: int
    shared: int
    warps: int
    programs: int
    reached: float = 0.92
    latency: int = 800
    cache_latency: int = 280

    def resident(self, registers: int, shared: int, num_warps: int) -> int:
        """Number of programs that run on it at once, given registers per thread and bytes of shared memory for each."""
        by_registers = warps_at_once(registers, self.registers) // num_warps
        # shared memory is allocated in units of 128 bytes, and the system reserves 1 KiB
        by_shared = self.shared // (-(-shared // 128) * 128 + 1024)
        return min(by_registers, by_shared, self.warps // num_warps, self.programs)


PROCESSORS = {
    # 4.8 TB/s at 1.755 GHz
    "sm_90": Processor("H200", 132, 4.8e12 / 132 / 1.755e9, 65536, 228 * 1024, 64, 32),
    # 2.04 TB/s at 1.41 GHz
    "sm_80": Processor("A100 80 GB", 108, 2.04e12 / 108 / 1.41e9, 65536, 164 * 1024, 64, 32),
}


@dataclass(frozen=True)
class Instruction:
    """An instruction and its control code.

    Attributes:
        stall: cycles before the warp's next instruction.
        written, read: scoreboard released when its result is ready, and when its operands have been read; 7 for none.
        waits: bit mask of the scoreboards it waits for.
        pending: number of copy groups that may still be in flight after a DEPBAR; None for other instructions.
    """

    address: int
    op: str
    target: str | None
    stall: int
    written: int
    read: int
    waits: int
    pending: int | None

    @property
    def name(self) -> str:
        return self.op.split(".")[0]

    @property
    def pipe(self) -> str:
        return "uniform" if self.name[0] == "U" or self.name == "R2UR" else PIPES.get(self.name, "integer")

    @property
    def port_cycles(self) -> int:
        """Cycles on the shared-memory port, at 128 bytes a cycle."""
        if self.name == "LDSM":
            return 4 if ".4" in self.op else 2 if ".2" in self.op else 1
        if self.op == "LDS":
            # decode loops read words of values from every fourth row; rows are multiples of 32 bytes, so these words
            # share banks
            return 4
        if self.name in ("LDS", "STS", "LDGSTS"):
            return 4 if ".128" in self.op else 2 if ".64" in self.op else 1
        return {"SHFL": 1, "LDG": 2, "STG": 2}.get(self.name, 0)


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Parses the instructions and labels of `nvdisasm -c -hex`."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: list[Instruction] = []
    pending: tuple[int, str, str] | None = None
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            waiting.append(label[1])
        elif code := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?)/\*", line):
            labels.update(dict.fromkeys(waiting, int(code[1], 16)))
            waiting = []
            pending = int(code[1], 16), code[2], code[3]
        elif pending and (word := re.match(r"\s*/\*\s*0x([0-9a-f]{16})\s*\*/", line)):
            found.append(_instruction(*pending, int(word[1], 16)))
            pending = None
    return found, labels


def _instruction(address: int, op: str, operands: str, word: int) -> Instruction:
    """Parses an instruction; `word` is the upper half of the encoding, with the control code in bits 41 to 57."""
    code = word >> 41
    jump = re.search(r"`\((\.L_\w+)\)", operands) if op.startswith("BRA") else None
    groups = re.search(r"SB0, 0x([0-9a-f]+)", operands) if op.startswith("DEPBAR.LE") else None
    return Instruction(
        address=address,
        op=op,
        target=jump[1] if jump else None,
        stall=code & 15,
        written=code >> 5 & 7,
        read=code >> 8 & 7,
        waits=code >> 11 & 63,
        pending=int(groups[1], 16) if groups else None,
    )


def inner_loops(code: Sequence[Instruction], labels: dict[str, int]) -> list[list[Instruction]]:
    """Bodies of the innermost loops, in order."""
    jumps = [(labels.get(each.target, each.address), each.address) for each in code if each.target]
    loops = [(first, last) for first, last in jumps if first < last]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[each for each in code if first <= each.address <= last] for first, last in sorted(inner)]


def buffer_depth(body: Sequence[Instruction]) -> int:
    """Rounds whose copies a loop can buffer at once: 1 if a round waits for all it requested; 0 without copies."""
    commits = sum(each.name == "LDGDEPBAR" for each in body)
    waits = [each.pending for each in body if each.pending is not None]
    return 1 + min(waits) // commits if commits and waits else 0


def port_cycles(body: Sequence[Instruction]) -> int:
    """Returns the cycles that one round of a warp spends on the multiprocessor's shared-memory port."""
    return sum(each.port_cycles for each in body)


@dataclass
class _Warp:
    ready: int
    at: int = 0
    rounds: int = 0
    boards: list[int] = field(default_factory=lambda: [0] * 6)
    groups: list[float] = field(default_factory=list)
    arriving: float = 0.0
    starts: list[int] = field(default_factory=list)


def cycles_per_round(body: Sequence[Instruction], warps: int, bytes_per_round: float, processor: Processor) -> float:
    """Cycles per round of a loop when this number of warps runs it on a multiprocessor.

    Args:
        bytes_per_round: bytes that a warp copies from memory in a round, divided among the asynchronous copies in
            proportion to their width.
    """
    width = {each.address: each.port_cycles for each in body if each.name == "LDGSTS"}
    unit = bytes_per_round / max(sum(width.values()), 1) / (processor.peak * processor.reached)
    running = [_Warp(ready=37 * index) for index in range(warps)]
    turns = [running[index::SCHEDULERS] for index in range(SCHEDULERS)]
    pipes = [dict.fromkeys(PIPE_CYCLES, 0) for _ in range(SCHEDULERS)]
    order = list(range(SCHEDULERS))
    port = memory = 0.0
    now = 0
    while any(warp.rounds < WARM_UP + MEASURED for warp in running):
        soonest, issued = now + 10_000, False
        for scheduler in tuple(order):
            turn, pipe = turns[scheduler], pipes[scheduler]
            for warp in turn:
                each = body[warp.at]
                earliest = max(_ready(warp, each), pipe[each.pipe])
                if each.port_cycles:
                    earliest = max(earliest, int(port) - PORT_QUEUE + 1)
                if earliest > now:
                    soonest = min(soonest, earliest)
                    continue
                done = now + LATENCIES.get(each.name, OTHER_LATENCY)
                pipe[each.pipe] = now + PIPE_CYCLES[each.pipe]
                if each.port_cycles:
                    port = max(port, now) + each.port_cycles
                    done = max(done, int(port) + LATENCIES.get(each.name, OTHER_LATENCY) - 4)
                if each.name == "LDGSTS":
                    memory = max(memory, now) + unit * width[each.address]
                    warp.arriving = max(warp.arriving, memory + processor.latency)
                elif each.name == "LDG":
                    # two-byte numbers are metadata, too narrow to copy; others are page numbers
                    done = now + (processor.latency if ".U16" in each.op else processor.cache_latency)
                elif each.name == "LDGDEPBAR":
                    warp.groups = [group for group in warp.groups if group > now] + [warp.arriving]
                    done = now
                if each.written < 6:
                    warp.boards[each.written] = max(warp.boards[each.written], done)
                if each.read < 6:
                    warp.boards[each.read] = max(warp.boards[each.read], now + READ_CYCLES)
                if warp.at == 0:
                    warp.starts.append(now)
                warp.ready = now + max(1, each.stall)
                warp.at += 1
                if warp.at == len(body):
                    warp.at, warp.rounds = 0, warp.rounds + 1
                # the others go first next time
                turn.remove(warp)
                turn.append(warp)
                if each.port_cycles:
                    order.remove(scheduler)
                    order.append(scheduler)
                issued = True
                break
        now = now + 1 if issued else max(now + 1, soonest)
    spans = [(warp.starts[WARM_UP + MEASURED - 1] - warp.starts[WARM_UP]) / (MEASURED - 1) for warp in running]
    return sum(spans) / len(spans)


def _ready(warp: _Warp, each: Instruction) -> int:
    """Returns when a warp may issue its next instruction, as far as the warp itself allows."""
    earliest = warp.ready
    for board in range(6):
        if each.waits >> board & 1:
            earliest = max(earliest, warp.boards[board])
    if each.pending is not None and len(warp.groups) > each.pending:
        # groups arrive in order
        earliest = max(earliest, int(max(warp.groups[: len(warp.groups) - each.pending])) + 1)
    return earliest
