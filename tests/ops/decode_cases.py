"""One new token over hand-written pages and a window, against a dense float64 softmax of every query head: a case, and
the tests of every CPU implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_pages import HandStore, grown_score
from torch import Tensor

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention.reference import decode_attention
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import LayerRows, PageLayout

K8V4, K4V2 = Precision(8, 4), Precision(4, 2)
NARROW = [{"metadata_bits": 16, "position_bytes": 2}, {"metadata_bits": 16}]
NARROW_PAIRS = [
    (K8V4, K4V2),
    (Precision(6, 4), Precision(5, 3)),
    (Precision(16, 4, 1, 2), Precision(1, 8, 2, 1)),
    (Precision(4, 2, 2, 4), Precision(3, 1, 4, 1)),
]


class Case:
    """Rows with the given tokens per tier (one list entry per row) and per window (one per request).

    Unwritten pages, the other slots and the rest of the pages are NaN.
    """

    # tolerance of received attention
    accuracy = 0.0

    def __init__(
        self,
        high: list[int],
        low: list[int],
        window: list[int],
        *,
        heads: int = 1,
        group: int = 2,
        dim: int = 16,
        value_dim: int | None = None,
        slots: int = 5,
        precisions: tuple[Precision, Precision] = (K8V4, K4V2),
        dtype: torch.dtype = torch.float64,
        page_bytes: int | None = 512,
        **numbers: int,
    ) -> None:
        """numbers: metadata_bits and position_bytes of `PageLayout.build`."""
        self.batch, self.heads, self.group, self.dtype = len(window), heads, group, dtype
        value_dim = value_dim or dim
        self.layout = PageLayout.build(*precisions, dim, value_dim, dtype.itemsize, page_bytes, **numbers)
        self.store = HandStore(self.layout, high, low, dtype)
        self.generator = torch.Generator().manual_seed(0)
        stored = torch.tensor(high).view(self.batch, heads) + torch.tensor(low).view(self.batch, heads)
        # tokens beyond those stored in a head were pruned
        self.start = stored.amax(1) + 3
        self.length = self.start + torch.tensor(window)
        for row, counts in enumerate(zip(high, low)):
            positions = torch.randperm(int(self.start[row // heads]), generator=self.generator).tolist()
            for tier, count in enumerate(counts):
                for index in range(count):
                    key, value = self.draw(dim), self.draw(value_dim)
                    score = float(self.draw().abs())
                    self.store.write(tier, row, index, key, value, score, positions.pop())
        shape = (self.batch, heads, slots)
        self.window_key = torch.full((*shape, dim), torch.nan, dtype=dtype)
        self.window_value = torch.full((*shape, value_dim), torch.nan, dtype=dtype)
        self.window_score = torch.full(shape, torch.nan)
        for request in range(self.batch):
            for token in range(int(self.start[request]), int(self.length[request])):
                self.window_key[request, :, token % slots] = self.draw(heads, dim).to(dtype)
                self.window_value[request, :, token % slots] = self.draw(heads, value_dim).to(dtype)
                self.window_score[request, :, token % slots] = self.draw(heads).abs().float()
        self.query = (3 * self.draw(self.batch, heads * group, dim)).to(dtype)
        self.scaling = dim**-0.5

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def bounds(self, slack: int) -> Bounds:
        """What the host may know: counts within `slack` of the true ones, on either side."""
        tiers = zip(self.store.counts, (self.layout.high, self.layout.low))
        return Bounds(
            0, [((count.numpy() - slack).clip(0), 2 * slack, tier.capacity, count.device) for count, tier in tiers]
        )

    def rows(self) -> LayerRows:
        return self.store.rows(
            self.heads,
            self.window_key,
            self.window_value,
            window_score=self.window_score,
            window_start=self.start,
            length=self.length,
        )

    def run(self, slack: int = 0, softcap=None, sinks=None, **options) -> Tensor:
        softmax = Softmax(self.scaling, softcap, sinks)
        return decode_attention(self.query, self.rows(), softmax, bounds=self.bounds(slack), **options)

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """Keys, values and scores of a row, in float64: high, low, then window from oldest to newest."""
        request, head = divmod(row, self.heads)
        found = [token[1:4] for token in self.store.read_row(row)]
        for token in range(int(self.start[request]), int(self.length[request])):
            place = (request, head, token % self.window_key.shape[2])
            pair = (self.window_key[place].double().numpy(), self.window_value[place].double().numpy())
            found.append((*pair, float(self.window_score[place])))
        keys, values, scores = zip(*found)
        return np.stack(keys), np.stack(values), list(scores)

    def check_scores(self, row: int, before: np.ndarray, received: np.ndarray, got: np.ndarray) -> None:
        """Checks the sums of a row's tokens, in the order of `tokens`; narrow ones are rounded by the index's hash."""
        expected = before + received
        if self.layout.high.score_bytes == 2:
            length = int(self.length[row // self.heads])
            places = [(index, length, tier) for tier in (0, 1) for index in range(int(self.store.counts[tier][row]))]
            for place, total, score in zip(places, expected, got):
                least, most = max(total - self.accuracy, 0), total + self.accuracy
                assert grown_score(least, *place)[0] <= score <= grown_score(most, *place)[1]
            expected, got = expected[len(places) :], got[len(places) :]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=self.accuracy + 1e-6)

    def assert_output(self, got: np.ndarray, expected: np.ndarray, tolerance: float | None) -> None:
        """Compares the output of one query head."""
        if tolerance is None:
            tolerance = 1e-9 if self.dtype == torch.float64 else 2**-7
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)

    def check(
        self,
        slack: int = 0,
        valid: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        tolerance: float | None = None,
    ) -> None:
        rows = [row for row in range(self.batch * self.heads) if self.length[row // self.heads] > 0]
        before = {row: self.tokens(row) for row in rows}
        output = self.run(slack, valid=valid, softcap=softcap, sinks=sinks)
        assert output.dtype == self.dtype
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
                self.assert_output(output[request, query_head].double().numpy(), received[member] @ values, tolerance)
            if self.length[request] > self.start[request]:
                received[:, -1] = 0
            after = self.tokens(row)
            self.check_scores(row, np.array(scores), received.max(0), np.array(after[2]))
            assert np.array_equal(after[0], keys) and np.array_equal(after[1], values)


class DecodeTests:
    """Tests for every implementation. `Case` runs one, and fixtures choose `dtype` and `threads`."""

    Case = Case

    def test_ragged_rows_over_both_tiers_and_the_window(self, threads: None) -> None:
        self.Case([5, 0, 17, 40], [9, 33, 0, 12], [1, 4, 5, 2]).check()

    @pytest.mark.sampled(6)
    def test_heads_of_one_request_differ(self, dtype: torch.dtype) -> None:
        self.Case([5, 30, 0, 7, 11, 2], [0, 3, 25, 1, 0, 60], [3, 5, 1], heads=2, group=3, dtype=dtype).check()

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
    @pytest.mark.sampled(16)
    def test_group_sizes(self, group: int, dtype: torch.dtype) -> None:
        self.Case([5, 12], [9, 0], [2, 4], group=group, dtype=dtype).check()

    @pytest.mark.sampled(6)
    def test_page_boundaries(self, dtype: torch.dtype) -> None:
        layout = PageLayout.build(K8V4, K4V2, 16, 16, dtype.itemsize, 512)
        high, low = layout.high.capacity, layout.low.capacity
        highs = [high - 1, high, high + 1, 2 * high, 0, 1, 0]
        lows = [low, low + 1, low - 1, 0, 2 * low, 0, 1]
        self.Case(highs, lows, [1, 2, 3, 4, 5, 1, 2], dtype=dtype).check()

    def test_only_a_window_or_a_single_token(self) -> None:
        self.Case([0, 0, 0], [0, 0, 0], [5, 3, 1]).check()

    def test_a_window_that_is_empty(self) -> None:
        self.Case([40, 3], [0, 9], [0, 2]).check()

    def test_logits_far_below_zero(self) -> None:
        """This holds even if the host expects tokens in a tier that has none."""

        class Positive(self.Case):
            def draw(self, *shape: int) -> Tensor:
                return super().draw(*shape).abs()

        case = Positive([5, 0, 17], [9, 33, 0], [1, 4, 5])
        case.query *= -1000
        case.check(slack=7)

    def test_a_request_that_has_seen_nothing(self) -> None:
        case = self.Case([3, 0], [0, 0], [2, 0])
        case.start[1] = case.length[1] = 0
        case.check()
        assert (case.run()[1] == 0).all()

    def test_padding_rows_return_zeros_and_score_nothing(self, threads: None) -> None:
        case = self.Case([5, 0, 17], [9, 33, 0], [1, 4, 5])
        valid = torch.tensor([True, False, True])
        case.check(valid=valid)
        case.query[1] = torch.nan
        assert (case.run(valid=valid)[1] == 0).all()

    @pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
    @pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 6.0, 40.0])])
    @pytest.mark.sampled(6)
    def test_softcap_and_sinks(self, softcap: float | None, sinks: Tensor | None) -> None:
        self.Case([5, 0, 17, 3], [9, 33, 0, 0], [1, 4], heads=2).check(softcap=softcap, sinks=sinks)

    @pytest.mark.parametrize(
        "high, low",
        [
            (Precision(16, 16), Precision(8, 1)),
            (Precision(16, 8), Precision(2, 4, 4, 1)),
            (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4)),
            (Precision(4, 8), Precision(1, 1, 2, 2)),
            (Precision(8, 8, 8, 8), Precision(4, 4, 4, 2)),
            (Precision(6, 4), Precision(5, 3)),
            (Precision(6, 6, 2, 1), Precision(3, 3, 4, 4)),
            (Precision(16, 5), Precision(5, 2, 1, 8)),
        ],
        ids=lambda precision: precision.name,
    )
    @pytest.mark.sampled(16)
    def test_groups(self, high: Precision, low: Precision, dtype: torch.dtype) -> None:
        self.Case([5, 0, 30], [9, 33, 0], [1, 4, 5], precisions=(high, low), dtype=dtype, page_bytes=1024).check()

    @pytest.mark.parametrize("numbers", NARROW, ids=str)
    @pytest.mark.parametrize("high, low", NARROW_PAIRS, ids=lambda precision: precision.name)
    @pytest.mark.sampled(40)
    def test_narrow_pages(
        self, high: Precision, low: Precision, numbers: dict, dtype: torch.dtype, threads: None
    ) -> None:
        options = {"precisions": (high, low), "dtype": dtype, **numbers}
        case = self.Case([5, 0, 30, 170], [9, 33, 0, 12], [1, 4, 5, 2], **options)
        case.check()
        case.check(valid=torch.tensor([True, False, True, True]))

    @pytest.mark.parametrize(
        "dim, value_dim", [(8, 8), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (256, 256), (24, 8), (512, 64)]
    )
    @pytest.mark.sampled(40)
    def test_head_dims(self, dim: int, value_dim: int, dtype: torch.dtype) -> None:
        for precisions in ((K8V4, K4V2), (Precision(16, 6), Precision(5, 3))):
            options = {"dim": dim, "value_dim": value_dim, "precisions": precisions, "dtype": dtype}
            self.Case([20, 0], [9, 33], [1, 4], page_bytes=None, **options).check()
