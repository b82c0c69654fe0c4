"""Time from a prompt to its first token with a random-weight model in Llama-3-8B's shape, batch 1.

Dense caches with each available attention, and DiffKV, are timed in turns by the host's clock, from the call of the
model until the token id is on the host. This is what a user waits for: attention, compression, launches and host reads.

    python benchmarks/ttft_gpu.py [--contexts 1024 8192 32768] [--caches balanced paper]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from measure import Session, free_memory, parser
from models_gpu import DIFFKV, attention_of, build_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing

CONTEXTS = (8192, 1024, 32768)
# Transformers' names; the last two need separate packages
DENSE = ("sdpa, flash", "sdpa, cudnn", "flash_attention_2", "flash_attention_3")
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
CACHES = ("DiffKV balanced", "DiffKV quality", "DiffKV small", "DiffKV paper")


def dense_call(model: PreTrainedModel, attention: str, tokens: Tensor) -> Callable[[], int]:
    """Runs a prompt with a DynamicCache and an attention of `DENSE`."""
    implementation, _, backend = attention.partition(", ")

    def call() -> int:
        model.set_attn_implementation(implementation)
        cache = DynamicCache(config=model.config)
        if not backend:
            return first_token(model, tokens, cache)
        with sdpa_kernel(BACKENDS[backend]):
            return first_token(model, tokens, cache)

    return call


def diffkv_call(model: PreTrainedModel, name: str, tokens: Tensor) -> Callable[[], int]:
    """Runs a prompt with one of `DIFFKV`."""

    def call() -> int:
        model.set_attn_implementation(attention_of(name))
        return first_token(model, tokens, DiffKVCache(model.config, DIFFKV[name]))

    return call


@torch.no_grad()
def first_token(model: PreTrainedModel, tokens: Tensor, cache: DynamicCache | DiffKVCache) -> int:
    return int(model(tokens, **passing(cache), logits_to_keep=1).logits[0, -1].argmax())


def measure(session: Session, model: PreTrainedModel, context: int, args: argparse.Namespace) -> None:
    """Times all variants at one length, in turns, after two calls of each to compile kernels."""
    tokens = torch.randint(0, model.config.vocab_size, (1, context), device=session.device)
    case = {"kind": "first token", "context": context, "batch": 1}
    calls = {f"DynamicCache, {name}": dense_call(model, name, tokens) for name in args.dense}
    calls |= {name: diffkv_call(model, name, tokens) for name in args.caches}
    ready = {}
    for name, call in calls.items():
        if not session.has_time(f"{name}, context {context}"):
            return
        try:
            call()
            call()
        except Exception as failure:  # attention that is not installed fails in many ways
            session.failed({**case, "cache": name}, failure)
            continue
        ready[name] = call
        free_memory()
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(args.turns):
        for name, call in ready.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    taken = {name: statistics.median(mine) for name, mine in seconds.items()}
    best = min((taken[name] for name in taken if name.startswith("DynamicCache")), default=None)
    for name, call in ready.items():
        row = {**case, "cache": name, "ms": round(1e3 * taken[name], 3)}
        row |= {"ms_all": [round(1e3 * each, 3) for each in seconds[name]]}
        row |= kernels(session, call, model.config.num_hidden_layers)
        if name in DIFFKV:
            row |= {"config": DIFFKV[name].to_dict()}
            row |= {} if best is None else {"over_dense": round(taken[name] / best, 4)}
        session.add(row)
        print(f"{name}, context {context}: {row['ms']} ms", flush=True)


def kernels(session: Session, call: Callable[[], int], layers: int) -> dict:
    """Counts the kernels of one call per layer and their microseconds."""
    launches, us = session.kernel_count(call)
    return {} if launches == 0 else {"kernels_us": round(us, 1), "kernels_per_layer": round(launches / layers, 1)}


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "ttft_gpu")
    options.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options.add_argument("--caches", nargs="+", default=list(CACHES), choices=list(DIFFKV))
    options.add_argument("--dense", nargs="+", default=list(DENSE), choices=[*DENSE, "sdpa, math"])
    options.add_argument("--turns", type=int, default=5, help="timed calls of each")
    args = options.parse_args(arguments)
    if args.tiny:
        args.contexts, args.dense, args.turns = [96], ["sdpa, math"], 2
    session = Session(args)
    model = build_model(session, args.tiny)
    for context in args.contexts:
        if session.has_time(f"first token, context {context}"):
            measure(session, model, context, args)
        free_memory()
    return session


if __name__ == "__main__":
    main()
