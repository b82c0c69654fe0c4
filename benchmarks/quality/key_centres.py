"""Measures how much the error of 4-bit keys falls with centres other than the mean of a row.

A model reads code. A centre is subtracted from each head's keys, which are then rotated and quantised between their
smallest and largest element. The centre is the mean of all keys, as in `store/transform.py`; means over stretches of
neighbours; or, if keys have a bias, the bias at each position or its means over stretches. Means of keys would need
storage; those of the bias follow from the checkpoint. The error of the last queries' logits is printed as a geometric
mean over heads, relative to that with the mean of all keys.

    python benchmarks/quality/key_centres.py --models qwen2.5-coder-0.5b,smollm2 --length 2048
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from field_tasks.shared_prompts import read_prompt
from key_bias import turned_bias
from long_text import document_of
from more_levels import quantized
from torch import Tensor

from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.running.models import load_config, load_model

BITS, QUERIES = 4, 256
STRETCHES = (32, 64, 128, 256, 1024)


def stretch_means(keys: Tensor, size: int) -> Tensor:
    """Returns each token's mean over its stretch, [heads, tokens, dim] like `keys`."""
    return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in keys.split(size, dim=1)], dim=1)


def logit_errors(query: Tensor, keys: Tensor, centre: Tensor) -> Tensor:
    """Returns the mean square error of the logits of keys without `centre` and their mean, [heads].

    Args:
        query: queries, [heads, queries, dim].
        keys: keys, [heads, tokens, dim].
        centre: centre to subtract first, shaped like `keys`, or a zero.
    """
    rest = keys - centre
    rest = rest - rest.mean(1, keepdim=True)
    matrix = rotation_matrix(keys.shape[-1], keys.dtype, keys.device)
    rotated = rest @ matrix
    error = query @ ((quantized(rotated, BITS, 1) - rotated) @ matrix.mT).mT
    # a shift common to all tokens changes no probability
    return (error - error.mean(-1, keepdim=True)).square().mean((1, 2))


def layer_errors(model: Any, prompt: Any, index: int) -> dict[str, Tensor]:
    """Returns each centre's errors in one layer, [heads], relative to those with the mean of all keys."""
    _, query, key, _, _ = prompt.layers[index]
    keys, length = key[0].float(), key.shape[2]
    query = query[0].float().unflatten(0, (keys.shape[0], -1))[:, :, -QUERIES:].flatten(1, 2)
    layer = model.model.layers[index]
    centres = {f"keys of {size}": stretch_means(keys, size) for size in STRETCHES}
    if getattr(layer.self_attn.k_proj, "bias", None) is not None:
        bias = turned_bias(model, layer, length)[0]
        centres["bias"] = bias
        centres |= {f"bias of {size}": stretch_means(bias, size) for size in STRETCHES}
    base = logit_errors(query, keys, keys.new_zeros(()))
    return {name: logit_errors(query, keys, centre) / base for name, centre in centres.items()}


@torch.no_grad()
def measure(name: str, length: int) -> dict[str, float]:
    """Returns the geometric mean of the relative errors over a model's heads, for each centre."""
    _, tokenizer = load_config(name)
    model = load_model(name, quiet=True)
    prompt = read_prompt(model, document_of("code", tokenizer, 0, length, 1).context)
    layers = [layer_errors(model, prompt, index) for index in sorted(prompt.layers)]
    return {centre: float(torch.cat([layer[centre] for layer in layers]).log().mean().exp()) for centre in layers[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", required=True, metavar="A,B")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt")
    options = parser.parse_args()
    for name in options.models.split(","):
        found = measure(name, options.length)
        print(name, " ".join(f"{centre}: {error:.3f}," for centre, error in found.items()).rstrip(","), flush=True)


if __name__ == "__main__":
    main()
