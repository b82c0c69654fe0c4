"""Decode attention in native code, by every instruction set, against a dense float64 softmax and the reference."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from decode_cases import Case, DecodeTests
from native_code import needs_native
from torch import Tensor

from hf_diffkv.native.library import CorruptMemoryError
from hf_diffkv.ops.decode_attention import native, reference
from hf_diffkv.ops.softmax import SharedAttention, Softmax
from hf_diffkv.precision import SUPPORTED_BITS, Precision

pytestmark = [needs_native, pytest.mark.usefixtures("instructions")]
# of the norm of a head's output; that of half precision has the output's own rounding in it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2e-3}


class NativeCase(Case):
    """Pages and windows of float32, unless they are said to be of another dtype."""

    def __init__(self, *args, dtype: torch.dtype = torch.float32, **kwargs) -> None:
        super().__init__(*args, dtype=dtype, **kwargs)
        self.accuracy = 2e-6 if dtype == torch.float32 else 2e-3

    def run(self, slack: int = 0, softcap=None, sinks=None, **options) -> Tensor:
        return native.decode_attention(self.query, self.rows(), Softmax(self.scaling, softcap, sinks), **options)

    def assert_output(self, got: np.ndarray, expected: np.ndarray, tolerance: None) -> None:
        assert np.linalg.norm(got - expected) <= TOLERANCE[self.dtype] * np.linalg.norm(expected)

    def check_scores(self, row: int, before: np.ndarray, received: np.ndarray, got: np.ndarray) -> None:
        if self.layout.high.score_bytes == 4:
            np.testing.assert_allclose(got - before, received, rtol=0, atol=self.accuracy)
        else:
            super().check_scores(row, before, received, got)


class TestNative(DecodeTests):
    Case = NativeCase

    @pytest.fixture(params=TOLERANCE, ids=str)
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        return request.param


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.sampled(40)
def test_every_number_of_bits(bits: int, dim: int, dtype: torch.dtype) -> None:
    precisions = (Precision(16, bits), Precision(bits, min(bits, 8)))
    case = NativeCase([20, 0, 70], [9, 33, 0], [1, 4, 5], dim=dim, precisions=precisions, dtype=dtype, page_bytes=None)
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim, groups", [(64, 2), (80, 2), (96, 2), (128, 2), (192, 4), (256, 2)])
@pytest.mark.sampled(40)
def test_groups_of_keys_within_and_across_vectors(dim: int, groups: int, dtype: torch.dtype) -> None:
    """More tokens than are unpacked at a time, and heads that are not multiplied four at a time."""
    precisions = (Precision(4, 3, groups, 1), Precision(6, 4, groups // 2, 1))
    NativeCase([150, 0], [9, 33], [1, 4], group=5, dim=dim, precisions=precisions, dtype=dtype, page_bytes=None).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(40)
def test_one_long_and_many_short_rows(threads, dtype: torch.dtype) -> None:
    NativeCase([900] + [2] * 8, [700] + [1] * 8, [5] + [1, 2, 3, 4] * 2, dtype=dtype).check()


@pytest.mark.sampled(6)
def test_large_logits_do_not_overflow(threads) -> None:
    case = NativeCase([5, 0, 417], [9, 33, 300], [1, 4, 5])
    case.query *= 1000
    before = case.store.pages.clone()
    output = case.run()
    assert output.isfinite().all()
    # one token has all the weight
    case.store.pages.copy_(before)
    keys, values, _ = case.tokens(2)
    best = (keys @ case.query[2, 0].double().numpy()).argmax()
    assert np.allclose(output[2, 0].numpy(), values[best], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(6)
def test_nan_of_a_query_stays_in_its_output(dtype: torch.dtype, softcap: float | None) -> None:
    case = NativeCase([5, 0, 417], [9, 33, 300], [1, 4, 5], dtype=dtype)
    case.query[2, 0, 3] = torch.nan
    output = case.run(softcap=softcap)
    assert output[2, 0].isnan().all()
    assert output[:2].isfinite().all() and output[2, 1].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(6)
def test_nan_of_a_key_shows_in_the_outputs_of_its_row(dtype: torch.dtype, softcap: float | None) -> None:
    """Pages hold none, but the window takes every token."""
    case = NativeCase([5, 0, 417], [9, 33, 300], [1, 4, 5], dtype=dtype)
    for token in range(int(case.start[2]), int(case.length[2])):
        place = (2, 0, token % case.window_key.shape[2], 3)
        kept = case.window_key[place].clone()
        case.window_key[place] = torch.nan
        output = case.run(softcap=softcap)
        assert output[2].isnan().all() and output[:2].isfinite().all()
        case.window_key[place] = kept


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(40)
def test_several_layers_join_what_tokens_receive(threads, dtype: torch.dtype) -> None:
    case = NativeCase([5, 0, 917], [9, 33, 40], [1, 4, 5], dtype=dtype)
    twin = NativeCase([5, 0, 917], [9, 33, 40], [1, 4, 5], dtype=dtype)
    other = case.query.flip(1) * 2
    mine, theirs = SharedAttention(), SharedAttention()
    for last, query in ((False, case.query), (False, other), (True, case.query * 0.5)):
        mine.last = theirs.last = last
        softmax = Softmax(case.scaling)
        got = native.decode_attention(query, case.rows(), softmax, held=mine)
        expected = reference.decode_attention(query, twin.rows(), softmax, bounds=twin.bounds(0), held=theirs)
        torch.testing.assert_close(got, expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)
    for row in range(3):
        accuracy = 2e-6 if dtype == torch.float32 else 2e-3
        np.testing.assert_allclose(case.tokens(row)[2], twin.tokens(row)[2], rtol=0, atol=accuracy)


def test_queries_need_not_be_contiguous() -> None:
    case = NativeCase([5, 20], [9, 3], [4], heads=2, group=2)
    expected = case.run()
    case.query = torch.cat([case.query] * 2, dim=2)[..., : case.query.shape[2]]
    assert not case.query.is_contiguous()
    assert torch.equal(case.run(), expected)


@pytest.mark.parametrize("bad", [-1, 0, 1 << 20, 2**31 - 1])
def test_entries_outside_the_pool_are_refused(bad: int) -> None:
    case = NativeCase([25, 20], [9, 3], [2, 4])
    before = case.store.pages.clone(), case.window_score.clone()
    case.store.table[1, 0] = bad
    with pytest.raises(CorruptMemoryError, match="page table"):
        case.run()
    assert torch.equal(case.store.pages, before[0])
    assert torch.equal(case.window_score.nan_to_num(-1), before[1].nan_to_num(-1))
    # requests that are not real are not looked at
    assert case.run(valid=torch.tensor([True, False]))[0].isfinite().all()


@pytest.mark.parametrize("bad", [-3, 100000])
def test_counts_beyond_the_table_are_refused(bad: int) -> None:
    case = NativeCase([25, 20], [9, 3], [2, 4])
    case.store.counts[0][1] = bad
    with pytest.raises(CorruptMemoryError, match="counts more"):
        case.run()


def test_bad_shapes_are_named() -> None:
    case = NativeCase([5], [9], [2])
    case.query = case.query[..., :8]
    with pytest.raises(ValueError, match="query"):
        case.run()
    case = NativeCase([5], [9], [2])
    case.window_value = case.window_value.double()
    with pytest.raises(ValueError, match="window_value must be contiguous torch.float32"):
        case.run()


SEEDS = int(os.environ.get("DIFFKV_FUZZ_SEEDS", "6"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.sampled(40)
def test_random_rows(seed: int, threads) -> None:
    random = np.random.default_rng(seed)
    batch, heads = random.integers(1, 4), random.integers(1, 3)
    dims = random.choice([8, 16, 24, 40, 64, 80, 128], 2)
    bits = random.choice(SUPPORTED_BITS, 4).tolist()
    groups = [int(random.choice([1, 2, 4])) for _ in range(4)]
    precisions = tuple(Precision(*bits[i : i + 2], *groups[i : i + 2]) for i in (0, 2))
    NativeCase(
        random.integers(0, 90, batch * heads).tolist(),
        random.integers(0, 90, batch * heads).tolist(),
        random.integers(1, 6, batch).tolist(),
        heads=int(heads),
        group=int(random.integers(1, 9)),
        dim=int(dims[0]),
        value_dim=int(dims[1]),
        precisions=precisions,
        dtype=list(TOLERANCE)[random.integers(3)],
        page_bytes=None,
    ).check()
