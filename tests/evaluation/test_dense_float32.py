"""`dense:float32` against a model that was loaded in float32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from evaluated import TINY_LM
from transformers import AutoModelForCausalLM

from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session

LABEL = "dense:float32"
PROMPT, TEXTS = list(range(3, 63)), [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def bfloat16() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.bfloat16).eval()


def asked(model: Any, label: str) -> list[torch.Tensor]:
    session = Session(model, get_method(label))
    return [session.forward(PROMPT, keep=len(PROMPT)), *session.branch().ask(TEXTS)]


def test_it_gives_what_a_model_in_float32_gives(bfloat16: Any, tiny_lm: Any) -> None:
    exact, mine, rounded = asked(tiny_lm, "dense"), asked(bfloat16, LABEL), asked(bfloat16, "dense")
    for found, expected, other in zip(mine, exact, rounded):
        assert found.dtype == torch.float32 and other.dtype == torch.bfloat16
        assert found.equal(expected) and not found.bfloat16().equal(other)


@pytest.mark.parametrize("failing", [False, True])
def test_the_model_is_as_it_was(failing: bool, bfloat16: Any) -> None:
    before = {name: (tensor, tensor.data_ptr(), tensor.dtype) for name, tensor in bfloat16.state_dict().items()}
    expected = asked(bfloat16, "dense")
    with pytest.raises(KeyError) if failing else nullcontext(), get_method(LABEL).attached(bfloat16, None):
        assert {parameter.dtype for parameter in bfloat16.parameters()} == {torch.float32}
        assert bfloat16.lm_head.weight is bfloat16.model.embed_tokens.weight
        if failing:
            raise KeyError
    after = bfloat16.state_dict()
    assert list(after) == list(before)
    for name, (tensor, address, dtype) in before.items():
        assert (after[name].data_ptr(), after[name].dtype) == (address, dtype)
        assert after[name].equal(tensor)
    assert all(found.equal(given) for found, given in zip(asked(bfloat16, "dense"), expected))


def test_its_bytes_are_twice_those_of_bfloat16(bfloat16: Any) -> None:
    held = {}
    for label in ("dense", LABEL):
        session = Session(bfloat16, get_method(label))
        session.forward(PROMPT)
        held[label] = session.held().bytes
    assert held[LABEL] == 2 * held["dense"] > 0


def test_quantised_weights_are_refused(bfloat16: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "is_quantized", True, raising=False)
    with pytest.raises(ValueError, match="needs weights that are not quantised"):
        Session(bfloat16, get_method(LABEL))
