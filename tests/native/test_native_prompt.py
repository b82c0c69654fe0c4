"""Prompt attention in native code, by every instruction set, against a dense float64 softmax."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_past import attend_prompt, hand_past
from native_code import needs_native
from test_prefill_attention_reference import RAGGED, dense, draw
from torch import Tensor

from hf_diffkv.native.library import CorruptMemoryError, instructions
from hf_diffkv.ops.prefill_attention import native
from hf_diffkv.precision import SUPPORTED_BITS, Precision

pytestmark = [needs_native, pytest.mark.usefixtures("instructions")]
# of the norm of the output; that of half precision has the output's own rounding in it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2e-3}
HIGH, LOW, WINDOW = [[5, 0], [3, 9], [0, 0]], [[7, 0], [70, 1], [0, 0]], [4, 20, 0]
SINKS = torch.tensor([0.5, -2.0, 6.0, 30.0])
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def as_read(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored tokens, [.., dim] with NaN where there is none, as they take part in products."""
    pairs = dtype == torch.bfloat16 and instructions() == "avx512bf16"
    return part.nan_to_num().to(dtype if pairs else torch.float32)


def assert_close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    output, received = got
    assert output.dtype == dtype and received.dtype == torch.float32
    assert (output.double() - expected[0]).norm() <= TOLERANCE[dtype] * expected[0].norm()
    torch.testing.assert_close(received.double(), expected[1], rtol=1e-5, atol=1e-6)


