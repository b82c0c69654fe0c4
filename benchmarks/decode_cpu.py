"""Time per generated token on a CPU: DynamicCache, StaticCache, QuantizedCache and DiffKV compared.

For every cache, a whole step of the model is timed, and separately the cache update and attention of all layers. The
caches of one context take turns in one process, so that other load affects all of them alike. Figures are medians with
quartiles: processor time with one thread, elapsed time with several. Before a model is timed, the logits of the
lossless configuration must be as close to float32 as DynamicCache's.

    python benchmarks/decode_cpu.py [--models tiny-lm] [--contexts 1024 4096] [--threads 1 2] [--caches DiffKV]
    python benchmarks/decode_cpu.py --report [--document]   # tables and plots of the results
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import report_cpu
import torch
from cpu_caches import (
    MODELS,
    Tokens,
    about_machine,
    append_rows,
    attend_all,
    check_lossless,
    fill,
    held_bytes,
    load_model,
    makers,
    step,
)
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
LARGE_BATCH = (8, 4096)
RESULTS = Path(__file__).parent / "results" / "decode_cpu.jsonl"
WARM_UP = 2


def quartiles(seconds: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile in milliseconds."""
    return [round(1e3 * value, 4) for value in statistics.quantiles(seconds, n=4, method="inclusive")]


def time_caches(
    model: PreTrainedModel, held: dict[str, Cache], batch: int, threads: int, args: argparse.Namespace
) -> dict[str, dict]:
    """Result fields of each cache, in turns; each turn adds two tokens to every cache."""
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    token = torch.full((batch, 1), 5)
    new = Tokens.draw(model, batch, 1)
    steps: dict[str, list[float]] = {name: [] for name in held}
    attention: dict[str, list[float]] = {name: [] for name in held}
    for turn in range(args.steps + WARM_UP):
        for name, cache in held.items():
            started = clock()
            step(model, cache, token)
            between = clock()
            attend_all(model, cache, new)
            if turn >= WARM_UP:
                steps[name].append(between - started)
                attention[name].append(clock() - between)
    return {
        name: {"ms": quartiles(steps[name]), "attention_ms": quartiles(attention[name]), "turns": args.steps}
        for name in held
    }


def measure(model: PreTrainedModel, name: str, batch: int, context: int, args: argparse.Namespace) -> list[dict]:
    """One row for each cache and number of threads."""
    tokens = Tokens.draw(model, batch, context)
    later = 2 * len(args.threads) * (args.steps + WARM_UP)
    held, about = {}, {}
    for cache_name, make in makers(model, context + later, args.caches).items():
        print(f"  filling {cache_name} with {batch} x {context} tokens", file=sys.stderr, flush=True)
        cache = held[cache_name] = make()
        fill(model, cache, tokens)
        about[cache_name] = {"cache_bytes": held_bytes(cache)}
        if isinstance(cache, DiffKVCache):
            about[cache_name]["tokens"] = cache.memory().tokens
    del tokens
    case = {"kind": "step", "model": name, "layers": model.config.num_hidden_layers, "batch": batch, "context": context}
    rows = []
    for threads in args.threads:
        for cache_name, timed in time_caches(model, held, batch, threads, args).items():
            rows.append({**case, "threads": threads, "cache": cache_name, **timed, **about[cache_name]})
    held.clear()
    gc.collect()
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS), help="of one request")
    parser.add_argument(
        "--large-batch", type=int, nargs=2, default=list(LARGE_BATCH), metavar=("BATCH", "CONTEXT"), help="0 0: none"
    )
    parser.add_argument("--layers", type=int, default=2, help="of the random model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=30, help="timed turns of every cache")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--caches", nargs="+", help="only caches whose name contains one of these")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--report", action="store_true", help="measure nothing, report what the output holds")
    parser.add_argument("--document", action="store_true", help="with --report: into docs/ as well")
    args = parser.parse_args(arguments)
    if args.steps < 2:
        parser.error("--steps must be at least 2, for quartiles")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if not args.report:
        about = {**about_machine(), "dtype": args.dtype}
        print(" ".join(f"{key}={value}" for key, value in about.items()), flush=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        cases = [(1, context) for context in args.contexts] + [tuple(args.large_batch)] * (args.large_batch[0] > 0)
        for name in args.models:
            try:
                model = load_model(name, getattr(torch, args.dtype), args.layers)
            except FileNotFoundError as error:
                print(f"left out: {error}", flush=True)
                continue
            check_lossless(model)
            for batch, context in cases:
                rows = measure(model, name, batch, context, args)
                append_rows(args.output, about, rows)
    report_cpu.report(args.output)
    if args.report and args.document:
        report_cpu.document(args.output)


if __name__ == "__main__":
    main()
