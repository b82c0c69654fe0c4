"""Prompt attention in native code, by every instruction set, against a dense float64 softmax."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_past import attend_prompt, hand_past
from native_code import needs_native
from prompt_cases import HIGH, LOW, SINKS, WINDOW, Attention, PromptTests
from test_prefill_attention_reference import RAGGED, draw
from torch import Tensor

from hf_diffkv.native.library import CorruptMemoryError, instructions
from hf_diffkv.ops.prefill_attention import native
from hf_diffkv.precision import SUPPORTED_BITS, Precision

pytestmark = [needs_native, pytest.mark.usefixtures("instructions")]
# of the norm of the output; that of half precision has the output's own rounding in it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2e-3}


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class TestNative(PromptTests):
    op = staticmethod(native.prefill_attention)

    def as_read(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        pairs = dtype == torch.bfloat16 and instructions() == "avx512bf16"
        return part.nan_to_num().to(dtype if pairs else torch.float32)

    def assert_close(self, got: Attention, expected: Attention, dtype: torch.dtype) -> None:
        assert (got[0].double() - expected[0]).norm() <= TOLERANCE[dtype] * expected[0].norm()
        torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-6)


def check(*inputs: Any, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    TestNative().check(*inputs, dtype=dtype, **options)


@pytest.mark.parametrize("dim, value_dim", [(64, 8), (16, 72), (7, 5)])
def test_values_of_another_dim(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(*draw(1, 2, 2, 40, dim, value_dim), dtype=dtype)


@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.sampled(40)
def test_softcap_and_sinks(softcap: float | None, sinks: Tensor | None, dtype: torch.dtype) -> None:
    check(*draw(5, 2, 2, 40, 16), softcap=softcap, sinks=sinks, dtype=dtype)
    check(*draw(5, 2, 2, 40, 16), softcap=softcap, sinks=sinks, valid=RAGGED, dtype=dtype)


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


@pytest.mark.sampled(40)
def test_a_past_of_several_tiles(threads: None) -> None:
    past = hand_past([[300, 0], [31, 200]], [[40, 500], [220, 0]], [21, 5])
    check(*draw(2, 2, 3, 70, 16), *past)
    check(*draw(2, 2, 3, 70, 16), *past, mask=torch.rand(2, 1, 70, 70) > 0.5, softcap=20.0)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.sampled(40)
def test_every_number_of_bits(bits: int, dtype: torch.dtype) -> None:
    precisions = {"high": Precision(16, bits, 1, 2), "low": Precision(bits, min(bits, 8), 4, 1)}
    past = hand_past(HIGH, LOW, WINDOW, key_dim=32, value_dim=64, dtype=dtype, **precisions)
    check(*draw(3, 2, 2, 9, 32, 64), *past, dtype=dtype)


@pytest.mark.sampled(6)
def test_a_past_in_narrow_pages(dtype: torch.dtype) -> None:
    options = {"high": Precision(6, 4, 1, 2), "low": Precision(5, 3), "metadata_bits": 16, "position_bytes": 2}
    past = hand_past(HIGH, LOW, WINDOW, key_dim=32, value_dim=64, dtype=dtype, **options)
    check(*draw(3, 2, 2, 9, 32, 64), *past, dtype=dtype)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.sampled(6)
def test_nan_of_a_query_stays_in_its_output(sinks: Tensor | None, softcap: float | None, dtype: torch.dtype) -> None:
    parts = [part.to(dtype) for part in draw(2, 2, 2, 300, 16)]
    options = {"scaling": 0.25, "softcap": softcap, "sinks": sinks}
    expected = attend_prompt(native.prefill_attention, *parts, **options)
    parts[0][0, 1, 270, 3] = torch.nan
    output, received = attend_prompt(native.prefill_attention, *parts, **options)
    assert output[0, 1, 270].isnan().all()
    output[0, 1, 270] = expected[0][0, 1, 270]
    assert torch.equal(output, expected[0])
    assert (received <= expected[1]).all()


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
