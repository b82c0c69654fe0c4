"""Compiled code for pages without scores: what is left out, and that the rest is as ever."""

from __future__ import annotations

import math

import pytest
import torch
from hand_past import attend_prompt, hand_past
from selection import cases
from test_compact_kernel import State, assert_alike, run_kernel, run_reference, small_layout
from test_compiled_prompt import LIMITS
from test_decode_attention_kernel import TOLERANCE, make_case, relative_error
from test_decode_attention_kernel import run_reference as attend_by_reference
from test_prefill_attention_reference import dense, past_options
from test_prefill_past_kernel import draw
from test_store_uniform_kernel import K3V3, K5V4, compare_turns, matrices_of, state_of

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention import launch
from hf_diffkv.ops.prefill_attention.launch import prefill_attention
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.tiles import Bounds

K6V5, K5V3, K4V3, K3V2 = Precision(6, 5), Precision(5, 3), Precision(4, 3), Precision(3, 2)
UNSCORED = {"high": K5V3, "low": K5V3, "metadata_bits": 16, "position_bytes": 0}


@cases(
    "high, low, dim",
    [(K5V3, K5V3, 64), (K4V3, K3V3, 64)],
    [(K5V4, K3V3, 64), (K6V5, K5V4, 64), (K6V5, K3V3, 128), (K6V5, K3V2, 128)],
)
@pytest.mark.slow
def test_a_step_leaves_nothing_behind(high, low, dim, emulator) -> None:
    """All tokens of a head have one precision; of a pair, the second head's is the low one."""
    counts = ([[40]], [[0]]) if high == low else ([[200, 0]], [[0, 200]])
    numbers = {**UNSCORED, "high": high, "low": low}
    case = make_case(*counts, [19], key_dim=dim, group=4, dtype=torch.bfloat16, **numbers)
    mine = case.copy()
    got = launch.decode_attention(mine.query, mine.rows, Softmax(mine.scaling), bounds=Bounds(mine.max_tokens))
    assert relative_error(got, attend_by_reference(case.copy())) < TOLERANCE[torch.bfloat16]
    assert torch.equal(mine.rows.pages, case.rows.pages)
    assert [name for name, _ in emulator.launched] == ["attend_kernel", "finish_kernel"]


@pytest.mark.parametrize("low", [K5V3, K3V3], ids=lambda precision: precision.name)
def test_candidates_are_added(low: Precision, emulator) -> None:
    """Also where nothing is significant: nobody looks. With two tiers the third and the fifth row are low."""
    layout = small_layout(key_dim=64, value_dim=64, page_bytes=2048, **{**UNSCORED, "low": low})
    at_low = torch.tensor([False, False, True, False, True]) & (low != K5V3)
    full = torch.where(at_low, layout.low.capacity, layout.high.capacity)
    held = torch.stack([torch.tensor(0), torch.tensor(1), full[2] - 1, full[3], full[4] + 1])
    counts = held.masked_fill(at_low, 0).tolist(), held.masked_fill(~at_low, 0).tolist()
    got = State(layout, *counts, dtype=torch.bfloat16, spare=20)
    expected = got.clone()
    candidates = got.candidates(leaving=[True, False, True, True, True], mean=[0.0] * 5)
    thresholds = torch.where(at_low, math.inf, 0.0), None
    assert int(run_kernel(got, candidates, thresholds)) == 0
    run_reference(expected, candidates, thresholds)
    after = held + torch.tensor([1, 0, 1, 1, 1])
    assert torch.equal(got.high_count, after.masked_fill(at_low, 0).int())
    assert torch.equal(got.low_count, after.masked_fill(~at_low, 0).int())
    assert_alike(got, expected)
    names = [f"{name}_kernel" for name in ("plan_rows", "assign_pages", "move_tokens")]
    assert [name for name, _ in emulator.launched] == names


@pytest.mark.slow
def test_a_prompt_is_not_scored(emulator) -> None:
    wide = {**UNSCORED, "metadata_bits": 32}
    held = hand_past([[33]], [[0]], [5], key_dim=64, dtype=torch.bfloat16, **wide)
    new = draw(1, 1, 1, 9, 64, dtype=torch.bfloat16)
    got, received = attend_prompt(prefill_attention, *new, scaling=0.125, past=held[0], significance=False)
    want, _ = dense(*new, 0.125, **past_options(*held[1:]))
    assert received is None
    assert relative_error(got, want) < LIMITS[torch.bfloat16][0]
    assert [name for name, _ in emulator.launched] == ["past_forward", "flash_forward"]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.slow
def test_prompts_of_heads_with_a_precision_each(rounded: bool, emulator) -> None:
    """A padded prompt, and a turn over what it left in the window."""
    state = state_of(K5V4, K3V3, torch.bfloat16, dim=64, bits=16)
    compare_turns(state, ((40, 7), (60, 3)), feedback=matrices_of(state) if rounded else None)
    store = ["choose_codes", "store_new", "advance"] if rounded else ["store_new", "advance"]
    first, turn = ["take_pages", *store], ["take_pages", "leave_window", *store]
    assert [name.removesuffix("_kernel") for name, _ in emulator.launched] == first + turn
    assert not [name for name in turn if emulator.never_run(f"{name}_kernel")]
