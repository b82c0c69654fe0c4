"""Projections as people load them: each gives the text of `DynamicCache`, or an error before the first token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from latent_models import LENGTHS, assert_same, dense, latent_model, lossless, text
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.cache.latent_weights import Projection, is_plain, weight_of

pytestmark = pytest.mark.oldest


def attentions(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def replaced(make: Callable[[nn.Linear], nn.Module], **options: Any) -> PreTrainedModel:
    """A tiny model whose projections of latents `make` has replaced."""
    model = latent_model("deepseek_v3", **options)
    for attention in attentions(model):
        attention.kv_b_proj = make(attention.kv_b_proj)
    return model.eval()


class Int8(nn.Module):
    """Codes with a scale for each output, as a quantised checkpoint has them; `.weight` is no weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).mT


class Fp8(nn.Linear):
    """A subclass of `nn.Linear` with 8-bit floats and a scale, as DeepSeek's own checkpoints have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = float(linear.weight.detach().abs().max() / 448)
        codes = (linear.weight.detach() / self.scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).mT


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda module, given, output: 0.5 * output)
    return linear


def with_method(linear: nn.Linear) -> nn.Linear:
    forward = linear.forward
    linear.forward = lambda x: -forward(x)
    return linear


def with_parametrization(linear: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(linear, "weight", Doubled())
    return linear


def transposed(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().mT.contiguous().mT)
    return linear


@pytest.mark.parametrize(
    "make", [Int8, Fp8, hooked, with_method, with_parametrization, transposed], ids=lambda make: make.__name__
)
def test_other_projections(make: Callable[[nn.Linear], nn.Module]) -> None:
    model = replaced(make)
    assert not is_plain(attentions(model)[0].kv_b_proj)
    assert_same(text(model, lossless(model)), text(model, dense(model)))


def test_a_plain_projection_is_not_copied() -> None:
    attention = attentions(latent_model("deepseek_v3"))[0]
    latent = torch.zeros(1, 1, 1, attention.kv_lora_rank)
    assert weight_of(attention.kv_b_proj, latent).data_ptr() == attention.kv_b_proj.weight.data_ptr()


def test_absorbing_is_what_expanding_is() -> None:
    """Products and weighted sums of expanded tokens, computed one by one in float64."""
    attention = attentions(latent_model("deepseek_v3", dtype=torch.float64))[0]
    draw = torch.Generator().manual_seed(0)
    latent, rope, query = (
        torch.randn(2, heads, tokens, dim, generator=draw, dtype=torch.float64)
        for heads, tokens, dim in ((1, 7, 16), (1, 7, 8), (4, 3, 16))
    )
    key, value = attention.expand_kv(latent, rope)
    weights = torch.rand(2, 4, 3, 7, generator=draw, dtype=torch.float64)
    projection = Projection.of(attention, latent)
    states = torch.cat([rope, latent], dim=-1)
    products = torch.einsum("bhqd,bktd->bhqt", projection.absorb(query), states)
    torch.testing.assert_close(products, torch.einsum("bhqd,bhtd->bhqt", query, key))
    sums = torch.einsum("bhqt,bktd->bhqd", weights, latent)
    torch.testing.assert_close(projection.values(sums), torch.einsum("bhqt,bhtd->bhqd", weights, value))


def lora_model(rank: int = 4) -> Any:
    """A tiny model with two adapters on its projections, "default" and "other", whose weights are not zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, target_modules=["kv_b_proj"], lora_alpha=16)
    model = peft.get_peft_model(latent_model("deepseek_v3"), config)
    model.add_adapter("other", config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def test_lora_is_not_forgotten() -> None:
    """With one adapter, another, none, and merged: each has a text of its own, the one with `DynamicCache`."""
    model = lora_model()
    inner, logits = model.get_base_model(), []

    def check() -> None:
        expected = text(inner, dense(inner))
        assert_same(text(inner, lossless(inner)), expected)
        logits.append(expected[1][0])

    check()
    model.set_adapter("other")
    check()
    with model.disable_adapter():
        check()
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    with torch.no_grad():
        attentions(inner)[0].kv_b_proj.lora_B["other"].weight.mul_(2)
    check()
    torch.testing.assert_close(logits[1], logits[3], rtol=0, atol=1e-4)
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert all((logits[i] - logits[j]).abs().max() > 1e-2 for i, j in pairs)


def test_an_adapter_that_changes_between_steps() -> None:
    """A step uses the adapter that is active when it runs."""
    model = lora_model()
    inner = model.get_base_model()
    inner.set_attn_implementation("diffkv")
    ids, found = torch.tensor([[5, 6, 7, 8, 9]]), []
    for cache in (dense(inner), lossless(inner)):
        model.set_adapter("default")
        inner(ids[:, :4], past_key_values=cache)
        model.set_adapter("other")
        found.append(inner(ids[:, 4:], past_key_values=cache).logits)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)


