"""Half-precision prompts on CPUs, with PyTorch's flash attention, against a dense float64 softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chosen_ops import prefill_attention
from hand_past import attend_prompt
from prompt_cases import Attention, PromptTests
from test_prefill_attention_reference import dense, draw

from hf_diffkv.ops import backend
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.prefill_attention import cpu as op
from hf_diffkv.ops.prefill_attention import flash

# one rounding of the output, in addition to the rounding of probabilities
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def threads() -> None:
    """Leaves the number of threads unchanged."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the op's implementations that are called; none of them runs."""
    names: list[str] = []
    for name in ("flash", "native", "reference"):
        monkeypatch.setattr(getattr(op, name), "prefill_attention", lambda *_, name=name, **options: names.append(name))
    return names


class TestFlash(PromptTests):
    op = staticmethod(flash.prefill_attention)

    def assert_close(self, got: Attention, expected: Attention, dtype: torch.dtype) -> None:
        torch.testing.assert_close(got[0].double(), expected[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(got[1].double(), expected[1], rtol=2e-4, atol=1e-5)


def test_heads_too_wide_for_the_kernels_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is used even if kernels run, as on a GPU for Gemma 4's full-attention layers."""
    monkeypatch.setattr(backend, "use_kernels", lambda device, dtype: True)
    query, key, value = (part.float() for part in draw(1, 1, 2, 9, 512))
    output, received = attend_prompt(prefill_attention, query, key, value, scaling=0.05)
    expected = dense(query, key, value, 0.05)
    torch.testing.assert_close(output.double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(received.double(), expected[1], rtol=1e-4, atol=1e-4)


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
    monkeypatch.setattr(op.native, "can_attend", lambda *tensors: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx, raising=False)
    parts = draw(1, 1, 1, 8, 16)
    for dtype, options in ((torch.bfloat16, {}), (torch.bfloat16, {"softcap": 5.0}), (torch.float16, {})):
        attend_prompt(prefill_attention, *(part.to(dtype) for part in parts), scaling=0.25, **options)
    with use_backend("native"):
        attend_prompt(prefill_attention, *(part.bfloat16() for part in parts), scaling=0.25)
    assert called == ["flash" if has_amx else "native", "native", "native", "native"]
