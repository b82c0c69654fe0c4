"""Time and memory of one attention layer with latents (docs/latent.md), in GLM-4.7-Flash's shape with random weights.

Three variants take turns in one process with one thread: Transformers' DynamicCache, which expands all latents at every
step; an absorbed step in plain PyTorch on exact latents; and DiffKVCache. Figures are medians of processor time with
quartiles. The outputs are compared first.

    python benchmarks/latent.py [--dtype float32] [--contexts 512 2048 4096] [--precision K8V8] [--turns 9]

With `--growth`, only the two absorbed variants: how much longer a step takes per 1,000 further tokens, from steps at
two contexts that take turns.

    python benchmarks/latent.py --dtype bfloat16 --growth --contexts 4096 12288 --turns 200
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, Glm4MoeLiteConfig
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteAttention, Glm4MoeLiteRotaryEmbedding

import hf_diffkv
from hf_diffkv import DiffKVCache
from hf_diffkv.cache.latent_weights import Projection
from hf_diffkv.native.library import instructions
from hf_diffkv.running.peak import PeakMemory

DYNAMIC, PLAIN, OURS = "DynamicCache", "absorbed, exact latents", "DiffKV"
ATTENTION = {DYNAMIC: "sdpa", PLAIN: "absorbed", OURS: "diffkv"}
RESULTS = Path(__file__).parent / "results" / "latent.jsonl"
WARM_UP = 2


class Layer:
    """An attention layer and its inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.config, self.dtype = Glm4MoeLiteConfig(num_hidden_layers=1), dtype
        torch.manual_seed(0)
        self.module = Glm4MoeLiteAttention(self.config, 0).eval()
        for parameter in self.module.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        self.module.to(dtype)
        self.rotary = Glm4MoeLiteRotaryEmbedding(self.config)

    def inputs(self, start: int, tokens: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden states, and the rotary factors of the positions from `start` on."""
        hidden = torch.randn(1, tokens, self.config.hidden_size, generator=torch.Generator().manual_seed(start))
        hidden = hidden.to(self.dtype)
        return hidden, self.rotary(hidden, torch.arange(start, start + tokens)[None])

    def cache(self, name: str, precision: str) -> Any:
        if name == OURS:
            return DiffKVCache(self.config, high=precision, metadata_bits=16, window=32)
        return DynamicCache(config=self.config)

    def run(self, name: str, cache: Any, given: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        """Runs the layer as a model does; the plain absorbed variant also expands prompts."""
        steps = given[0].shape[1] == 1
        self.config._attn_implementation = ATTENTION[name] if steps or name == OURS else "sdpa"
        if name == PLAIN and steps:
            self.module.expand_kv = lambda latent, rope: (rope, latent)
        try:
            return self.module(*given, None, cache)[0]
        finally:
            vars(self.module).pop("expand_kv", None)


def absorbed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends from one token to exact latents, with the signature of Transformers' attention interface."""
    projection = Projection.of(module, value)
    rope, latent = projection.absorb(query)[0, :, 0].split([key.shape[-1], value.shape[-1]], dim=-1)
    logits = (rope @ key[0, 0].mT + latent @ value[0, 0].mT).float() * scaling
    output = logits.softmax(-1).to(value.dtype) @ value[0, 0]
    return projection.values(output[None, :, None]).transpose(1, 2).contiguous(), None


def spread(seconds: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile in milliseconds."""
    return [round(1e3 * value, 3) for value in statistics.quantiles(seconds, n=4, method="inclusive")]


@torch.no_grad()
def measure(layer: Layer, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Times prompts and steps of all caches in turns; each turn adds one token to every cache."""
    precision, turns, row = args.precision, args.turns, {}
    prompt = layer.inputs(0, context)
    caches = {name: layer.cache(name, precision) for name in (DYNAMIC, OURS)}
    outputs = {name: layer.run(name, cache, prompt) for name, cache in caches.items()}
    caches = {DYNAMIC: caches[DYNAMIC], PLAIN: copy.deepcopy(caches[DYNAMIC]), OURS: caches[OURS]}
    prompts: dict[str, list[float]] = {DYNAMIC: [], OURS: []}
    for _ in range(args.prompts):
        for name, seconds in prompts.items():
            fresh = layer.cache(name, precision)
            started = time.thread_time()
            layer.run(name, fresh, prompt)
            seconds.append(time.thread_time() - started)
    steps: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(turns + WARM_UP):
        given = layer.inputs(context + turn, 1)
        for name, cache in caches.items():
            started = time.thread_time()
            outputs[name] = layer.run(name, cache, given)
            if turn >= WARM_UP:
                steps[name].append(time.thread_time() - started)
    exact = outputs[DYNAMIC].float()
    for name, seconds in steps.items():
        gc.collect()
        given, peak = layer.inputs(context + turns + WARM_UP, 1), PeakMemory(torch.device("cpu"))
        layer.run(name, caches[name], given)
        error = float((outputs[name].float() - exact).norm() / exact.norm())
        row[name] = {"step_ms": spread(seconds), "step_peak_mb": round((peak.read()[1] or 0) / 2**20, 1)}
        row[name] |= {"error": float(f"{error:.1e}")}
        if name in prompts:
            row[name]["prompt_ms"] = spread(prompts[name])
    row[OURS]["stored_tokens"] = int(caches[OURS].layers[0].store.high_count.sum())
    return row


@torch.no_grad()
def growth(layer: Layer, contexts: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Times steps of both absorbed variants at two contexts, and what each takes more per 1,000 further tokens."""
    caches: dict[str, list[Any]] = {PLAIN: [], OURS: []}
    for context in contexts:
        prompt = layer.inputs(0, context)
        for name, held in caches.items():
            held.append(layer.cache(name, args.precision))
            layer.run(name, held[-1], prompt)
    steps: dict[str, list[list[float]]] = {name: [] for name in caches}
    for turn in range(args.turns + WARM_UP):
        given = layer.inputs(contexts[1] + turn, 1)
        seconds = {name: [0.0, 0.0] for name in caches}
        # both contexts come first equally often, because a step finds in the processor's caches what the last one left
        for place in (0, 1) if turn % 2 else (1, 0):
            for name, held in caches.items():
                started = time.thread_time()
                layer.run(name, held[place], given)
                seconds[name][place] = time.thread_time() - started
        if turn >= WARM_UP:
            for name, pair in seconds.items():
                steps[name].append(pair)
    thousands, row = (contexts[1] - contexts[0]) / 1000, {}
    for name, pairs in steps.items():
        more = spread([(longer - shorter) / thousands for shorter, longer in pairs])
        row[name] = {"step_ms": [spread(list(each)) for each in zip(*pairs)], "ms_per_1000_tokens": more}
    row[OURS]["ratio"] = round(row[OURS]["ms_per_1000_tokens"][1] / row[PLAIN]["ms_per_1000_tokens"][1], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--precision", default="K8V8")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=3, help="timed prompts of each cache, two or more")
    parser.add_argument("--growth", action="store_true", help="compare steps at the two contexts given")
    args = parser.parse_args()
    if args.growth and len(args.contexts) != 2:
        parser.error("--growth needs two --contexts, such as 4096 12288")
    torch.set_num_threads(1)
    hf_diffkv.register()
    AttentionInterface.register("absorbed", absorbed)
    layer = Layer(getattr(torch, args.dtype))
    about = {"dtype": args.dtype, "precision": args.precision, "turns": args.turns, "torch": torch.__version__}
    about |= {"machine": platform.processor() or platform.machine(), "instructions": instructions()}
    for context in [sorted(args.contexts)] if args.growth else args.contexts:
        caches = growth(layer, context, args) if args.growth else measure(layer, context, args)
        row = {**about, "context": context, "caches": caches}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        for name, found in caches.items():
            print(f"{args.dtype} {context!s:>6} {name:24s} {found}", flush=True)


if __name__ == "__main__":
    main()
