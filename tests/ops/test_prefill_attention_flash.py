"""Prompts in half precision on CPUs, by PyTorch's flash attention, against a dense float64 softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand_past import attend_prompt, hand_past
from test_prefill_attention_reference import RAGGED, dense, draw
from torch import Tensor

from hf_diffkv.ops import prefill_attention as op
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.prefill_attention import flash, prefill_attention

# a rounding of the output, to which that of the probabilities adds
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
SINKS = torch.tensor([0.5, -2.0, 6.0, 30.0])
HIGH, LOW, WINDOW = [[5, 0], [3, 9], [0, 0]], [[7, 0], [70, 1], [0, 0]], [4, 20, 0]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which form of the op was called, instead of calling it."""
    names: list[str] = []
    for name in ("flash", "native", "reference"):
        monkeypatch.setattr(getattr(op, name), "prefill_attention", lambda *_, name=name, **options: names.append(name))
    return names


def check(
    query: Tensor, key: Tensor, value: Tensor, *past: Any, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    query, key, value = (part.to(dtype) for part in (query, key, value))
    scaling = query.shape[-1] ** -0.5
    output, received = attend_prompt(
        flash.prefill_attention, query, key, value, scaling=scaling, past=past[0] if past else None, **options
    )
    stored = {}
    if past:
        names = ("past_key", "past_value", "past_valid")
        # stored tokens take part in the model's dtype
        parts = (past[1].nan_to_num().to(dtype), past[2].nan_to_num().to(dtype), past[3])
        stored = dict(zip(names, parts))
    expected, expected_received = dense(query, key, value, scaling, **stored, **options)
    assert output.dtype == dtype and received.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(received.double(), expected_received, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "heads, group, dim", [(1, 1, 16), (2, 3, 64), (1, 6, 80), (2, 7, 96), (1, 4, 128), (1, 1, 256)]
)
def test_groups_and_head_dims(heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    check(*draw(2, heads, group, 33, dim), dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
def test_lengths(length: int) -> None:
    check(*draw(2, 2, 2, length, 32))


@pytest.mark.parametrize("observation_window", [None, 1, 2, 7, 39, 40, 1000])
def test_padding_and_observation_window(observation_window: int | None) -> None:
    check(*draw(5, 2, 2, 40, 16), observation_window=observation_window)
    query, key, value = draw(5, 2, 2, 40, 16)
    check(query, key, value, valid=RAGGED, observation_window=observation_window)
    expected = attend_prompt(
        flash.prefill_attention, *(x.bfloat16() for x in (query, key, value)), scaling=0.25, valid=RAGGED
    )
    for tensor in (query, key, value):
        tensor.masked_fill_(~RAGGED[:, None, :, None], torch.nan)
    given = attend_prompt(
        flash.prefill_attention, *(x.bfloat16() for x in (query, key, value)), scaling=0.25, valid=RAGGED
    )
    assert all(torch.equal(a, b) for a, b in zip(given, expected))


def test_a_row_of_padding_alone_is_zero() -> None:
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1] = False
    check(*draw(2, 1, 2, 12, 8), valid=valid)


@pytest.mark.parametrize("observation_window", [None, 3, 1000])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("length", [1, 9, 40])
@pytest.mark.sampled(4)
def test_a_past_of_different_lengths_per_head(
    length: int, sinks: Tensor | None, observation_window: int | None
) -> None:
    past = hand_past(HIGH, LOW, WINDOW, dtype=torch.bfloat16)
    options = {"sinks": sinks, "observation_window": observation_window}
    check(*draw(3, 2, 2, length, 16), *past, **options)
    check(*draw(3, 2, 2, length, 16), *past, valid=RAGGED[:3, -length:], **options)


def test_exact_tokens_between_the_stored_and_the_new_ones() -> None:
    query, key, value = (part.bfloat16() for part in draw(3, 2, 2, 40, 16))
    past, stored_key, stored_value, there = hand_past(HIGH, LOW, WINDOW, dtype=torch.bfloat16)
    shown = RAGGED[:3, None, :30].expand(-1, 2, -1)
    between = [part[:, :, :30].masked_fill(~shown[..., None], torch.nan) for part in (key, value)]
    new = (query[:, :, 30:], key[:, :, 30:], value[:, :, 30:])
    names = ("past_key", "past_value", "past_valid")
    for stored in (None, past):
        given = attend_prompt(
            flash.prefill_attention, *new, scaling=0.25, past=stored, **dict(zip(names, (*between, shown)))
        )
        before = (between[0].nan_to_num(), between[1].nan_to_num(), shown)
        if stored is not None:
            parts = (stored_key.nan_to_num().bfloat16(), stored_value.nan_to_num().bfloat16(), there)
            before = [torch.cat(pair, dim=2) for pair in zip(parts, before)]
        expected = dense(*new, 0.25, **dict(zip(names, before)))
        torch.testing.assert_close(given[0].double(), expected[0], rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(given[1].double(), expected[1], rtol=2e-4, atol=1e-5)


def test_heads_too_wide_for_the_kernels_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU, for Gemma 4's full-attention layers."""
    monkeypatch.setattr(op, "use_kernels", lambda device, dtype: True)
    query, key, value = (part.float() for part in draw(1, 1, 2, 9, 512))
    output, received = attend_prompt(prefill_attention, query, key, value, scaling=0.05)
    expected = dense(query, key, value, 0.05)
    torch.testing.assert_close(output.double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(received.double(), expected[1], rtol=1e-4, atol=1e-4)


def test_sinks() -> None:
    check(*draw(5, 2, 2, 40, 16), sinks=SINKS)
    check(*draw(5, 2, 2, 40, 16), sinks=SINKS, valid=RAGGED)


def test_large_logits_do_not_overflow() -> None:
    query, key, value = draw(1, 1, 2, 20, 16)
    check(query * 300, key * 10, value)


def test_more_than_six_thousand_tokens() -> None:
    length, dim = 6200, 16
    query, key, value = (part.bfloat16() for part in draw(1, 1, 1, length, dim))
    _, received = attend_prompt(flash.prefill_attention, query, key, value, scaling=dim**-0.5)
    given = torch.zeros(length, dtype=torch.float64)
    column = torch.arange(length)
    for rows in column.split(1000):
        logits = query[0, 0, rows].double() @ key[0, 0].double().T * dim**-0.5
        probabilities = logits.masked_fill(column > rows[:, None], -torch.inf).softmax(-1)
        given += probabilities.masked_fill(column == rows[:, None], 0.0).sum(0)
    torch.testing.assert_close(received[0, 0].double(), given, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, options, served",
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {}, True),
        (torch.float32, {}, False),
        (torch.bfloat16, {"softcap": 5.0}, False),
        (torch.bfloat16, {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}, False),
    ],
)
def test_the_rest_is_left_to_the_reference(
    called: list[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any], served: bool
) -> None:
    monkeypatch.setattr(op.native, "can_attend", lambda *tensors: False)
    parts = [part.to(dtype) for part in draw(1, 1, 1, 8, 16)]
    attend_prompt(prefill_attention, *parts, scaling=0.25, **options)
    with use_backend("reference"):
        attend_prompt(prefill_attention, *parts, scaling=0.25, **options)
    attend_prompt(prefill_attention, *parts[:2], parts[2][..., :8], scaling=0.25)
    assert called == ["flash" if served else "reference", "reference", "reference"]


@pytest.mark.parametrize("has_amx", [False, True])
def test_native_code_runs_where_it_is_faster(called: list[str], monkeypatch: pytest.MonkeyPatch, has_amx: bool) -> None:
    monkeypatch.setattr(op, "choose", lambda device, dtype, *tiers: op.NATIVE)
    monkeypatch.setattr(op.native, "can_attend", lambda *tensors: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    parts = draw(1, 1, 1, 8, 16)
    for dtype, options in ((torch.bfloat16, {}), (torch.bfloat16, {"softcap": 5.0}), (torch.float16, {})):
        attend_prompt(prefill_attention, *(part.to(dtype) for part in parts), scaling=0.25, **options)
    with use_backend("native"):
        attend_prompt(prefill_attention, *(part.bfloat16() for part in parts), scaling=0.25)
    assert called == ["flash" if has_amx else "native", "native", "native", "native"]
