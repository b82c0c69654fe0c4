"""Gradients through layers with quantised weights, whose kernels often lack them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..evaluation.errors import EvaluationError

# number of a layer's inputs whose weights one product recovers
SINGLE_INPUTS = 1024
# dtypes of quantised weights; outside linear layers, 32-bit integers are positions and the like
QUANTISED = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
QUANTISED_LINEAR = (*QUANTISED, torch.int32)


class _Product(torch.autograd.Function):
    """A linear layer whose gradient is computed from its outputs for single inputs."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.layer, ctx.like = layer, given.new_zeros(1, given.shape[-1])
        return layer(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        bias, count = ctx.layer(ctx.like), ctx.like.shape[-1]
        parts = []
        for start in range(0, count, SINGLE_INPUTS):
            rows = torch.arange(start, min(start + SINGLE_INPUTS, count), device=gradient.device)
            single = ctx.like.expand(len(rows), -1).clone()
            single[torch.arange(len(rows)), rows] = 1.0
            parts.append(gradient @ (ctx.layer(single) - bias).mT)
        return torch.cat(parts, dim=-1), None


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Lets gradients pass through layers with quantised weights within the block.

    Raises:
        EvaluationError: weights are quantised in a module that is not a linear layer.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            linear = hasattr(module, "in_features") and hasattr(module, "out_features")
            if not _is_quantised(module, QUANTISED_LINEAR if linear else QUANTISED):
                continue
            if not linear:
                raise EvaluationError(
                    f"heads are measured by gradients, but {type(module).__name__} ({name}) has none; load the model "
                    "without quantised weights."
                )
            stack.enter_context(_passing_gradients(module))
        yield


def _is_quantised(module: nn.Module, dtypes: tuple[torch.dtype, ...]) -> bool:
    weights = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(weight.ndim > 1 and weight.dtype in dtypes for weight in weights)


@contextmanager
def _passing_gradients(module: nn.Module) -> Iterator[None]:
    plain, own = module.forward, vars(module).get("forward")
    module.forward = lambda given: _Product.apply(given, plain)
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
