"""Decode attention in native code, by every instruction set, against a dense float64 softmax and the reference."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from native_code import every_set, needs_native
from test_decode_attention_reference import NARROW, Case
from torch import Tensor

from hf_diffkv.native.library import CorruptMemoryError, use_instructions
from hf_diffkv.ops.decode_attention import Held, native, reference
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import PageLayout
from hf_diffkv.precision import SUPPORTED_BITS, Precision

pytestmark = [needs_native, every_set]
K8V4, K4V2, K16V16 = Precision(8, 4), Precision(4, 2), Precision(16, 16)
# of the norm of a head's output; that of half precision has the output's own rounding in it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def chosen(instructions: str) -> Iterator[None]:
    with use_instructions(instructions):
        yield


@pytest.fixture(params=[1, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


class NativeCase(Case):
    """Hand-written rows; the pages nobody wrote, the other slots and the rest of the pages are NaN."""

    def __init__(self, *args, dtype: torch.dtype = torch.float32, **kwargs) -> None:
        super().__init__(*args, dtype=dtype, **kwargs)

    def run(self, slack: int = 0, softcap=None, sinks=None, **options) -> Tensor:
        return native.decode_attention(self.query, self.rows(), Softmax(self.scaling, softcap, sinks), **options)

    def check(self, valid: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> None:
        rows = [row for row in range(self.batch * self.heads) if self.length[row // self.heads] > 0]
        before = {row: self.tokens(row) for row in rows}
        output = self.run(valid=valid, softcap=softcap, sinks=sinks)
        assert output.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        for row, (keys, values, scores) in before.items():
            request, head = divmod(row, self.heads)
            received = np.zeros((self.group, len(scores)))
            for member in range(self.group):
                query_head = head * self.group + member
                logits = keys @ self.query[request, query_head].double().numpy() * self.scaling
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                weights = np.exp(logits - logits.max())
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(float(sinks[query_head]) - logits.max())
                received[member] = weights / total * (valid is None or bool(valid[request]))
                expected = received[member] @ values
                got = output[request, query_head].double().numpy()
                assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)
            if self.length[request] > self.start[request]:
                received[:, -1] = 0
            after = self.tokens(row)
            accuracy = 2e-6 if self.dtype == torch.float32 else 2e-3
            if self.layout.high.score_bytes == 4:
                gained = np.array(after[2]) - np.array(scores)
                np.testing.assert_allclose(gained, received.max(0), rtol=0, atol=accuracy)
            else:
                self.check_scores(row, np.array(scores) + received.max(0), after[2], accuracy)
            assert np.array_equal(after[0], keys) and np.array_equal(after[1], values)


def test_ragged_rows_over_both_tiers_and_the_window(threads) -> None:
    NativeCase([5, 0, 17, 40], [9, 33, 0, 12], [1, 4, 5, 2]).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(6)
def test_heads_of_one_request_differ(dtype: torch.dtype) -> None:
    NativeCase([5, 30, 0, 7, 11, 2], [0, 3, 25, 1, 0, 60], [3, 5, 1], heads=2, group=3, dtype=dtype).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.sampled(16)
def test_group_sizes(group: int, dtype: torch.dtype) -> None:
    NativeCase([5, 12], [9, 0], [2, 4], group=group, dtype=dtype).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(6)
def test_page_boundaries(dtype: torch.dtype) -> None:
    layout = PageLayout.build(K8V4, K4V2, 16, 16, dtype.itemsize, 512)
    high, low = layout.high.capacity, layout.low.capacity
    highs = [high - 1, high, high + 1, 2 * high, 0, 1, 0]
    lows = [low, low + 1, low - 1, 0, 2 * low, 0, 1]
    NativeCase(highs, lows, [1, 2, 3, 4, 5, 1, 2], dtype=dtype).check()


def test_only_a_window_or_a_single_token() -> None:
    NativeCase([0, 0, 0], [0, 0, 0], [5, 3, 1]).check()


def test_a_window_that_is_empty() -> None:
    NativeCase([40, 3], [0, 9], [0, 2]).check()


def test_a_request_that_has_seen_nothing() -> None:
    case = NativeCase([3, 0], [0, 0], [2, 0])
    case.start[1] = case.length[1] = 0
    case.check()
    assert (case.run()[1] == 0).all()


def test_padding_rows_return_zeros_and_score_nothing(threads) -> None:
    case = NativeCase([5, 0, 17], [9, 33, 0], [1, 4, 5])
    valid = torch.tensor([True, False, True])
    case.check(valid=valid)
    case.query[1] = torch.nan
    assert (case.run(valid=valid)[1] == 0).all()


@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 6.0, 40.0])])
@pytest.mark.sampled(6)
def test_softcap_and_sinks(softcap: float | None, sinks: Tensor | None) -> None:
    NativeCase([5, 0, 17, 3], [9, 33, 0, 0], [1, 4], heads=2).check(softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.sampled(40)
def test_every_number_of_bits(bits: int, dim: int, dtype: torch.dtype) -> None:
    precisions = (Precision(16, bits), Precision(bits, min(bits, 8)))
    case = NativeCase([20, 0, 70], [9, 33, 0], [1, 4, 5], dim=dim, precisions=precisions, dtype=dtype, page_bytes=None)
    case.check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "high, low",
    [
        (Precision(16, 16), Precision(8, 1)),
        (Precision(16, 8), Precision(2, 4, 4, 1)),
        (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4)),
        (Precision(4, 8), Precision(1, 1, 2, 2)),
        (Precision(8, 8, 8, 8), Precision(4, 4, 4, 2)),
        (Precision(6, 6, 2, 1), Precision(3, 3, 4, 4)),
        (Precision(16, 5), Precision(5, 2, 1, 8)),
    ],
    ids=lambda precision: precision.name,
)
@pytest.mark.sampled(16)
def test_groups(high: Precision, low: Precision, dtype: torch.dtype) -> None:
    NativeCase([5, 0, 30], [9, 33, 0], [1, 4, 5], precisions=(high, low), dtype=dtype, page_bytes=1024).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim, groups", [(64, 2), (80, 2), (96, 2), (128, 2), (192, 4), (256, 2)])
@pytest.mark.sampled(40)
def test_groups_of_keys_within_and_across_vectors(dim: int, groups: int, dtype: torch.dtype) -> None:
    """More tokens than are unpacked at a time, and heads that are not multiplied four at a time."""
    precisions = (Precision(4, 3, groups, 1), Precision(6, 4, groups // 2, 1))
    NativeCase([150, 0], [9, 33], [1, 4], group=5, dim=dim, precisions=precisions, dtype=dtype, page_bytes=None).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("numbers", NARROW, ids=str)
@pytest.mark.parametrize(
    "high, low",
    [
        (K8V4, K4V2),
        (Precision(6, 4), Precision(5, 3)),
        (Precision(16, 4, 1, 2), Precision(1, 8, 2, 1)),
        (Precision(4, 2, 2, 4), Precision(3, 1, 4, 1)),
    ],
    ids=lambda precision: precision.name,
)
@pytest.mark.sampled(40)
def test_narrow_pages(high: Precision, low: Precision, numbers: dict, dtype: torch.dtype, threads) -> None:
    case = NativeCase([5, 0, 30, 170], [9, 33, 0, 12], [1, 4, 5, 2], precisions=(high, low), dtype=dtype, **numbers)
    case.check()
    case.check(valid=torch.tensor([True, False, True, True]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "dim, value_dim", [(8, 8), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (256, 256), (24, 8), (512, 64)]
)
@pytest.mark.sampled(40)
def test_head_dims(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    for precisions in ((K8V4, K4V2), (Precision(16, 6), Precision(5, 3))):
        options = {"dim": dim, "value_dim": value_dim, "precisions": precisions, "dtype": dtype}
        NativeCase([20, 0], [9, 33], [1, 4], page_bytes=None, **options).check()


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.sampled(40)
def test_several_layers_join_what_tokens_receive(threads, dtype: torch.dtype) -> None:
    case = NativeCase([5, 0, 917], [9, 33, 40], [1, 4, 5], dtype=dtype)
    twin = NativeCase([5, 0, 917], [9, 33, 40], [1, 4, 5], dtype=dtype)
    other = case.query.flip(1) * 2
    mine, theirs = Held(), Held()
    for last, query in ((False, case.query), (False, other), (True, case.query * 0.5)):
        mine.last = theirs.last = last
        softmax = Softmax(case.scaling)
        got = native.decode_attention(query, case.rows(), softmax, held=mine)
        expected = reference.decode_attention(query, twin.rows(), softmax, tiles=twin.tiles(0), held=theirs)
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
