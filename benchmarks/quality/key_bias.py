"""Effect of a model's key biases, which the rotary embedding rotates, on the loss after long prompts.

A method stores each layer's keys twice: unchanged, and without the bias at their positions, which is added back when
they are read. The dense cache takes the keys as read, and logits after the prompt are compared with those from exact
keys. Prompts and comparisons are the same as in `long_text.py`.

    python benchmarks/quality/key_bias.py --model qwen2.5-coder-0.5b --output build/key_bias.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from field_tasks.shared_prompts import ReadPrompt, hand_over, read_prompt
from long_text import beginning, compared, run, without_attention
from torch import Tensor

from hf_diffkv.evaluation.methods import get_method


def turned_bias(model: Any, layer: Any, length: int) -> Tensor:
    """Returns the bias of a layer's keys at each position, float32 [1, kv_heads, length, head_dim]."""
    bias = layer.self_attn.k_proj.bias.float().view(1, -1, 1, layer.self_attn.head_dim)
    cos, sin = model.model.rotary_emb(bias, torch.arange(length)[None])
    first, second = bias.chunk(2, dim=-1)
    return bias * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def changed(prompt: ReadPrompt, keys: dict[int, Tensor], values: dict[int, Tensor] | None = None) -> ReadPrompt:
    """Returns a prompt with its keys replaced, and its values if any are given."""
    layers = {
        index: (module, query, keys[index], value if values is None else values[index], options)
        for index, (module, query, _, value, options) in prompt.layers.items()
    }
    return ReadPrompt(prompt.ids, layers)


def read_back(model: Any, label: str, prompt: ReadPrompt, biases: dict[int, Tensor] | None) -> ReadPrompt:
    """Returns a prompt as read from a method's cache, stored without its keys' biases if these are given."""
    keys = {index: layer[2] for index, layer in prompt.layers.items()}
    dtype = keys[0].dtype
    if biases is not None:
        keys = {index: (key.float() - biases[index]).to(dtype) for index, key in keys.items()}
    with without_attention():
        cache = hand_over(model, get_method(label), changed(prompt, keys)).cache
    held = {index: cache.dequantize(index) for index in keys}
    added = biases or dict.fromkeys(keys, 0.0)
    return changed(
        prompt,
        {index: (key + added[index]).to(dtype) for index, (key, _, _) in held.items()},
        {index: value.to(dtype) for index, (_, value, _) in held.items()},
    )


def measure(model: Any, ids: tuple[int, ...], lengths: list[int], labels: list[str], further: int) -> Iterator[dict]:
    """Yields a row for each length, method and way of storing biases.

    Args:
        ids: token ids of the document, `further` more than the last length.
        lengths: numbers of tokens of the prompts, in ascending order.
        labels: methods.
        further: number of tokens after each length whose logits are compared.
    """
    whole = read_prompt(model, ids[: lengths[-1]])
    dense = get_method("dense")
    for length in lengths:
        prompt, following = beginning(whole, length), ids[length : length + further]
        exact = hand_over(model, dense, prompt).forward(following, keep=further)
        biases = {index: turned_bias(model, layer, length) for index, layer in enumerate(model.model.layers)}
        for label in labels:
            for name, given in (("with bias", None), ("without bias", biases)):
                read = read_back(model, label, prompt, given)
                logits = hand_over(model, dense, read).forward(following, keep=further)
                yield {"length": length, "method": label, "keys": name, **compared(logits, exact)}


if __name__ == "__main__":
    run(__doc__, measure, "2048,8192,16384", "diffkv,diffkv:small")
