"""Decode attention in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from decode_cases import Case, DecodeTests

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention import reference
from hf_diffkv.pages import LOW, fields
from hf_diffkv.precision import CODE_BITS


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def threads() -> None:
    """Leaves the number of threads unchanged."""


class TestReference(DecodeTests):
    pass


@pytest.mark.parametrize("slack", [1, 7, 50])
def test_the_host_may_know_the_counts_only_roughly(slack: int) -> None:
    Case([5, 0, 17, 0, 700], [9, 33, 0, 0, 600], [1, 4, 5, 2, 3]).check(slack=slack)


def test_a_single_token() -> None:
    case = Case([0], [0], [1])
    case.check()
    torch.testing.assert_close(case.run()[0, 0], case.window_value[0, 0, int(case.length[0] - 1) % 5])


@pytest.mark.parametrize("bits", [bits for bits in CODE_BITS if len(fields(bits)) > 1])
@pytest.mark.parametrize("dim", [8, 24, 40, 80, 96, 128])
def test_codes_of_several_fields_in_rows_of_any_alignment(bits: int, dim: int) -> None:
    Case([20, 0], [9, 33], [1, 4], dim=dim, precisions=(Precision(bits, bits),) * 2, page_bytes=None).check()


def test_one_long_and_many_short_rows() -> None:
    Case([700] + [2] * 14, [500] + [1] * 14, [5] + [1, 2, 3, 4, 5, 1, 2] * 2).check()


def test_more_than_six_thousand_tokens_in_a_head() -> None:
    """Checks scores and outputs with pieces and chunks of arbitrary ends, and a dominant token in the last page."""
    case = Case([3000, 10], [3333, 0], [5, 1], dim=8, page_bytes=None)
    page, slot = case.store.place(LOW, 0, 3332)
    key = case.query[0, 0] * 4
    case.store.write(LOW, 0, 3332, key, case.draw(8), 0.0, 0)
    case.check()
    assert case.store.read(LOW, 0, 3332)[2] > 0.5


@pytest.mark.parametrize("chunk_elements", [1, 2000])
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk_elements)
    Case([300, 0, 17], [9, 250, 0], [1, 4, 5]).check()


def test_large_logits_do_not_overflow() -> None:
    case = Case([5, 0, 17], [9, 33, 0], [1, 4, 5])
    case.query *= 1000
    case.check(tolerance=1e-7)
