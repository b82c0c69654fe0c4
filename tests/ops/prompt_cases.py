"""Prompt attention on CPUs against a dense float64 softmax: the tests of every lower-precision implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_past import attend_prompt, hand_past
from test_prefill_attention_reference import RAGGED, dense, draw, past_options
from torch import Tensor

SINKS = torch.tensor([0.5, -2.0, 6.0, 30.0])
HIGH, LOW, WINDOW = [[5, 0], [3, 9], [0, 0]], [[7, 0], [70, 1], [0, 0]], [4, 20, 0]
Attention = tuple[Tensor, Tensor]


class PromptTests:
    """`op` is the implementation; fixtures choose `dtype` and `threads`."""

    op: Callable[..., Attention]

    def as_read(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Stored tokens, [.., dim] with NaN where there is none, in the form that enters products."""
        return part.nan_to_num().to(dtype)

    def assert_close(self, got: Attention, expected: Attention, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def check(
        self, query: Tensor, key: Tensor, value: Tensor, *past: Any, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        """Compares with the softmax; `past`: from `hand_past`."""
        parts = [part.to(dtype) for part in (query, key, value)]
        scaling = query.shape[-1] ** -0.5
        got = attend_prompt(self.op, *parts, scaling=scaling, past=past[0] if past else None, **options)
        if past:
            options |= past_options(self.as_read(past[1], dtype), self.as_read(past[2], dtype), past[3])
        assert got[0].dtype == dtype and got[1].dtype == torch.float32
        self.assert_close(got, dense(*parts, scaling, **options), dtype)

    @pytest.mark.parametrize(
        "heads, group, dim",
        [(1, 1, 8), (1, 1, 16), (2, 3, 64), (1, 6, 80), (2, 7, 96), (1, 4, 128), (1, 2, 256), (1, 1, 512)],
    )
    @pytest.mark.sampled(12)
    def test_groups_and_head_dims(self, heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
        self.check(*draw(2, heads, group, 33, dim), dtype=dtype)

    @pytest.mark.parametrize("length", [1, 2, 48, 49, 63, 64, 65, 256, 257, 300, 600])
    @pytest.mark.sampled(40)
    def test_lengths(self, length: int, dtype: torch.dtype, threads: None) -> None:
        self.check(*draw(2, 1, 2, length, 16), dtype=dtype)

    @pytest.mark.parametrize("observation_window", [None, 1, 2, 7, 39, 40, 1000])
    @pytest.mark.sampled(40)
    def test_padding_and_observation_window(self, observation_window: int | None, dtype: torch.dtype) -> None:
        options = {"observation_window": observation_window, "dtype": dtype}
        self.check(*draw(5, 2, 2, 40, 16), **options)
        self.check(*draw(5, 2, 2, 40, 16), valid=RAGGED, **options)

    def test_what_padding_holds_does_not_matter(self, dtype: torch.dtype) -> None:
        parts = [part.to(dtype) for part in draw(5, 2, 2, 40, 16)]
        expected = attend_prompt(self.op, *parts, scaling=0.25, valid=RAGGED)
        for part in parts:
            part.masked_fill_(~RAGGED[:, None, :, None], torch.nan)
        got = attend_prompt(self.op, *parts, scaling=0.25, valid=RAGGED)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        assert (got[0].masked_fill(RAGGED[:, None, :, None], 0) == 0).all()

    def test_a_request_of_padding_alone_is_zero(self, dtype: torch.dtype) -> None:
        valid = torch.ones(2, 12, dtype=torch.bool)
        valid[1] = False
        self.check(*draw(2, 1, 2, 12, 8), valid=valid, dtype=dtype)

    @pytest.mark.parametrize("observation_window", [None, 3, 1000])
    @pytest.mark.parametrize("sinks", [None, SINKS])
    @pytest.mark.parametrize("length", [1, 9, 40])
    @pytest.mark.sampled(40)
    def test_a_past_of_different_lengths_per_head(
        self, length: int, sinks: Tensor | None, observation_window: int | None, dtype: torch.dtype
    ) -> None:
        past = hand_past(HIGH, LOW, WINDOW, dtype=dtype)
        options = {"sinks": sinks, "observation_window": observation_window, "dtype": dtype}
        self.check(*draw(3, 2, 2, length, 16), *past, **options)
        self.check(*draw(3, 2, 2, length, 16), *past, valid=RAGGED[:3, -length:], **options)

    @pytest.mark.sampled(6)
    def test_exact_tokens_between_the_stored_and_the_new_ones(self, dtype: torch.dtype) -> None:
        query, key, value = (part.to(dtype) for part in draw(3, 2, 2, 40, 16))
        past, stored_key, stored_value, there = hand_past(HIGH, LOW, WINDOW, dtype=dtype)
        shown = RAGGED[:3, None, :30].expand(-1, 2, -1)
        between = [part[:, :, :30].masked_fill(~shown[..., None], torch.nan) for part in (key, value)]
        new = (query[:, :, 30:], key[:, :, 30:], value[:, :, 30:])
        for stored in (None, past):
            got = attend_prompt(self.op, *new, scaling=0.25, past=stored, **past_options(*between, shown))
            before = (between[0].nan_to_num(), between[1].nan_to_num(), shown)
            if stored is not None:
                parts = (self.as_read(stored_key, dtype), self.as_read(stored_value, dtype), there)
                before = [torch.cat(pair, dim=2) for pair in zip(parts, before)]
            self.assert_close(got, dense(*new, 0.25, **past_options(*before)), dtype)

    def test_sinks(self, dtype: torch.dtype) -> None:
        self.check(*draw(5, 2, 2, 40, 16), sinks=SINKS, dtype=dtype)
        self.check(*draw(5, 2, 2, 40, 16), sinks=SINKS, valid=RAGGED, dtype=dtype)

    def test_large_logits_do_not_overflow(self, dtype: torch.dtype) -> None:
        query, key, value = draw(1, 1, 2, 20, 16)
        self.check(query * 300, key * 10, value, dtype=dtype)
