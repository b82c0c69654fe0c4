"""Storing, reading, copying, appending and compacting from compiled code, byte for byte against the reference."""

from __future__ import annotations

import pytest
import torch
from selection import cases
from test_append import CPU, rotated_by_hand, state
from test_append import assert_alike as assert_appended_alike
from test_compact_kernel import (
    K4V2,
    K8V4,
    State,
    assert_alike,
    assert_steps_alike,
    run_kernel,
    small_layout,
    unservable,
)
from test_quantize_kernel import assert_stored_alike, make_tokens, random_moves, tier_of

from hf_diffkv.config import Precision
from hf_diffkv.ops.append import launch as append
from hf_diffkv.ops.append import reference as append_reference
from hf_diffkv.ops.compact import launch as compact
from hf_diffkv.ops.quantize import launch, reference
from hf_diffkv.ops.rotation import Rotation, rotation_matrix

FULL, K6V3 = Precision(16, 16), Precision(6, 3)


@cases(
    "precision, dim, dtype",
    [(K8V4, 128, torch.bfloat16), (K4V2, 80, torch.float16), (FULL, 64, torch.bfloat16), (K6V3, 128, torch.bfloat16)],
    [
        *((Precision(5, 6), dim, torch.bfloat16) for dim in (64, 80, 96, 128, 256)),
        *((Precision(3, 5, 2, 4), dim, torch.float16) for dim in (48, 64, 128)),
        *((K8V4, dim, torch.bfloat16) for dim in (64, 96, 256)),
        (K4V2, 128, torch.bfloat16),
        (Precision(8, 8), 128, torch.bfloat16),
        (FULL, 128, torch.bfloat16),
        (Precision(4, 1, 4, 2), 128, torch.bfloat16),
        (Precision(2, 1, 2, 4), 48, torch.float32),
        (Precision(16, 1), 64, torch.float16),
    ],
)
@pytest.mark.sampled(100)
def test_tokens_are_stored_and_read(precision, dim, dtype, emulator) -> None:
    tier = tier_of(precision, dim, dim, dtype.itemsize)
    tokens = make_tokens(tier, 37, dtype)
    # the null page is neither written nor read
    tokens[0][5:9] = 0
    pages = assert_stored_alike(tier, tokens, dtype)
    got = launch.load_tokens(pages, tier, tokens[0], tokens[1], dtype)
    want = reference.load_tokens(pages, tier, tokens[0], tokens[1], dtype)
    for mine, expected in zip(got, want):
        assert torch.equal(mine, expected.masked_fill((tokens[0] == 0)[:, None], 0))
    assert {name for name, _ in emulator.launched} == {"store_tokens_kernel", "load_tokens_kernel"}


@cases(
    "precision, key_dim, value_dim",
    [(K8V4, 128, 128)],
    [
        (K6V3, 128, 64),
        (Precision(5, 3), 24, 80),
        (Precision(2, 8), 24, 13),
        (K4V2, 80, 80),
        (FULL, 64, 64),
        (Precision(4, 2, 2, 4), 128, 128),
        (Precision(16, 1), 24, 8),
    ],
)
def test_tokens_are_copied(precision, key_dim, value_dim, emulator) -> None:
    tier = tier_of(precision, key_dim, value_dim)
    pages, moves = random_moves(tier)
    expected = pages.clone()
    reference.move_tokens(expected, tier, *moves)
    launch.move_tokens(pages, tier, *moves)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 80), (torch.float32, 64)], ids=str)
def test_tokens_are_appended(dtype, dim, emulator) -> None:
    (got, key, value), (want, *_) = state(dtype, dim, dim), state(dtype, dim, dim)
    both = ((got, append), (want, append_reference))
    for rows, op in both:
        op.append_token(rows, key, value, limit=1e4, valid=torch.tensor([True, False, True]))
    assert not got.invalid
    value = value.clone()
    value[2, 1, 3] = float("nan")
    for rows, op in both:
        op.append_token(rows, key, value, limit=1e4)
    assert got.invalid
    assert_appended_alike(got, want)


def test_tokens_are_rotated_and_appended(emulator) -> None:
    """A program for keys and values, two for queries."""
    rows, key, value = state(torch.bfloat16, 64, 64, centered=True)
    query = torch.randn(3, 22, 64).bfloat16()
    *wanted, expected = rotated_by_hand(key, value, query, offset=rows.offset)
    matrix = rotation_matrix(64, torch.float32, CPU)
    got = append.append_token(rows, key, value, limit=1e4, query=query, rotation=Rotation(matrix, matrix))
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2**-8)
    for request, slot in enumerate((0, 2, 4)):
        for window, want in zip((rows.window_key, rows.window_value), wanted):
            torch.testing.assert_close(window[request, :, slot].double(), want[request], rtol=2**-8, atol=2**-8)
    assert rows.length.tolist() == [1, 8, 15] and not rows.invalid


@cases(
    "high, low, dim, dtype",
    [(K8V4, K4V2, 128, torch.bfloat16), (K6V3, Precision(5, 3), 64, torch.bfloat16)],
    [
        (K6V3, Precision(5, 2), 128, torch.bfloat16),
        (Precision(5, 6, 3, 1), Precision(3, 2, 2, 4), 96, torch.float16),
        (K8V4, K4V2, 64, torch.bfloat16),
        (K8V4, K4V2, 256, torch.bfloat16),
        (K8V4, K4V2, 80, torch.float16),
        (Precision(8, 8), K8V4, 128, torch.bfloat16),
        (FULL, FULL, 128, torch.bfloat16),
        (Precision(8, 2, 2, 4), Precision(4, 1, 3, 2), 96, torch.float16),
        (FULL, K8V4, 80, torch.float32),
    ],
)
@pytest.mark.slow
def test_levels_are_compacted(high, low, dim, dtype, emulator) -> None:
    layout = small_layout(high, low, dim, dim, 4096, dtype.itemsize)
    full = layout.high.capacity
    counts = [0, 1, full - 1, full, full + 1, 2 * full]
    assert_steps_alike(State(layout, counts, counts[::-1], dtype=dtype, seed=2, spare=20), 2)
    names = {name for name, _ in emulator.launched}
    assert names == {f"{name}_kernel" for name in ("find_victims", "plan_rows", "assign_pages", "move_tokens")}


@cases("order", ["ascending", "descending"], ["random"])
@pytest.mark.slow
def test_many_blocks_of_rows_in_any_order(order, emulator) -> None:
    """More rows than one block plans, and rows that are searched in splits."""
    emulator.order = order
    layout = small_layout()
    rows = compact.PLAN_ROWS + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "SEARCH_TOKENS", 64)
        patch.setattr(compact, "SEARCH_PROGRAMS", 2 * rows)
        most = 70
        assert compact._splits(layout, rows, most)[0] > 1
        counts = [(7 * row) % (layout.high.capacity + 2) for row in range(rows)]
        counts[5] = most
        assert_steps_alike(State(layout, counts, counts[::-1], seed=1, spare=300), 1)
    assert ("assign_pages_kernel", (2,)) in emulator.launched


def test_a_round_that_cannot_be_served_is_called_off(emulator) -> None:
    made, candidates = unservable("free list")
    before = made.clone()
    assert int(run_kernel(made, candidates, made.thresholds())) == 1
    assert_alike(made, before)
