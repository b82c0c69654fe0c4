"""Output heads in 4 bits: their largest logits are exact, and so are the weights that others read or change."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_diffkv.running.models import load_model
from hf_diffkv.running.output_head import CANDIDATES, SMALLEST_VOCABULARY, FourBitHead, quantize_head

WIDTH, VOCABULARY = 64, SMALLEST_VOCABULARY + 100


@pytest.fixture(autouse=True)
def with_avx512bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bitsandbytes unpacks elsewhere has the same values."""
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: True)


def linear(bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype).eval()
    return head.requires_grad_(False)


def model(tied: bool = True, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=tied, **sizes)).eval()


def hidden(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_largest_logits_are_exact_and_the_others_near(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    plain = linear(bias, dtype)
    state = hidden(*shape, dtype=dtype)
    logits = FourBitHead(plain)(state)
    exact = state.double() @ plain.weight.double().T + (plain.bias.double() if bias else 0)
    assert logits.shape == exact.shape and logits.dtype == dtype
    error = (logits.double() - exact).abs().flatten()
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    assert int((error <= rounding * exact.abs().flatten() + rounding).sum()) >= CANDIDATES
    # the candidates of 4 bits have the largest logits among them
    best = exact.flatten().topk(20).indices
    assert float(error[best].max()) <= rounding * float(exact.abs().max())
    # the root of the mean square error of nf4 is a tenth of the weights
    assert 0.02 < float(error.square().mean().sqrt() / exact.std()) < 0.15


def test_several_states_take_exact_weights() -> None:
    plain = linear()
    for state in (hidden(3), hidden(2, 4), hidden(0)):
        assert torch.equal(FourBitHead(plain)(state), plain(state))


def test_gradients_take_exact_weights() -> None:
    plain, state = linear(dtype=torch.float32), hidden(1, dtype=torch.float32).requires_grad_()
    FourBitHead(plain)(state).sum().backward()
    assert state.grad is not None
    assert torch.allclose(state.grad[0], plain.weight.sum(0), atol=1e-4)


def test_changed_weights_are_quantised_anew() -> None:
    plain, state = linear(), hidden(1)
    head = FourBitHead(plain)
    head(state)
    with torch.no_grad():
        plain.weight.mul_(-1)
    assert head(state).argmax() == plain(state).argmax()
    head.weight = nn.Parameter(-plain.weight, requires_grad=False)
    assert head(state).argmin() == plain(state).argmax()


@pytest.mark.parametrize("tied", [True, False])
def test_models_save_and_tie_the_weights_that_they_had(tied: bool, tmp_path: Path) -> None:
    plain = model(tied)
    quantised = copy.deepcopy(plain)
    assert quantize_head(quantised) and isinstance(quantised.lm_head, FourBitHead)
    assert (quantised.lm_head.weight is quantised.model.embed_tokens.weight) is tied
    quantised.save_pretrained(tmp_path)
    assert quantised.state_dict().keys() == plain.state_dict().keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_generate_writes_the_same_text() -> None:
    plain = model()
    quantised = copy.deepcopy(plain)
    quantize_head(quantised)
    inputs = {"input_ids": torch.arange(5, 25)[None], "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(quantised.generate(**inputs), plain.generate(**inputs))


def test_heads_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = model(vocabulary=SMALLEST_VOCABULARY - 1), model()
    assert not quantize_head(small) and type(small.lm_head) is nn.Linear
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: False)
    assert not quantize_head(large) and type(large.lm_head) is nn.Linear


@pytest.mark.parametrize(("weights", "replaced"), [("4bit", True), ("8bit", False), (None, False)])
def test_weights_in_4_bits_get_such_a_head(
    weights: str | None, replaced: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", weights=weights, quiet=True)
    assert isinstance(loaded.lm_head, FourBitHead) is replaced
    with caplog.at_level(logging.WARNING, "bitsandbytes"), torch.no_grad():
        loaded(torch.arange(5, 8)[None])
    # nothing about casts for each product
    assert not caplog.records
