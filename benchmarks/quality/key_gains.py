"""Measures how gains on normalised keys, as in Qwen3, affect low-bit keys: a random model, chosen gains and biases.

Qwen3 divides each head's keys and queries by their norm and multiplies their channels by gains, before the rotary
embedding. Layers are stored as in `calibrate`. The relative error of a prompt's logits is printed, alongside that of
keys with a Qwen2.5-style bias in the same model.

    python benchmarks/quality/key_gains.py --lengths 1024,4096
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_diffkv.calibration.stored import errors, geometric_mean, stored
from hf_diffkv.calibration.watched import run_prompt, watching
from hf_diffkv.config import Precision

LAYERS, HEADS, QUERY_HEADS, HEAD_DIM, HIDDEN = 4, 4, 8, 128, 512
VOCABULARY, THETA = 1024, 1e6
# both channels of a slow pair
PAIR, LARGE = (60, 60 + HEAD_DIM // 2), 30.0

GAINS: dict[str, Callable[[], Tensor]] = {
    "1": lambda: torch.ones(HEAD_DIM),
    "e^N(0, 1)": lambda: torch.randn(HEAD_DIM).exp(),
    "30 on a slow pair, else 1": lambda: torch.ones(HEAD_DIM).index_fill(0, torch.tensor(PAIR), LARGE),
}


def random_model(gains: Callable[[], Tensor], shared: bool, bias: float) -> Qwen3ForCausalLM:
    """Makes a random Qwen3 model.

    Args:
        gains: function that makes the gains of a layer's key channels.
        shared: whether queries use the same gains instead of 1.
        bias: standard deviation of the elements of a bias added to keys before normalisation.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=32_768,
        rope_theta=THETA,
        attention_bias=bias > 0,
        # keys of unit variance before normalisation
        initializer_range=HIDDEN**-0.5,
    )
    model = Qwen3ForCausalLM(config).eval()
    for layer in model.model.layers:
        attention, chosen = layer.self_attn, gains()
        attention.k_norm.weight.data.copy_(chosen)
        if shared:
            attention.q_norm.weight.data.copy_(chosen)
        if bias > 0:
            attention.k_proj.bias.data.copy_(bias * torch.randn(HEADS * HEAD_DIM))
    return model


@torch.no_grad()
def loss(model: Qwen3ForCausalLM, ids: list[int], precision: Precision) -> float:
    """Returns the relative error of a prompt's logits, as a geometric mean over layers and heads."""
    with watching(model):
        _, layers = run_prompt(model, ids)
    return geometric_mean(torch.cat([errors(layer, *stored(layer, precision))[0] for layer in layers]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--precisions", default="K4V4,K3V3")
    options = parser.parse_args()
    lengths = sorted(map(int, options.lengths.split(",")))
    precisions = [Precision.parse(text) for text in options.precisions.split(",")]
    ids = torch.randint(VOCABULARY, (lengths[-1],), generator=torch.Generator().manual_seed(0)).tolist()
    print("| keys | " + " | ".join(f"{each.name}, {length}" for each in precisions for length in lengths) + " |")
    print("|---" * (1 + len(precisions) * len(lengths)) + "|")
    cases = [(name, shared, 0.0) for name in GAINS for shared in ((False, True) if name != "1" else (False,))]
    for name, shared, bias in [*cases, ("1", False, 3.0)]:
        model = random_model(GAINS[name], shared, bias)
        title = f"gains {name}" + ", queries too" * shared + f", bias of {bias:g}" * (bias > 0)
        row = [loss(model, ids[:length], each) for each in precisions for length in lengths]
        print(f"| {title} | " + " | ".join(f"{figure:.5f}" for figure in row) + " |", flush=True)


if __name__ == "__main__":
    main()
