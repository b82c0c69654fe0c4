"""Damage to compiled code that the tests of it must see: each makes a check of the emulator or a comparison fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from selection import cases
from snippets import replaced
from test_compact_kernel import K4V2, State, assert_steps_alike, small_layout
from test_compiled_decode import ROWS, check
from test_compiled_prompt import check as check_prompt
from test_compiled_prompt import draw, hand_past
from test_decode_attention_kernel import make_case
from test_quantize_kernel import assert_stored_alike, make_tokens, tier_of

from tools.kernels.emulator.compiler import Kernel
from tools.kernels.emulator.launch import Emulator
from tools.kernels.emulator.values import PtxError


def decode() -> None:
    check(make_case(*ROWS, key_dim=64, group=4))


def prompt() -> None:
    held = hand_past([[40]], [[90]], [10], key_dim=64, dtype=torch.float16)
    check_prompt(draw(1, 1, 1, 330, 64, dtype=torch.float16), past=held)


def store() -> None:
    tier = tier_of(K4V2, 64, 64)
    assert_stored_alike(tier, make_tokens(tier, 37, torch.float16), torch.float16)


def compact() -> None:
    layout = small_layout()
    counts = [0, 1, layout.high.capacity - 1, layout.high.capacity, 40]
    assert_steps_alike(State(layout, counts, counts[::-1], seed=1, spare=20), 2)


BARRIERS = (r"bar\.(warp\.)?sync\s+-?\d+;", "")
WAITS = (r"cp\.async\.wait_group\s+\d+;", "")
# kernel, what is replaced and by what; inline assembly has a blank behind the opcode, other code a tab
DAMAGE: dict[Callable[[], None], list[tuple[str, str, str]]] = {
    decode: [
        ("attend_kernel", "0x64646464, 0x4140;", "0x64646464, 0x4041;"),
        ("attend_kernel", "0, 0x4342;", "0, 0x4341;"),
        ("attend_kernel", "0x00f000f0", "0x000f00f0"),
        ("attend_kernel", r"sub\.f16x2 (%r\d+), \1, bias;", ""),
        ("attend_kernel", r"mul\.wide\.s32 (%rd\d+), (%r\d+), (%r\d+);", r"mad.wide.s32 \1, \2, \3, 16;"),
        ("attend_kernel", r"mul\.wide\.s32 (%rd\d+), (%r\d+), (%r\d+);", r"mad.wide.s32 \1, \2, \3, 2;"),
        ("attend_kernel", *WAITS),
        ("attend_kernel", *BARRIERS),
        ("attend_kernel", r"(ldmatrix\S*?)\.trans", r"\1"),
        ("finish_kernel", r"shfl\.sync\.bfly\.b32(\s+%r\d+, %r\d+), 8,", r"shfl.sync.bfly.b32\1, 4,"),
        ("finish_kernel", r"max\.f32", "min.f32"),
    ],
    prompt: [
        ("flash_forward", *WAITS),
        ("flash_forward", r"wait_group\s+2;", "wait_group 3;"),
        ("flash_forward", *BARRIERS),
        ("past_forward", *WAITS),
        ("past_forward", *BARRIERS),
        ("past_forward", "0, 0x4140;", "0, 0x4240;"),
        ("past_scores", r"\.max\.s32", ".min.s32"),
        ("column_scores", r"(cp\.async\.cg\S+ \[ %r\d+ \+) 0", r"\1 16"),
    ],
    store: [
        ("store_tokens_kernel", *BARRIERS),
        ("store_tokens_kernel", r"div\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+);", r"div.rn.f32 \1, \3, \2;"),
    ],
    compact: [
        ("find_victims_kernel", "redux.sync.min", "redux.sync.max"),
        ("plan_rows_kernel", *BARRIERS),
        ("assign_pages_kernel", *BARRIERS),
        ("move_tokens_kernel", r"shfl\.sync\.bfly\.b32(\s+%r\d+, %r\d+), 1,", r"shfl.sync.bfly.b32\1, 2,"),
    ],
}
FOR_HOPPER = [
    ("flash_forward", r"wgmma\.wait_group\S+\s+\d+;", ""),
    ("flash_forward", r"fence\.proxy\.async\S*;", ""),
    ("flash_forward", r"4611686293305294848", "4611686430744248320"),
    ("past_scores", *BARRIERS),
]
EVERY = [(run, *damage) for run, all_damage in DAMAGE.items() for damage in all_damage]
# the first wait, the first barrier and the first address
ALWAYS = [EVERY[0], EVERY[4], EVERY[6], EVERY[7]]


@cases("run, name, pattern, replacement", ALWAYS, [case for case in EVERY if case not in ALWAYS])
@pytest.mark.slow
def test_damage_is_seen(run, name, pattern, replacement, ampere: Emulator) -> None:
    check_damage(run, name, pattern, replacement, ampere)


@cases("name, pattern, replacement", FOR_HOPPER[:1], FOR_HOPPER[1:])
@pytest.mark.slow
def test_damage_to_products_of_warp_groups_is_seen(name, pattern, replacement, hopper: Emulator) -> None:
    check_damage(prompt, name, pattern, replacement, hopper)


def check_damage(run: Callable[[], None], name: str, pattern: str, replacement: str, emulator: Emulator) -> None:
    def damage(launched: str, kernel: Kernel) -> Kernel:
        if launched != name:
            return kernel
        return Kernel.read(replaced(kernel.ptx, pattern, replacement), kernel.shared, kernel.runtime)

    emulator.change = damage
    with pytest.raises((PtxError, AssertionError)):
        run()
