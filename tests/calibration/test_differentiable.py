"""Gradients through layers with quantised weights, against those of plain linear layers with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_diffkv.calibration import differentiable as differentiable_module
from hf_diffkv.calibration.differentiable import differentiable
from hf_diffkv.evaluation.errors import EvaluationError
from tests.tiny_models import tiny_model


class Quantised(nn.Module):
    """A linear layer of integers whose product has no gradient."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8))
        self.bias = nn.Parameter(torch.randn(outputs, generator=generator, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, given: Tensor) -> Tensor:
        return given @ self.weight.to(given.dtype).mT + self.bias


class Experts(nn.Module):
    """Quantised weights of no linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("blocks", torch.zeros(3, 4, 5, dtype=torch.uint8))


@pytest.mark.parametrize("part", [1024, 3])
def test_the_gradient_is_that_of_the_weights(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differentiable_module, "SINGLE_INPUTS", part)
    layer = Quantised(7, 5)
    given = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    with differentiable(nn.Sequential(layer)):
        output = layer(given)
        (found,) = torch.autograd.grad(output.square().sum(), given)
    expected = given @ layer.weight.double().mT + layer.bias
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), given)[0])
    assert "forward" not in vars(layer) and not layer(given).requires_grad


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
def test_plain_models_stay_as_they_are(family: str) -> None:
    # the second has a mask of bools among its buffers
    model = tiny_model(family, dtype=torch.bfloat16)
    with differentiable(model):
        assert all("forward" not in vars(module) for module in model.modules())


def test_modules_that_are_no_linear_layers() -> None:
    layer = Quantised(7, 5)
    with (
        pytest.raises(EvaluationError, match=r"Experts \(1\)"),
        differentiable(nn.Sequential(layer, Experts())),
    ):
        pass
    assert "forward" not in vars(layer)


def test_weights_of_four_bits_on_a_cpu() -> None:
    nf4 = pytest.importorskip("bitsandbytes.nn")
    torch.manual_seed(0)
    plain = nn.Linear(64, 128, dtype=torch.bfloat16)
    layer = nf4.Linear4bit(64, 128, bias=True, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.load_state_dict(plain.state_dict())
    layer = layer.to("cpu").eval()
    given = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        # weights are arranged for the processor
        weight = (layer(torch.eye(64, dtype=torch.bfloat16)) - layer(torch.zeros(1, 64, dtype=torch.bfloat16))).mT
    given.requires_grad_()
    with differentiable(nn.Sequential(layer)):
        (found,) = torch.autograd.grad(layer(given).float().square().sum(), given)
    output = given.detach() @ weight.mT + plain.bias.detach()
    torch.testing.assert_close(found.float(), 2 * (output.float() @ weight.float()), rtol=0.05, atol=0.05)
