"""Simulates alternatives at equal bits: other transforms of keys and values, other levels, and other rounding.

The dense cache runs a prompt. Its keys and values are then rotated, the keys centred, and all but the first 4 and the
last 32 tokens replaced by their quantised values. The documents of the dictionary and text tasks continue from there.
Scales and zero points are not rounded. The library's storage is not used.

    python benchmarks/quality/forms.py --model smollm2 --output benchmarks/results/quality/smollm2/forms
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from more_levels import SINKS, WINDOW, Simulation, quantized, write
from torch import Tensor
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.precision import Precision

DAMPING = 0.1


def nearest(x: Tensor, bits: int, groups: int, weight: Tensor) -> Tensor:
    return quantized(x, bits, groups)


def fed_back(x: Tensor, bits: int, groups: int, weight: Tensor) -> Tensor:
    """Quantises channels from last to first, each with the code that compensates for the errors of later ones (LDLQ).

    Args:
        x: [heads, tokens, dim]; weight: [heads, dim, dim], where an error e costs e weight e.
    """
    square = weight + DAMPING * weight.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(x.shape[-1])
    factor = torch.linalg.cholesky(square)
    factor = factor / factor.diagonal(dim1=1, dim2=2)[:, None]
    parts = x.unflatten(-1, (groups, -1))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    low, step = (part.expand_as(parts).flatten(-2) for part in (low, step))
    out, error = torch.empty_like(x), torch.zeros_like(x)
    for channel in range(x.shape[-1] - 1, -1, -1):
        target = x[..., channel] - (error @ factor[:, :, channel, None])[..., 0]
        code = ((target - low[..., channel]) / step[..., channel]).round().clamp(0, 2**bits - 1)
        out[..., channel] = low[..., channel] + code * step[..., channel]
        error[..., channel] = out[..., channel] - x[..., channel]
    return out


def clipped(x: Tensor, bits: int, groups: int, weight: Tensor) -> Tensor:
    """Quantises each group in the range, of six about the middle down to 70 %, with the least squared error."""
    parts = x.unflatten(-1, (groups, -1))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    best, least = parts, torch.full_like(low, torch.inf)
    for share in (1, 0.95, 0.9, 0.85, 0.8, 0.7):
        start, step = (low + high - share * (high - low)) / 2, share * (high - low).clamp(min=1e-9) / (2**bits - 1)
        found = ((parts - start) / step).round().clamp(0, 2**bits - 1) * step + start
        error = (found - parts).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best.flatten(-2)


def gaussian(x: Tensor, bits: int, groups: int, weight: Tensor) -> Tensor:
    """Quantises with the levels of least squared error for normal numbers (Lloyd, Max), scaled likewise."""
    parts = x.unflatten(-1, (groups, -1))
    levels = _gaussian_levels(bits)
    scale = parts.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-9)
    for _ in range(4):
        code = levels[torch.bucketize(parts / scale, (levels[1:] + levels[:-1]) / 2)]
        scale = ((parts * code).sum(-1, keepdim=True) / code.square().sum(-1, keepdim=True)).clamp(min=1e-9)
    return (levels[torch.bucketize(parts / scale, (levels[1:] + levels[:-1]) / 2)] * scale).flatten(-2)


def _gaussian_levels(bits: int) -> Tensor:
    numbers = torch.linspace(-5, 5, 20001)
    density = (-numbers.square() / 2).exp()
    levels = torch.erfinv((torch.arange(2**bits) * 2 + 1) / 2**bits - 1) * math.sqrt(2)
    for _ in range(200):
        place = torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add_(0, place, density)
        levels = torch.zeros_like(levels).index_add_(0, place, density * numbers) / mass
    return levels


def as_they_are(keys: Tensor, queries: Tensor) -> Tensor:
    return torch.eye(keys.shape[-1]).expand(keys.shape[0], -1, -1)


def equalised(keys: Tensor, queries: Tensor) -> Tensor:
    """Scales channels so that errors cost least: by (queries' second moment / keys')^(1/4)."""
    scale = (queries.square().mean(1) / keys.square().mean(1).clamp(min=1e-9)).clamp(min=1e-9) ** 0.25
    return torch.diag_embed(scale / scale.log().mean(-1, keepdim=True).exp())


def whitened(keys: Tensor, queries: Tensor) -> Tensor:
    """Makes the keys equally large in all directions."""
    moment = keys.mT @ keys / keys.shape[1]
    moment = moment + 1e-3 * moment.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(keys.shape[-1])
    values, vectors = torch.linalg.eigh(moment)
    return vectors @ torch.diag_embed(values.clamp(min=1e-9) ** -0.5) @ vectors.mT


@dataclass(frozen=True)
class Form:
    """A precision, how keys are scaled before their rotation, and how keys and values are rounded."""

    name: str
    precision: str
    round_key: Callable[[Tensor, int, int, Tensor], Tensor] = nearest
    round_value: Callable[[Tensor, int, int, Tensor], Tensor] = nearest
    scale_key: Callable[[Tensor, Tensor], Tensor] = as_they_are
    center_value: bool = False


FORMS = (
    Form("K8V4", "K8V4"),
    *(
        each
        for name in ("K5V4", "K4V4", "K4V3g2/1")
        for each in (
            Form(f"{name}, each element to the nearest code", name),
            Form(f"{name}, keys rounded for the prompt's queries", name, fed_back),
        )
    ),
    Form("K4V3g2/1, the same and values for the output's weights", "K4V3g2/1", fed_back, fed_back),
    Form("K4V3g2/1, the same, keys whitened", "K4V3g2/1", fed_back, scale_key=whitened),
    Form("K4V3g2/1, the same, channels equalised", "K4V3g2/1", fed_back, scale_key=equalised),
    Form("K4V3g2/1, channels equalised, nearest code", "K4V3g2/1", scale_key=equalised),
    Form("K4V3g2/1, ranges clipped", "K4V3g2/1", clipped, clipped),
    Form("K4V3g2/1, Gaussian levels", "K4V3g2/1", gaussian, gaussian),
    Form("K4V3g4/2, Gaussian levels, as many bytes without zero points", "K4V3g4/2", gaussian, gaussian),
    Form("K4V3g2/1, values centred", "K4V3g2/1", center_value=True),
)


class Forms(Simulation):
    """Records the queries of a prompt."""

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if query.shape[2] == key.shape[2]:
            output = module.o_proj.weight.detach().float().unflatten(1, (key.shape[1], -1, value.shape[3]))
            queries = query[0].float().unflatten(0, (key.shape[1], -1)).flatten(1, 2)
            self.found[module.layer_idx] = queries, output.permute(1, 2, 0, 3).flatten(1, 2)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def compressed(self, cache: DynamicCache, form: Form) -> DynamicCache:
        other, precision = copy.deepcopy(cache), Precision.parse(form.precision)
        for index, layer in enumerate(other.layers):
            queries, output = self.found[index]
            key, value = layer.keys[0].float(), layer.values[0].float()
            offset, value_offset = key.mean(1, keepdim=True), form.center_value * value.mean(1, keepdim=True)
            turn_key, turn_value = (rotation_matrix(x.shape[-1], torch.float32, x.device) for x in (key, value))
            scale = form.scale_key(key - offset, queries) @ turn_key
            back = torch.linalg.inv(scale)
            seen, out = queries @ back.mT, output @ turn_value
            bits = (precision.k_bits, precision.k_groups), (precision.v_bits, precision.v_groups)
            key = form.round_key((key - offset) @ scale, *bits[0], seen.mT @ seen / seen.shape[1]) @ back + offset
            turned = (value - value_offset) @ turn_value
            value = form.round_value(turned, *bits[1], out.mT @ out / out.shape[1]) @ turn_value.mT + value_offset
            held = slice(SINKS, key.shape[1] - WINDOW)
            layer.keys[0, :, held] = key[:, held].to(layer.keys.dtype)
            layer.values[0, :, held] = value[:, held].to(layer.values.dtype)
        return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=4, help="of each task (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    write(options, Forms, FORMS, lambda form, head_dim: {"form": form.name})


if __name__ == "__main__":
    main()
