"""Exact attention of new tokens and the attention each key receives, against a dense float64 softmax per query head."""

from __future__ import annotations

import pytest
import torch
from hand_past import attend_prompt, hand_past
from torch import Tensor

from hf_diffkv.config import Precision
from hf_diffkv.ops.prefill_attention import reference
from hf_diffkv.ops.prefill_attention.reference import prefill_attention


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    valid: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_valid: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    observation_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and received attention in float64, one row and one query head at a time."""
    batch, query_heads, length, _ = query.shape
    heads = key.shape[1]
    past = 0 if past_key is None else past_key.shape[2]
    output = torch.zeros(batch, query_heads, length, value.shape[-1], dtype=torch.float64)
    received = torch.zeros(batch, heads, past + length, dtype=torch.float64)
    for row in range(batch):
        real = torch.ones(length, dtype=torch.bool) if valid is None else valid[row]
        queries = real.nonzero().flatten()
        observed = queries if observation_window is None else queries[-observation_window:]
        for query_head in range(query_heads):
            head = query_head * heads // query_heads
            k, v = key[row, head].double(), value[row, head].double()
            allowed = torch.ones(length, length).tril().bool() if mask is None else mask[row, 0]
            allowed = allowed & real
            if past:
                k, v = torch.cat([past_key[row, head].double(), k]), torch.cat([past_value[row, head].double(), v])
                allowed = torch.cat([past_valid[row, head].expand(length, past), allowed], dim=1)
            logits = query[row, query_head].double() @ torch.where(allowed.any(0)[:, None], k, 0.0).T * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits.masked_fill(~allowed, -torch.inf)
            peak = logits.amax(1, keepdim=True).clamp(min=-1e300)
            if sinks is not None:
                peak = peak.clamp(min=float(sinks[query_head]))
            weights = torch.exp(logits - peak)
            total = weights.sum(1, keepdim=True)
            if sinks is not None:
                total = total + torch.exp(sinks[query_head].double() - peak)
            probabilities = torch.where(total > 0, weights / total, 0.0)
            probabilities[~real] = 0.0
            output[row, query_head] = probabilities @ torch.where(allowed.any(0)[:, None], v, 0.0)
            given = torch.zeros(past + length, dtype=torch.float64)
            for column in range(past + length):
                later = queries[queries > column - past]
                counted = observed[observed > column - past]
                if counted.numel():
                    given[column] = probabilities[counted, column].sum() * later.numel() / counted.numel()
            received[row, head] = torch.maximum(received[row, head], given)
    return output, received


def past_options(key: Tensor | None, value: Tensor | None, valid: Tensor | None) -> dict[str, Tensor | None]:
    return {"past_key": key, "past_value": value, "past_valid": valid}


def draw(batch: int, heads: int, group: int, length: int, dim: int, value_dim: int | None = None, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = 3 * normal(batch, heads * group, length, dim)
    return query, normal(batch, heads, length, dim), normal(batch, heads, length, value_dim or dim)


def check(query: Tensor, key: Tensor, value: Tensor, tolerance: float = 1e-10, past=None, **options) -> None:
    """Compares with `dense`; `past`: from `hand_past`, followed by any dense past in the options."""
    scaling = query.shape[-1] ** -0.5
    stored, *held = [None] * 4 if past is None else past
    output, received = attend_prompt(prefill_attention, query, key, value, scaling=scaling, past=stored, **options)
    if past is not None:
        between = [options.pop(name, None) for name in ("past_key", "past_value", "past_valid")]
        held = [part if more is None else torch.cat([part, more], 2) for part, more in zip(held, between)]
        options |= past_options(*held)
    expected, expected_received = dense(query, key, value, scaling, **options)
    assert output.dtype == query.dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(received.double(), expected_received, rtol=tolerance, atol=tolerance)


RAGGED = torch.tensor([[1] * 40, [0] * 30 + [1] * 10, [1] * 25 + [0] * 15, [0] * 39 + [1], [0, 1] * 20]).bool()


@pytest.mark.parametrize("heads, group", [(1, 1), (2, 3), (3, 4), (1, 6), (2, 7)])
def test_group_sizes(heads: int, group: int) -> None:
    check(*draw(2, heads, group, 33, 16))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_lengths(length: int) -> None:
    check(*draw(2, 2, 2, length, 8))


def test_value_dim_differs_from_key_dim() -> None:
    check(*draw(2, 2, 2, 20, 24, value_dim=8))


def test_ragged_rows_with_padding_anywhere() -> None:
    check(*draw(5, 2, 2, 40, 16), valid=RAGGED)


def test_a_row_of_padding_alone() -> None:
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1] = False
    query, key, value = draw(2, 1, 2, 12, 8)
    check(query, key, value, valid=valid)
    output, received = attend_prompt(prefill_attention, query, key, value, scaling=1.0, valid=valid)
    assert (output[1] == 0).all() and (received[1] == 0).all()


@pytest.mark.parametrize("garbage", [1e4, torch.inf, torch.nan])
def test_padding_may_hold_anything(garbage: float) -> None:
    query, key, value = draw(5, 2, 2, 40, 16)
    expected = attend_prompt(prefill_attention, query, key, value, scaling=0.25, valid=RAGGED)
    for tensor in (query, key, value):
        tensor.masked_fill_(~RAGGED[:, None, :, None], garbage)
    got = attend_prompt(prefill_attention, query, key, value, scaling=0.25, valid=RAGGED)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


LOSSLESS = Precision(16, 16)


def past_of(batch: int, longest: int, **options):
    """Draws a past of at most `longest` tokens per row, with some rows empty."""
    generator = torch.Generator().manual_seed(3)
    window = torch.randint(0, min(9, longest), (batch,), generator=generator)
    window[0] = 0
    rest = longest - window[:, None]
    high = (torch.rand(batch, 2, generator=generator) * (rest + 1)).long()
    low = (torch.rand(batch, 2, generator=generator) * (rest - high + 1)).long()
    high[0, 0] = low[0, 0] = 0
    low[-1, -1] = rest[-1] - high[-1, -1]
    options = {"high": LOSSLESS, "low": LOSSLESS, "dtype": torch.float64} | options
    return hand_past(high.tolist(), low.tolist(), window.tolist(), key_dim=16, **options)


@pytest.mark.parametrize("length", [1, 2, 40])
def test_a_past_of_different_lengths_per_head(length: int) -> None:
    valid = RAGGED[:, -length:]
    check(*draw(5, 2, 2, length, 16), valid=valid, past=past_of(5, 27))


def test_a_past_without_padding() -> None:
    check(*draw(3, 2, 2, 9, 16), past=past_of(3, 50))


@pytest.mark.parametrize("high, low", [(Precision(8, 4), Precision(4, 2)), (LOSSLESS, Precision(2, 1, 2, 4))])
def test_a_compressed_past(high: Precision, low: Precision) -> None:
    query, key, value = (x.float() for x in draw(3, 2, 2, 9, 16, value_dim=8))
    past = past_of(3, 200, value_dim=8, high=high, low=low, dtype=torch.float32)
    check(query, key, value, 1e-5, past=past)
    check(query, key, value, 1e-5, past=past, observation_window=4)


@pytest.mark.parametrize("observation_window", [None, 7])
def test_a_dense_past_by_itself_and_after_a_stored_one(observation_window: int | None) -> None:
    _, key, value = draw(3, 2, 1, 21, 16, seed=7)
    valid = torch.arange(21) < torch.tensor([[0, 3], [21, 10], [1, 20]])[..., None]
    between = past_options(key, value.masked_fill(~valid[..., None], torch.nan), valid)
    options = {"valid": RAGGED[:3, 20:], "observation_window": observation_window, **between}
    check(*draw(3, 2, 2, 20, 16), **options)
    check(*draw(3, 2, 2, 20, 16), past=past_of(3, 30), **options)


def test_a_past_that_holds_nothing() -> None:
    past = hand_past([[0], [0]], [[0], [0]], [0, 0], dtype=torch.float64)
    check(*draw(2, 1, 2, 9, 16), past=past)


def test_a_mask_among_the_new_tokens() -> None:
    """A block of tokens sees each other in both directions, like image tokens."""
    mask = torch.ones(2, 1, 30, 30).tril().bool()
    mask[1, :, 5:15, 5:15] = True
    mask[0, :, 20:, 3] = False
    check(*draw(2, 2, 2, 30, 16), mask=mask)
    check(*draw(2, 2, 2, 30, 16), mask=mask, valid=RAGGED[1:3, 10:], past=past_of(2, 11))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0, 6.0, 30.0])])
def test_softcap_and_sinks(softcap: float | None, sinks: Tensor | None) -> None:
    options = {"softcap": softcap, "sinks": sinks}
    check(*draw(5, 2, 2, 40, 16), valid=RAGGED, **options)
    check(*draw(3, 2, 2, 10, 16), past=past_of(3, 20), **options)


@pytest.mark.parametrize("observation_window", [1, 7, 10, 39, 40, 1000])
def test_observation_window(observation_window: int) -> None:
    check(*draw(5, 2, 2, 40, 16), observation_window=observation_window)
    check(*draw(5, 2, 2, 40, 16), valid=RAGGED, observation_window=observation_window)
    check(*draw(5, 2, 2, 40, 16), valid=RAGGED, observation_window=observation_window, past=past_of(5, 20))


@pytest.mark.parametrize("block_elements", [1, 500, 3000])
def test_blocks_of_queries_do_not_matter(monkeypatch: pytest.MonkeyPatch, block_elements: int) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block_elements)
    check(*draw(5, 2, 2, 40, 16), valid=RAGGED, observation_window=12, past=past_of(5, 20))
    mask = torch.ones(5, 1, 40, 40).tril().bool()
    mask[:, :, 5:15, 5:15] = True
    check(*draw(5, 2, 2, 40, 16), mask=mask)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
def test_low_precision_models(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = (x.to(dtype) for x in draw(3, 2, 2, 40, 32))
    scaling = 32**-0.5
    output, received = attend_prompt(prefill_attention, query, key, value, scaling=scaling, valid=RAGGED[:3])
    expected, expected_received = dense(query, key, value, scaling, valid=RAGGED[:3])
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(received.double(), expected_received, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    query, key, value = draw(1, 1, 2, 20, 16)
    check(query * 300, key * 10, value, tolerance=1e-9)


@pytest.mark.slow
def test_more_than_six_thousand_tokens() -> None:
    length, dim = 6200, 8
    query, key, value = draw(1, 1, 2, length, dim)
    output, received = attend_prompt(prefill_attention, query.float(), key.float(), value.float(), scaling=dim**-0.5)
    query, key, value = (x.float().double() for x in (query, key, value))
    given = torch.zeros(2, length, dtype=torch.float64)
    column = torch.arange(length)
    for start in range(0, length, 1000):
        rows = torch.arange(start, min(start + 1000, length))[:, None]
        for head in range(2):
            logits = query[0, head, rows[:, 0]] @ key[0, 0].T * dim**-0.5
            probabilities = logits.masked_fill(column > rows, -torch.inf).softmax(-1)
            expected = probabilities @ value[0, 0]
            torch.testing.assert_close(output[0, head, rows[:, 0]].double(), expected, rtol=1e-5, atol=1e-5)
            given[head] += probabilities.masked_fill(column == rows, 0.0).sum(0)
    torch.testing.assert_close(received[0, 0].double(), given.amax(0), rtol=1e-4, atol=1e-6)
