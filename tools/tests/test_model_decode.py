"""The model of decode loops on a GPU that is not present, and what the shipped loops reach in it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def scoreboard() -> ModuleType:
    return importlib.import_module("tools.kernels.scoreboard")


# stall 4, result to scoreboard 2, operands to 1, waits for 0 and 5, from bit 41 on
WORD = (4 | 2 << 5 | 1 << 8 | 0b100001 << 11) << 41
SASS = f"""
        /*0000*/                   MOV R1, c[0x0][0x28] ;              /* 0x00000a0000017a02 */
                                                                       /* 0x000fc40000000f00 */
.L_x_1:
        /*0010*/                   DEPBAR.LE SB0, 0x2 ;                /* 0x000080000000791a */
                                                                       /* 0x000fc80000000000 */
        /*0020*/               @P0 LDS.128 R4, [R1] ;                  /* 0x0000000001047984 */
                                                                       /* 0x{WORD:016x} */
.L_x_0:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ; /* 0x0000000004027fae */
                                                                       /* 0x000fc80000000000 */
        /*0040*/                   LDGDEPBAR ;                         /* 0x00000000000079af */
                                                                       /* 0x000fc80000000000 */
        /*0050*/               @P2 BRA `(.L_x_1) ;                     /* 0xfffffffc00ac2947 */
                                                                       /* 0x000fea000383ffff */
"""


def test_control_codes_and_loops_are_read(scoreboard: ModuleType) -> None:
    code, labels = scoreboard.parse(SASS)
    assert [each.name for each in code] == ["MOV", "DEPBAR", "LDS", "LDGSTS", "LDGDEPBAR", "BRA"]
    load = code[2]
    assert (load.stall, load.written, load.read, load.waits) == (4, 2, 1, 0b100001)
    assert code[1].pending == 2
    (body,) = scoreboard.inner_loops(code, labels)
    assert [each.address for each in body] == [0x10, 0x20, 0x30, 0x40, 0x50]
    # one group per round, two of which may be in flight while a third is used; 512 bytes each for the load and the copy
    assert (scoreboard.buffer_depth(body), scoreboard.port_cycles(body)) == (3, 8)


def instruction(scoreboard: ModuleType, op: str, stall: int = 1, pending: int | None = None, **codes: int) -> object:
    codes = {"written": 7, "read": 7, "waits": 0} | codes
    instruction.address += 16
    return scoreboard.Instruction(instruction.address, op, None, stall, pending=pending, **codes)


instruction.address = 0


def processor(scoreboard: ModuleType, peak: float = 1e9) -> object:
    return scoreboard.Processor("made up", 1, peak, 65536, 228 << 10, 64, 32, reached=1.0, latency=1000)


@pytest.mark.parametrize("warps, expected", [(1, 50), (4, 50), (8, 100), (12, 150)])
def test_a_scheduler_issues_one_instruction_a_cycle(scoreboard: ModuleType, warps: int, expected: int) -> None:
    body = [instruction(scoreboard, "FADD") for _ in range(50)]
    assert scoreboard.cycles_per_round(body, warps, 0, processor(scoreboard)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("depth, expected", [(1, 1000), (2, 500)])
def test_a_second_buffer_halves_what_a_lone_warp_waits(scoreboard: ModuleType, depth: int, expected: int) -> None:
    body = [
        instruction(scoreboard, "DEPBAR.LE", pending=depth - 1),
        instruction(scoreboard, "LDGSTS.E.BYPASS.128"),
        instruction(scoreboard, "LDGDEPBAR"),
    ]
    assert scoreboard.cycles_per_round(body, 1, 512, processor(scoreboard)) == pytest.approx(expected, rel=0.02)


def test_many_warps_wait_for_the_bandwidth_or_the_port(scoreboard: ModuleType) -> None:
    copies = [
        instruction(scoreboard, "DEPBAR.LE", pending=1),
        instruction(scoreboard, "LDGSTS.E.BYPASS.128"),
        instruction(scoreboard, "LDGDEPBAR"),
    ]
    # eight warps with 4,096 bytes each at 16 bytes per cycle
    slow = processor(scoreboard, peak=16.0)
    assert scoreboard.cycles_per_round(copies, 8, 4096, slow) == pytest.approx(8 * 4096 / 16, rel=0.05)
    # eight warps with ten loads of 512 bytes through a port of 128 bytes
    loads = [instruction(scoreboard, "LDS.128") for _ in range(10)]
    assert scoreboard.cycles_per_round(loads, 8, 0, slow) == pytest.approx(8 * 10 * 4, rel=0.05)


def test_registers_and_shared_memory_bound_what_is_resident(scoreboard: ModuleType) -> None:
    hopper = scoreboard.PROCESSORS["sm_90"]
    # programs of one, two and four warps, as counted by NVIDIA's calculator (cuda_occupancy.h)
    counts = {registers: [hopper.resident(registers, 0, warps) for warps in (1, 2, 4)] for registers in (128, 168, 200)}
    assert counts == {128: [16, 8, 4], 168: [12, 6, 3], 200: [8, 4, 2]}
    assert hopper.resident(176, 0, 1) == hopper.resident(255, 0, 1) == 8
    assert hopper.resident(64, 40 << 10, 4) == 5
    assert hopper.resident(32, 0, 1) == 32


# share of peak memory bandwidth over 256 rows of 8,192 tokens on sm_90, by kernel and level
FLOORS = {
    ("K8V4_unscored", "high"): 0.85,
    ("K5V4_unscored", "high"): 0.81,
    ("K4V3_unscored", "high"): 0.61,
    ("K8V4-K4V2", "high"): 0.84,
    ("K8V4-K4V2", "low"): 0.72,
}


@pytest.mark.slow
def test_shipped_loops_copy_ahead_and_come_near_the_bandwidth(tmp_path: Path) -> None:
    import triton

    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm").exists():
        pytest.skip("this build of Triton has no disassembler")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    names = "|".join(dict.fromkeys(name for name, _ in FLOORS))
    match = f"^decode_attend-({names})-d128-g4-"
    command = [sys.executable, "-m", "tools.kernels.model_decode", "--json", f"--match={match}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loops = {
        (loop["name"].split("-", 1)[1].split("-d128")[0], loop["level"]): loop
        for loop in map(json.loads, run.stdout.splitlines())
    }
    assert set(loops) == set(FLOORS)
    for key, loop in loops.items():
        assert loop["depth"] >= 2 and loop["spills"] == 0, loop
        assert loop["share"] >= FLOORS[key], loop
