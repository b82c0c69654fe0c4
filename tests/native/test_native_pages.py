"""Quantising, reading, copying, appending and compacting in native code: byte for byte what the reference does."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import test_compact_kernel
import test_quantize_kernel
import torch
from native_code import needs_native
from test_append import assert_alike as assert_appended_alike
from test_append import state as window_state
from test_compact_kernel import State, assert_alike, small_layout, unservable
from test_quantize_kernel import NARROW, PAGES, assert_moved_alike, assert_read_alike, make_tokens, poisoned, tier_of

from hf_diffkv.native.library import CorruptMemoryError
from hf_diffkv.ops.append import native as append_native
from hf_diffkv.ops.append import reference as append_reference
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.compact import native as compact_native
from hf_diffkv.ops.quantize import native, reference
from hf_diffkv.pages import LOW
from hf_diffkv.precision import SUPPORTED_BITS, Precision

pytestmark = [needs_native, pytest.mark.usefixtures("instructions")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
K8V4 = Precision(8, 4)


def assert_stored_alike(tier, tokens, dtype) -> None:
    with use_backend("reference"):
        pages = test_quantize_kernel.assert_stored_alike(tier, tokens, dtype, native)
        assert_read_alike(pages, tier, tokens, dtype, native)


@pytest.mark.parametrize("v_bits", SUPPORTED_BITS)
@pytest.mark.parametrize("k_bits", SUPPORTED_BITS)
@pytest.mark.sampled(8)
def test_every_pair_of_bits(k_bits: int, v_bits: int) -> None:
    tier = tier_of(Precision(k_bits, v_bits), 64, 40)
    assert_stored_alike(tier, make_tokens(tier, 137, torch.float16), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "precision",
    [K8V4, Precision(4, 2, 2, 4), Precision(16, 16), Precision(16, 1, 1, 2), Precision(6, 3, 4, 2)],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize(
    "key_dim, value_dim", [(8, 16), (24, 8), (80, 80), (96, 64), (128, 128), (256, 256), (512, 128)]
)
@pytest.mark.sampled(8)
def test_dims_groups_and_dtypes(precision, key_dim, value_dim, dtype) -> None:
    tier = tier_of(precision, key_dim, value_dim, dtype.itemsize)
    assert_stored_alike(tier, make_tokens(tier, 11, dtype), dtype)


@pytest.mark.parametrize("numbers", NARROW, ids=str)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_narrow_pages(bits: int, numbers: dict) -> None:
    for precision, dims in ((Precision(bits, 4), (64, 40)), (Precision(5, bits, 2, 1 if bits == 16 else 4), (80, 96))):
        tier = tier_of(precision, *dims, **numbers)
        assert_stored_alike(tier, make_tokens(tier, 137, torch.float16), torch.float16)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_dims_whose_loops_are_fixed_when_compiled(bits: int) -> None:
    for key_dim, value_dim in ((64, 128), (128, 256), (256, 64)):
        tier = tier_of(Precision(bits, bits), key_dim, value_dim)
        assert_stored_alike(tier, make_tokens(tier, 7, torch.float16), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numbers", [{}, *NARROW], ids=str)
def test_rows_of_extreme_values(dtype: torch.dtype, numbers: dict) -> None:
    tier = tier_of(Precision(6 if numbers else 8, 3), 32, 32, dtype.itemsize, **numbers)
    tokens = list(make_tokens(tier, 10, dtype))
    largest = 32752.0 if dtype != torch.float16 else 32736.0
    for row, part in enumerate(
        (
            torch.full((32,), 3.14159),
            torch.zeros(32),
            torch.arange(32.0) * 1e-7,
            torch.arange(32.0) * 1e-5 + 1000,
            torch.linspace(-largest, largest, 32),
            torch.arange(32.0) * 0.5 + 0.25,
            torch.arange(32.0) - 1e-8,
            -torch.arange(32.0) * 3e-6,
        )
    ):
        tokens[2].key[row] = tokens[2].value[row] = part.to(dtype)
    tokens[2].score[:6] = torch.tensor([0.0, 2.0**-46, 3e5, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1e-38])
    assert_stored_alike(tier, tokens, dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("numbers", [{}, *NARROW, {"metadata_bits": 16, "rotated": True}], ids=str)
def test_zeros_of_both_signs_are_zeros(bits: int, numbers: dict) -> None:
    tier = tier_of(Precision(8, bits), 128, 128, **numbers)
    tokens = list(make_tokens(tier, 10, torch.float32))
    signs = torch.where(torch.arange(128) % 3 == 0, 1.0, -1.0)
    for row, zeros in enumerate((torch.zeros(128), -torch.zeros(128), torch.zeros(128) * signs)):
        tokens[2].key[row] = tokens[2].value[row] = zeros
    with use_backend("reference"):
        for op in (native, reference):
            pages = poisoned(tier)
            op.store_tokens(pages, tier, *tokens, torch.float32)
            for found in op.load_tokens(pages, tier, tokens[0][:3], tokens[1][:3], torch.float32)[:2]:
                assert torch.equal(found, torch.zeros(3, 128))


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_another_dtype_and_stride_are_rounded_alike(bits: int, dtype: torch.dtype) -> None:
    tier = tier_of(Precision(bits, bits), 32, 32, dtype.itemsize)
    tokens = list(make_tokens(tier, 20, torch.float32))
    tokens[2] = tokens[2]._replace(key=torch.cat([tokens[2].key] * 2, dim=1)[:, :32] * 1e-3)
    assert_stored_alike(tier, tokens, dtype)


def test_the_null_page_holds_nothing() -> None:
    tier = tier_of(K8V4, 32, 32)
    tokens = list(make_tokens(tier, 9, torch.bfloat16))
    tokens[0] = torch.where(torch.arange(9) % 2 == 0, 0, tokens[0])
    pages = poisoned(tier)
    native.store_tokens(pages, tier, *tokens, torch.bfloat16)
    assert (pages[0] == 0xFF).all()
    key, value = native.load_tokens(pages, tier, tokens[0], tokens[1], torch.bfloat16)
    assert (key[::2] == 0).all() and (value[::2] == 0).all() and (key[1::2] != 0).any()


@pytest.mark.parametrize("numbers", [{}, *NARROW], ids=str)
@pytest.mark.parametrize("precision", [K8V4, Precision(16, 3), Precision(5, 16, 2, 1)], ids=lambda p: p.name)
def test_tokens_move_code_for_code(precision: Precision, numbers: dict) -> None:
    tier = tier_of(precision, 32, 40, **numbers)
    tokens = make_tokens(tier, 60, torch.float16)
    pages = poisoned(tier)
    native.store_tokens(pages, tier, *tokens, torch.float16)
    assert_moved_alike(pages, tier, tokens, native)


@pytest.mark.parametrize("page, slot", [(-1, 0), (PAGES, 0), (1, -1), (1, 10**6)])
def test_places_that_do_not_exist_are_refused(page: int, slot: int) -> None:
    tier = tier_of(K8V4, 32, 32)
    tokens = list(make_tokens(tier, 4, torch.float16))
    tokens[0][2], tokens[1][2] = page, slot
    pages = poisoned(tier)
    with pytest.raises(CorruptMemoryError):
        native.store_tokens(pages, tier, *tokens, torch.float16)
    with pytest.raises(CorruptMemoryError):
        native.load_tokens(pages, tier, tokens[0], tokens[1], torch.float16)
    with pytest.raises(CorruptMemoryError):
        native.move_tokens(pages, tier, tokens[0][:2], tokens[1][:2], tokens[0][2:], tokens[1][2:])
    assert (pages == 0xFF).all()


@pytest.mark.parametrize("valid", [None, [True, False, True]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12), (128, 64)], ids=str)
def test_append(dtype: torch.dtype, dims: tuple[int, int], valid: list[bool] | None) -> None:
    (got, key, value), (expected, *_) = window_state(dtype, *dims), window_state(dtype, *dims)
    flags = None if valid is None else torch.tensor(valid)
    for op, rows in ((append_native, got), (append_reference, expected)):
        op.append_token(rows, key, value, limit=1e4, valid=flags)
    assert_appended_alike(got, expected)


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2e4, -2e4])
def test_what_cannot_be_stored_is_flagged(name: str, bad: float) -> None:
    for valid in (None, torch.tensor([True, False, True])):
        rows, *new = window_state(torch.float32, 20, 12)
        new[("key", "value").index(name)][1, 1, 7] = bad
        append_native.append_token(rows, *new, limit=1e4, valid=valid)
        assert bool(rows.invalid) == (valid is None)


def compact(state: State, candidates: tuple, limits: tuple) -> int:
    flag = torch.zeros(1, dtype=torch.int32)
    state.compact(compact_native, candidates, limits, flag=flag)
    return int(flag)


assert_steps_alike = functools.partial(test_compact_kernel.assert_steps_alike, run=compact)


@pytest.mark.parametrize("numbers", [{}, *NARROW], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.sampled(8)
def test_compaction_of_many_rows_over_many_steps(threads: int, numbers: dict) -> None:
    layout = small_layout(**numbers)
    full = layout.high.capacity
    counts = [0, 1, full - 1, full, full + 1, 3 * full, 7, 0, 2, 5]
    torch.set_num_threads(threads)
    assert_steps_alike(State(layout, counts, counts[::-1], seed=1, spare=40), 12)
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "high, low, key_dim, value_dim, dtype",
    [
        (Precision(8, 8), K8V4, 64, 64, torch.bfloat16),
        (Precision(16, 16), Precision(16, 16), 16, 16, torch.bfloat16),
        (Precision(16, 16), K8V4, 80, 96, torch.float32),
        (Precision(4, 16), Precision(16, 2), 24, 16, torch.bfloat16),
        (Precision(8, 2, 2, 4), Precision(4, 1, 3, 2), 96, 64, torch.float16),
        (Precision(6, 5), Precision(5, 3), 128, 128, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.sampled(8)
def test_compaction_at_any_precision(high, low, key_dim, value_dim, dtype) -> None:
    layout = small_layout(high, low, key_dim, value_dim, 4096, dtype.itemsize)
    assert_steps_alike(State(layout, [9, 0, 30, 4], [3, 12, 0, 8], dtype=dtype, seed=2, spare=8), 4)


@pytest.mark.parametrize("low", [1.5, 0.0])
def test_compaction_without_a_low_tier_and_without_pruning(low: float) -> None:
    assert_steps_alike(State(small_layout(), [20, 0, 5], [0, 0, 11], seed=5), 3, low=low)


def test_rows_with_nothing_to_do_stay_as_they_are() -> None:
    state = State(small_layout(), [5, 6], [7, 0], seed=6)
    before = state.clone()
    assert compact(state, state.candidates(leaving=[False, False]), state.thresholds()) == 0
    assert_alike(state, before)


def test_ties_go_to_the_oldest() -> None:
    state = State(small_layout(), [40], [0], seed=7, scores=0.0)
    compact(state, state.candidates(mean=[2.0]), state.thresholds(low=0.0))
    assert [position for position, token in state.token(0).items() if token[0] == LOW] == [0]


@pytest.mark.parametrize("reason, flag", [("free list", 1), ("row", 2)])
def test_a_round_that_cannot_be_served_is_called_off(reason: str, flag: int) -> None:
    state, candidates = unservable(reason)
    before = state.clone()
    assert compact(state, candidates, state.thresholds()) == flag
    assert_alike(state, before)


def test_compaction_refuses_entries_outside_the_pool() -> None:
    state = State(small_layout(), [40, 3], [5, 0], seed=3)
    state.table[0, 0] = 10**6
    before = state.clone()
    with pytest.raises(CorruptMemoryError):
        compact(state, state.candidates(), state.thresholds())
    assert_alike(state, before)


SEEDS = int(os.environ.get("DIFFKV_FUZZ_SEEDS", "6"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.sampled(8)
def test_random_compactions(seed: int) -> None:
    random = np.random.default_rng(seed)
    bits = random.choice(SUPPORTED_BITS, 4).tolist()
    dims = random.choice([8, 16, 40, 64], 2).tolist()
    layout = small_layout(Precision(*bits[:2]), Precision(*bits[2:]), *dims, 2048)
    counts = random.integers(0, 60, (2, 5)).tolist()
    thresholds = sorted(random.uniform(0, 2, 2))
    state = State(layout, *counts, seed=seed, spare=40)
    assert_steps_alike(state, 8, high=float(thresholds[1]), low=float(thresholds[0]))


@pytest.mark.parametrize("high, low", [(Precision(6, 4), Precision(5, 3)), (Precision(4, 16, 2, 1), Precision(1, 8))])
def test_compaction_in_narrow_pages(high: Precision, low: Precision) -> None:
    for numbers in NARROW:
        layout = small_layout(high, low, 64, 40, 2048, **numbers)
        assert_steps_alike(State(layout, [9, 0, 70, 4], [3, 120, 0, 8], seed=2, spare=8), 4)