def test_bitsandbytes_of_4_bits() -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def quantised(linear: nn.Linear) -> nn.Module:
        size = (linear.in_features, linear.out_features)
        made = bnb.nn.Linear4bit(*size, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        made.weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
        made = made.to("cpu")
        expected.append(bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state))
        return made

    expected: list[Tensor] = []
    # a row has at least one block of 64 weights, which the kernels for AVX512-BF16 need
    model = replaced(quantised, kv_lora_rank=64)
    found, of_dense = text(model, lossless(model)), text(model, dense(model))
    projections = [attention.kv_b_proj for attention in attentions(model)]
    # these kernels round codes, scales and products to bfloat16
    rounds = any(getattr(each.weight.quant_state, "packing_format_for_cpu", False) for each in projections)
    assert_same(found, of_dense, atol=0.05 if rounds else 1e-3)
    for projection, weight in zip(projections, expected):
        read = weight_of(projection, torch.zeros(1, 1, 1, 64))
        torch.testing.assert_close(read, weight, rtol=3 * 2**-8 if rounds else 1e-5, atol=1e-6)


def test_bitsandbytes_of_8_bits() -> None:
    """Its matrix is the one of its codes. On a CPU, Transformers itself cannot run it on latents of four dimensions."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = nn.Linear(32, 64, bias=False)
    made = bnb.nn.Linear8bitLt(32, 64, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    made = made.to("cpu")
    weight = weight_of(made, torch.zeros(1, 1, 1, 32))
    step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    assert ((weight - linear.weight.detach()).abs() <= 0.6 * step).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda linear: nn.Linear(linear.in_features, linear.out_features, bias=True), "bias"),
        (lambda linear: nn.Sequential(linear, nn.Tanh()), "not a plain matrix product"),
    ],
)
def test_projections_that_cannot_be_absorbed(make: Callable[[nn.Linear], nn.Module], message: str) -> None:
    model = replaced(make)
    cache = lossless(model)
    with pytest.raises(UnsupportedModelError, match=message):
        text(model, cache)
    assert cache.get_seq_length() == 0


def test_tensor_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_diffkv.cache import devices, latent

    model = latent_model("deepseek_v3")
    split = devices.TensorParallel(0, 2, None)
    monkeypatch.setattr(latent.TensorParallel, "of", classmethod(lambda cls, model: split))
    with pytest.raises(UnsupportedModelError, match="tensor parallelism"):
        text(model, lossless(model))


def test_offloaded_weights() -> None:
    """Hooks of accelerate bring the weights when the projection runs; at rest they are on the meta device."""
    accelerate = pytest.importorskip("accelerate")
    model = latent_model("deepseek_v3")
    expected = text(model, dense(model))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert attentions(model)[0].kv_b_proj.weight.is_meta
    assert_same(text(model, lossless(model), lengths=LENGTHS), expected)
