"""Requests in flight and tokens per second that bytes and bandwidth allow, calculated without running anything.

The calculation assumes Llama-3-8B's shape, requests of 8,448 tokens, and as many requests in flight as fit alongside
the weights. A step takes as long as reading its bytes: the weights once, and all caches. The share of bandwidth that a
kernel reaches comes from the scoreboard model (docs/kernels.md), and is 75 % for weights and dense caches.

    python benchmarks/serving_on_paper.py [--tokens 8448]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from tables import markdown
from transformers import LlamaConfig

from hf_diffkv import DiffKVConfig
from hf_diffkv.planning import ModelShape

TOKENS = 8448
# share of memory for caches and weights
USABLE = 0.9
REACHED = 0.75


@dataclass(frozen=True)
class Device:
    """Bytes of memory, bytes per second, and bits per weight."""

    name: str
    memory: float
    bandwidth: float
    weight_bits: int


DEVICES = (Device("H200, bf16 weights", 141e9, 4.8e12, 16), Device("24 GB card, 4-bit weights", 24e9, 1.0e12, 4))
# name -> configuration, and the modelled share of bandwidth that its decode kernel reaches
CACHES: dict[str, tuple[DiffKVConfig | None, float]] = {
    "bf16": (None, REACHED),
    "quality": (DiffKVConfig.preset("quality"), 0.86),
    "balanced": (DiffKVConfig.preset("balanced"), 0.82),
    "small": (DiffKVConfig.preset("small"), 0.63),
}


def llama() -> ModelShape:
    """Llama-3-8B, without weights."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)
    return ModelShape.of(config, "", torch.bfloat16)


def lines(tokens: int) -> list[list[object]]:
    """Device, cache, MB per request, requests, tokens per second, the last two also relative to bf16."""
    shape, found = llama(), []
    for device in DEVICES:
        weights = shape.weight_bytes * device.weight_bits / 16
        dense: tuple[int, float] | None = None
        for name, (config, share) in CACHES.items():
            each = shape.dense_bytes(tokens) if config is None else shape.diffkv_bytes(tokens, config, 1.0)
            requests = int((USABLE * device.memory - weights) // each)
            step = (weights / REACHED + requests * each / share) / device.bandwidth
            rate = requests / step
            dense = dense or (requests, rate)
            ratios = (requests / dense[0], rate / dense[1])
            found.append([device.name, name, each / 1e6, requests, rate, *(f"{ratio:.2f}" for ratio in ratios)])
    return found


def table(tokens: int) -> str:
    header = (
        "device",
        "cache",
        "MB a request",
        "in flight",
        "tokens per second",
        "of bf16: in flight",
        "of bf16: tokens",
    )
    return markdown(header, ([*row[:2], f"{row[2]:,.0f}", row[3], f"{row[4]:,.0f}", *row[5:]] for row in lines(tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each request, once it is full")
    print(table(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