def check(
    query: Tensor, key: Tensor, value: Tensor, *past: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """`past`: what `hand_past` returns."""
    parts = [part.to(dtype) for part in (query, key, value)]
    scaling = query.shape[-1] ** -0.5
    got = attend_prompt(native.prefill_attention, *parts, scaling=scaling, past=past[0] if past else None, **options)
    if past:
        stored = (as_read(past[1], dtype), as_read(past[2], dtype), past[3])
        options |= dict(zip(("past_key", "past_value", "past_valid"), stored))
    assert_close(got, dense(*parts, scaling, **options), dtype)


@every_dtype
@pytest.mark.parametrize(
    "heads, group, dim",
    [(1, 1, 8), (2, 3, 64), (1, 6, 80), (1, 1, 96), (1, 4, 128), (1, 2, 256), (1, 1, 512)],
)
@pytest.mark.sampled(12)
def test_groups_and_head_dims(heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    check(*draw(2, heads, group, 33, dim), dtype=dtype)


@every_dtype
@pytest.mark.parametrize("dim, value_dim", [(64, 8), (16, 72), (7, 5)])
def test_values_of_another_dim(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(*draw(1, 2, 2, 40, dim, value_dim), dtype=dtype)


@every_dtype
@pytest.mark.parametrize("length", [1, 2, 48, 49, 256, 257, 600])
@pytest.mark.sampled(40)
def test_lengths(length: int, dtype: torch.dtype, threads: None) -> None:
    check(*draw(2, 1, 2, length, 16), dtype=dtype)


@every_dtype
@pytest.mark.parametrize("observation_window", [None, 1, 7, 1000])
@pytest.mark.sampled(40)
def test_padding_and_observation_window(observation_window: int | None, dtype: torch.dtype) -> None:
    options = {"observation_window": observation_window, "dtype": dtype}
    check(*draw(5, 2, 2, 40, 16), **options)
    check(*draw(5, 2, 2, 40, 16), valid=RAGGED, **options)


@every_dtype
def test_what_padding_holds_does_not_matter(dtype: torch.dtype) -> None:
    parts = [part.to(dtype) for part in draw(5, 2, 2, 40, 16)]
    expected = attend_prompt(native.prefill_attention, *parts, scaling=0.25, valid=RAGGED)
    for part in parts:
        part.masked_fill_(~RAGGED[:, None, :, None], torch.nan)
    got = attend_prompt(native.prefill_attention, *parts, scaling=0.25, valid=RAGGED)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    assert (got[0].masked_fill(RAGGED[:, None, :, None], 0) == 0).all()


def test_a_request_of_padding_alone_is_zero() -> None:
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1] = False
    check(*draw(2, 1, 2, 12, 8), valid=valid)


@every_dtype
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.sampled(40)
def test_softcap_and_sinks(softcap: float | None, sinks: Tensor | None, dtype: torch.dtype) -> None:
    check(*draw(5, 2, 2, 40, 16), softcap=softcap, sinks=sinks, dtype=dtype)
    check(*draw(5, 2, 2, 40, 16), softcap=softcap, sinks=sinks, valid=RAGGED, dtype=dtype)


@every_dtype
@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.sampled(8)
def test_masks(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(3, 1, length, length, generator=generator) > 0.6
    # a query that sees nothing, and one that sees what follows it
    mask[0, 0, 3] = False
    mask[1, 0, 0, 5:] = True
    parts = draw(3, 2, 2, length, 16)
    check(*parts, mask=mask, dtype=dtype)
    check(*parts, mask=mask[:1].expand(3, -1, -1, -1), sinks=SINKS, dtype=dtype)
    check(*parts, mask=mask.mT, valid=(RAGGED[1:4, :1] | (torch.arange(length) > 9)), dtype=dtype)


@every_dtype
@pytest.mark.parametrize("observation_window", [None, 3])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.sampled(40)
def test_a_past_of_different_lengths_per_head(
    length: int, sinks: Tensor | None, observation_window: int | None, dtype: torch.dtype
) -> None:
    past = hand_past(HIGH, LOW, WINDOW, dtype=dtype)
    options = {"sinks": sinks, "observation_window": observation_window, "dtype": dtype}
    check(*draw(3, 2, 2, length, 16), *past, **options)
    check(*draw(3, 2, 2, length, 16), *past, valid=RAGGED[:3, -length:], **options)


@pytest.mark.sampled(40)
def test_a_past_of_several_tiles(threads: None) -> None:
    past = hand_past([[300, 0], [31, 200]], [[40, 500], [220, 0]], [21, 5])
    check(*draw(2, 2, 3, 70, 16), *past)
    check(*draw(2, 2, 3, 70, 16), *past, mask=torch.rand(2, 1, 70, 70) > 0.5, softcap=20.0)


@every_dtype
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.sampled(40)
def test_every_number_of_bits(bits: int, dtype: torch.dtype) -> None:
    precisions = {"high": Precision(16, bits, 1, 2), "low": Precision(bits, min(bits, 8), 4, 1)}
    past = hand_past(HIGH, LOW, WINDOW, key_dim=32, value_dim=64, dtype=dtype, **precisions)
    check(*draw(3, 2, 2, 9, 32, 64), *past, dtype=dtype)


@every_dtype
@pytest.mark.sampled(6)
def test_a_past_in_narrow_pages(dtype: torch.dtype) -> None:
    options = {"high": Precision(6, 4, 1, 2), "low": Precision(5, 3), "metadata_bits": 16, "position_bytes": 2}
    past = hand_past(HIGH, LOW, WINDOW, key_dim=32, value_dim=64, dtype=dtype, **options)
    check(*draw(3, 2, 2, 9, 32, 64), *past, dtype=dtype)


@every_dtype
@pytest.mark.sampled(6)
def test_exact_tokens_between_the_stored_and_the_new_ones(dtype: torch.dtype) -> None:
    query, key, value = (part.to(dtype) for part in draw(3, 2, 2, 40, 16))
    past, stored_key, stored_value, there = hand_past(HIGH, LOW, WINDOW, dtype=dtype)
    shown = RAGGED[:3, None, :30].expand(-1, 2, -1)
    between = [part[:, :, :30].masked_fill(~shown[..., None], torch.nan) for part in (key, value)]
    new = (query[:, :, 30:], key[:, :, 30:], value[:, :, 30:])
    names = ("past_key", "past_value", "past_valid")
    for stored in (None, past):
        got = attend_prompt(
            native.prefill_attention, *new, scaling=0.25, past=stored, **dict(zip(names, (*between, shown)))
        )
        before = (between[0].nan_to_num(), between[1].nan_to_num(), shown)
        if stored is not None:
            parts = (as_read(stored_key, dtype), as_read(stored_value, dtype), there)
            before = [torch.cat(pair, dim=2) for pair in zip(parts, before)]
        assert_close(got, dense(*new, 0.25, **dict(zip(names, before))), dtype)


@every_dtype
def test_large_logits_do_not_overflow(dtype: torch.dtype) -> None:
    query, key, value = draw(1, 1, 2, 20, 16)
    check(query * 300, key * 10, value, dtype=dtype)


@every_dtype
def test_tensors_of_any_strides(dtype: torch.dtype) -> None:
    query, key, value = (part.to(dtype) for part in draw(2, 2, 2, 20, 16))
    expected = attend_prompt(native.prefill_attention, query, key, value, scaling=0.25)
    apart = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (query, key, value)]
    turned = [part.mT.contiguous().mT for part in (query, key, value)]
    for parts in (apart, turned):
        got = attend_prompt(native.prefill_attention, *parts, scaling=0.25)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    parts = [part.float() for part in draw(1, 2, 2, 700, 16)]
    expected = attend_prompt(native.prefill_attention, *parts, scaling=0.25)
    try:
        for count in (2, 5):
            torch.set_num_threads(count)
            got = attend_prompt(native.prefill_attention, *parts, scaling=0.25)
            assert all(torch.equal(a, b) for a, b in zip(got, expected))
    finally:
        torch.set_num_threads(1)


@pytest.mark.sampled(16)
def test_more_tokens_than_a_full_block_has_room_for() -> None:
    length, dim = 30000, 8
    query, key, value = (part.float() for part in draw(1, 1, 1, length, dim))
    # all queries but the last few leave no trace
    query[:, :, :-20] = 0
    output, received = attend_prompt(native.prefill_attention, query, key, value, scaling=1.0, observation_window=20)
    logits = query[0, 0, -20:].double() @ key[0, 0].double().T
    later = torch.arange(length) > torch.arange(length - 20, length)[:, None]
    probabilities = logits.masked_fill(later, -torch.inf).softmax(-1)
    expected = probabilities @ value[0, 0].double()
    assert (output[0, 0, -20:].double() - expected).norm() <= 1e-5 * expected.norm()
    given = probabilities[:, :-20].sum(0) * torch.arange(length - 1, 19, -1) / 20
    torch.testing.assert_close(received[0, 0, :-20].double(), given, rtol=1e-4, atol=1e-5)
    mean = value[0, 0, : length - 20].double().cumsum(0) / torch.arange(1, length - 19)[:, None]
    assert (output[0, 0, :-20].double() - mean).norm() <= 1e-4 * mean.norm()


@pytest.mark.parametrize("bad", [-1, 0, 1 << 20, 2**31 - 1])
@pytest.mark.sampled(6)
def test_entries_outside_the_pool_are_refused(bad: int) -> None:
    past = hand_past(HIGH, LOW, WINDOW)[0]
    past.rows.page_table[0, 0, 0] = bad
    parts = [part.float() for part in draw(3, 2, 2, 9, 16)]
    with pytest.raises(CorruptMemoryError, match="page table"):
        attend_prompt(native.prefill_attention, *parts, scaling=0.25, past=past)


def test_counts_beyond_the_longest_row_are_refused() -> None:
    past = hand_past(HIGH, LOW, WINDOW)[0]
    parts = [part.float() for part in draw(3, 2, 2, 9, 16)]
    with pytest.raises(CorruptMemoryError, match="counts more"):
        attend_prompt(native.prefill_attention, *parts, scaling=0.25, past=replace(past, stored=past.stored - 1))


def test_tensors_that_do_not_fit_are_named() -> None:
    query, key, value = (part.float() for part in draw(1, 2, 2, 9, 16))
    with pytest.raises(ValueError, match="key"):
        attend_prompt(native.prefill_attention, query, key[..., :8], value, scaling=0.25)
    with pytest.raises(ValueError, match="value"):
        attend_prompt(native.prefill_attention, query, key, value[:, :, :8], scaling=0.25)
    with pytest.raises(ValueError, match="valid together"):
        attend_prompt(native.prefill_attention, query, key, value, scaling=0.25, past_key=key, past_value=value)
    with pytest.raises(ValueError, match="stored"):
        past = hand_past([[5, 0]], [[7, 0]], [4], key_dim=32)[0]
        attend_prompt(native.prefill_attention, query, key, value, scaling=0.25, past=past)


@pytest.mark.parametrize("seed", range(int(os.environ.get("DIFFKV_FUZZ_SEEDS", "3"))))
@pytest.mark.sampled(40)
def test_random_prompts(seed: int, threads: None) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    batch, heads, group, length = number(1, 4), number(1, 3), number(1, 6), number(2, 330)
    dim, value_dim = 8 * number(1, 17), 8 * number(1, 17)
    counts = [[[number(0, 90) for _ in range(heads)] for _ in range(batch)] for _ in range(2)]
    dtype = list(TOLERANCE)[seed % 3]
    window = [number(0, 20) for _ in range(batch)]
    past = hand_past(*counts, window, key_dim=dim, value_dim=value_dim, dtype=dtype, seed=seed)
    options: dict[str, Any] = {"valid": torch.rand(batch, length, generator=generator) > 0.2}
    options["valid"][:, -1] = True
    if seed % 2:
        options["observation_window"] = number(1, length)
    check(*draw(batch, heads, group, length, dim, value_dim, seed), *past, dtype=dtype, **options)
