"""The projection with which a model's layer expands latents into keys and values, as one dense matrix."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UnsupportedModelError

# dense copies of projections that are not plain, by module, with the state that each was made from
_copies: weakref.WeakKeyDictionary[nn.Module, tuple[tuple, Tensor]] = weakref.WeakKeyDictionary()
_INTERNAL = frozenset(vars(nn.Module()))
# a quantised projection rounds its inputs; beyond this relative error, it does not count as a matrix product
LARGEST_ERROR = 0.1


@dataclass(frozen=True, eq=False)
class Projection:
    """Projection of latents of one attention layer.

    Attributes:
        weight: [heads, nope_dim + value_dim, rank]; for each head the rows of its key, then those of its value.
        nope_dim: elements of a key that are computed from the latent.
    """

    weight: Tensor
    nope_dim: int

    @classmethod
    def of(cls, module: nn.Module, latent: Tensor) -> Projection:
        """Reads the projection of an attention module.

        Args:
            latent: latents of the layer, [batch, 1, tokens, rank], whose dtype and device the weight takes on.

        Raises:
            UnsupportedModelError: the module's projection is not a matrix product with unsplit weights.
        """
        rank, nope_dim = latent.shape[-1], module.qk_nope_head_dim
        weight = weight_of(module.kv_b_proj, latent)
        return cls(weight.view(-1, nope_dim + module.v_head_dim, rank), nope_dim)

    def absorb(self, query: Tensor) -> Tensor:
        """Turns the model's queries into absorbed ones.

        Args:
            query: [batch, heads, tokens, nope_dim + rope_dim].

        Returns:
            The rotary query and the query of latents, [batch, heads, tokens, rope_dim + rank].
        """
        batch, heads, tokens, dim = query.shape
        nope, rope = query.split([self.nope_dim, dim - self.nope_dim], dim=-1)
        by_head = nope.transpose(0, 1).reshape(heads, batch * tokens, self.nope_dim)
        absorbed = torch.bmm(by_head, self.weight[:, : self.nope_dim])
        absorbed = absorbed.view(heads, batch, tokens, -1).transpose(0, 1)
        return torch.cat([rope, absorbed], dim=-1)

    def values(self, output: Tensor) -> Tensor:
        """Turns weighted sums of latents, [batch, heads, tokens, rank], into outputs [batch, heads, tokens, value_dim].

        The weight comes first in the product, because products with a transposed view of it are far slower on CPUs.
        """
        batch, heads, tokens, rank = output.shape
        by_head = output.transpose(0, 1).reshape(heads, batch * tokens, rank)
        values = torch.bmm(self.weight[:, self.nope_dim :], by_head.mT)
        return values.view(heads, -1, batch, tokens).permute(2, 0, 3, 1)

    def expands(self, tokens: int, past: int) -> bool:
        """Returns whether expanding all latents takes fewer operations than absorbing queries.

        Args:
            tokens: number of new tokens.
            past: number of tokens before them.
        """
        _, dim, rank = self.weight.shape
        return tokens > 1 and (past == 0 or tokens * (2 * rank - dim) > dim * rank)


def weight_of(linear: nn.Module, latent: Tensor) -> Tensor:
    """Returns the weight of a projection without bias, [outputs, rank], in the dtype and on the device of `latent`.

    A plain `nn.Linear` gives its own weight. Any other module, such as a quantised one or one with LoRA adapters, is
    applied to the unit vectors. The copy is kept until the module's tensors or options change.

    Raises:
        UnsupportedModelError: the weight is split among processes, or the module is not a product with a finite matrix.
    """
    if is_plain(linear) and linear.weight.device == latent.device:
        return linear.weight.to(latent.dtype)
    if any(hasattr(parameter, "to_local") for parameter in linear.parameters()):
        raise UnsupportedModelError(
            "this model's latent projections are split among processes (tensor parallelism), which DiffKVCache does "
            "not support; load the model without tp_plan, or use DynamicCache."
        )
    if torch.compiler.is_compiling():
        raise UnsupportedModelError(
            f"the latent projection is a {type(linear).__name__}, whose weights a compiled forward cannot read; run "
            "the model uncompiled, or use DynamicCache."
        )
    state = (latent.dtype, latent.device, latent.shape[-1], *_state(linear))
    known = _copies.get(linear)
    if known is None or known[0] != state:
        weight = _dense(linear, latent)
        # quantised modules prepare themselves on first use, which may have changed the module
        known = _copies[linear] = ((*state[:3], *_state(linear)), weight)
    return known[1]


def is_plain(linear: nn.Module) -> bool:
    """Returns whether a module is a product with its own weight and nothing else."""
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) is nn.Parameter
        and linear.weight.is_floating_point()
        and linear.weight.itemsize > 1
        and not linear.weight.is_meta
        and linear.weight.is_contiguous()
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        # accelerate's hooks replace the method
        and "forward" not in linear.__dict__
    )


@torch.no_grad()
def _dense(linear: nn.Module, latent: Tensor) -> Tensor:
    """Applies a module to the unit vectors, to zero, and to a probe that shows whether it is a matrix product."""
    rank, dtype, device = latent.shape[-1], latent.dtype, latent.device
    # as large as typical latents, which are normalised
    probe = torch.arange(1, rank + 1, dtype=torch.float32, device=device).mul(2.4).sin().mul(2**0.5)
    inputs = torch.cat([torch.eye(rank, out=probe.new_empty(0)), probe.new_zeros(1, rank), probe[None]]).to(dtype)
    rows, zero, probed = linear(inputs).to(dtype).split([rank, 1, 1])
    name = type(linear).__name__
    if not bool(rows.isfinite().all()) or bool(zero.any()):
        raise UnsupportedModelError(
            f"the latent projection is a {name} with a bias or with weights that are not finite, so DiffKVCache cannot "
            "attend to latents; use DynamicCache."
        )
    expected = inputs[-1].float() @ rows.float()
    if bool((probed[0].float() - expected).norm() > LARGEST_ERROR * expected.norm()):
        raise UnsupportedModelError(
            f"the latent projection is a {name} that is not a plain matrix product, so DiffKVCache cannot attend to "
            "latents; use DynamicCache, or put the model into evaluation mode."
        )
    return rows.mT.contiguous()


def _state(linear: nn.Module) -> tuple:
    """Returns a value that changes if the module's weights, adapters or options change."""
    tensors = [*linear.parameters(), *linear.buffers()]
    options = ((type(part), *_plain(vars(part))) for part in linear.modules())
    return (*((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors), *options)


def _plain(value: Any) -> Any:
    """Returns options in a form that can be compared later; for objects, only identity counts."""
    if isinstance(value, dict):
        return tuple((name, _plain(held)) for name, held in value.items() if name not in _INTERNAL)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return id(value)
