"""Decode attention from compiled code: attend and finish, against the reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from selection import cases
from test_decode_attention_kernel import (
    K4V2,
    K8V4,
    K16V16,
    TOLERANCE,
    Case,
    gains,
    make_case,
    poison,
    relative_error,
    run_kernel,
    run_reference,
    untouched,
)
from test_latent_kernel import attend as attend_latents
from test_latent_kernel import dense, latent_case

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention.scratch import KernelConfig, Scratch
from hf_diffkv.ops.softmax import SharedAttention

K8V8, K6V4, K5V3 = Precision(8, 8), Precision(6, 4), Precision(5, 3)
K4V3, K3V2 = Precision(4, 3), Precision(3, 2)
# tokens at high and at low of each request and KV head, and in the window of each request
ROWS = ([[70, 0], [0, 33]], [[33, 150], [0, 0]], [19, 1])
KERNELS = ["attend_kernel", "finish_kernel"]


def attend(case: Case, splits: int | None = 3, **options: object) -> torch.Tensor:
    """Runs the kernels with the shipped choices for a device of capability 8.0."""
    scratch = poison(Scratch.allocate(case.query, case.rows, case.max_tokens, splits=splits))
    return run_kernel(case, scratch=scratch, **options)


def check(case: Case, splits: int | None = 3, **options: object) -> torch.Tensor:
    mine, oracle = case.copy(), case.copy()
    got = attend(mine, splits, **options)
    want = run_reference(oracle, **options)
    assert got.dtype == want.dtype and torch.isfinite(got).all()
    assert relative_error(got, want) < TOLERANCE[case.query.dtype]
    assert relative_error(gains(case, mine), gains(case, oracle)) < 3e-3
    assert untouched(case, mine)
    return got


@cases(
    "high, low, dim, group, dtype",
    [
        (K8V4, K4V2, 64, 4, torch.float16),
        (K8V4, K4V2, 80, 7, torch.bfloat16),
        (K8V4, K4V2, 128, 4, torch.bfloat16),
        (K16V16, K16V16, 64, 4, torch.bfloat16),
        (K6V4, K5V3, 64, 4, torch.bfloat16),
        (K4V3, K3V2, 128, 4, torch.bfloat16),
    ],
    [
        *((K6V4, K5V3, dim, 4, torch.bfloat16) for dim in (80, 96, 128, 256)),
        *((K4V3, K3V2, dim, 7, torch.float16) for dim in (64, 80, 96, 128, 256)),
        (Precision(6, 3, 2, 4), Precision(5, 6, 4, 1), 64, 4, torch.bfloat16),
        (Precision(16, 5), Precision(3, 1), 64, 4, torch.bfloat16),
        *((K8V4, K4V2, dim, group, torch.bfloat16) for dim, group in product((64, 96, 128, 256), (1, 5, 7, 8))),
        *((K8V4, K4V2, dim, 4, torch.bfloat16) for dim in (64, 80, 96, 256)),
        *((K8V8, K8V8, dim, 4, torch.bfloat16) for dim in (64, 80, 96, 128, 256)),
        *((K16V16, K16V16, dim, 7, torch.bfloat16) for dim in (64, 80, 96, 128, 256)),
        (K8V4, K4V2, 128, 4, torch.float16),
        (K8V4, K4V2, 80, 7, torch.float16),
        (K8V4, K4V2, 64, 16, torch.float16),
        (K16V16, K16V16, 128, 7, torch.float16),
        (K8V4, K4V2, 64, 4, torch.float32),
        (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4), 64, 4, torch.bfloat16),
        (Precision(8, 8, 4, 8), Precision(2, 2, 4, 2), 64, 4, torch.bfloat16),
        (Precision(4, 1), Precision(1, 1), 64, 4, torch.bfloat16),
        (Precision(16, 8), Precision(2, 16), 64, 4, torch.bfloat16),
    ],
)
@pytest.mark.slow
def test_levels_and_window(high, low, dim, group, dtype, emulator) -> None:
    check(make_case(*ROWS, high=high, low=low, key_dim=dim, group=group, dtype=dtype))
    assert [name for name, _ in emulator.launched] == KERNELS


@pytest.mark.slow
def test_long_rows_reach_every_part_of_the_loops(emulator) -> None:
    """Loads that run ahead of their use need some rounds to be seen wrong."""
    case = make_case([[300]], [[330]], [100], key_dim=64, group=4, dtype=torch.bfloat16, slots=128)
    check(case, 1)
    assert [emulator.never_run(name) for name in KERNELS] == [[], []]


def test_rows_of_nothing_and_of_one_token(emulator) -> None:
    case = make_case([[0, 0], [1, 0], [0, 0]], [[0, 0], [0, 1], [0, 0]], [1, 24, 0], key_dim=64, group=4)
    got = check(case)
    assert (got[2] == 0).all()


@pytest.mark.parametrize("order", ["descending", "random"])
@pytest.mark.sampled(100)
def test_the_order_of_blocks_does_not_matter(order, emulator) -> None:
    case = make_case([[200]], [[150]], [24], key_dim=64, group=4)
    first = attend(case.copy(), 4)
    emulator.order = order
    assert torch.equal(attend(case.copy(), 4), first)


@pytest.mark.slow
def test_padding_soft_cap_and_sinks(emulator) -> None:
    case = make_case([[20], [20]], [[9], [9]], [12, 12], key_dim=64, group=4, dtype=torch.bfloat16)
    sinks = torch.tensor([0.5, -2.0, 3.0, 1.0])
    check(case, valid=torch.tensor([False, True]), softcap=3.0, sinks=sinks)


def test_scores_joined_over_layers(emulator) -> None:
    """Compares the scores that the second of two equal layers leaves with those of one layer alone."""
    case = make_case([[40]], [[41]], [18], key_dim=64, group=4)
    alone, joined = case.copy(), case.copy()
    attend(alone)
    held = SharedAttention()
    attend(joined, held=held)
    assert torch.equal(joined.rows.pages, case.rows.pages)
    held.last = True
    attend(joined, held=held)
    assert torch.equal(joined.rows.pages, alone.rows.pages)
    assert torch.equal(joined.rows.window_score.nan_to_num(), alone.rows.window_score.nan_to_num())


@cases(
    "bits, dims, dtype",
    [(8, (64, 128), torch.bfloat16)],
    [
        *((bits, (64, 512), torch.bfloat16) for bits in (16, 8, 6, 5, 4, 3)),
        (8, (64, 512), torch.float16),
        (4, (32, 256), torch.bfloat16),
    ],
)
def test_latents(bits, dims, dtype, emulator) -> None:
    """20 query heads in two blocks; pages of several blocks of tokens, and a window."""
    precision = Precision(16, 16) if bits == 16 else Precision(8, bits)
    case = latent_case([70], [3], precision, dims, dtype=dtype)
    got = attend_latents(case, 2, KernelConfig.for_latents(dtype, "cuda"))
    assert relative_error(got, dense(case)) < TOLERANCE[dtype]
    assert [name for name, _ in emulator.launched] == ["latent_kernel", "finish_kernel"]
