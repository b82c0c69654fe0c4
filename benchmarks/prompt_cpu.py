"""Time and peak memory of a prompt on a CPU: DynamicCache and StaticCache with torch's attention, and DiffKV.

Caches take turns in one process, so that other load affects all of them alike; figures are medians, of which the ratios
matter. The peak memory above the loaded model, for the prompt and `STEPS` steps after it, is measured in a separate
process, with the prompt in one forward and in chunks. Before anything is timed, the lossless configuration's logits
must be as close to float32 as DynamicCache's.

    python benchmarks/prompt_cpu.py [--models random examples/models/tiny-lm] [--lengths 1024 4096 16384] [--threads 1]

The model "random" is a Llama of four layers with 8 KV heads of 128, 32 query heads and a small MLP.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from cpu_caches import about_machine, append_rows, check_lossless, makers, random_llama, step
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from hf_diffkv.running.peak import PeakMemory

FOLDER = Path(__file__).parent
TINY = FOLDER.parent / "examples" / "models" / "tiny-lm"
DENSE = "DynamicCache"
CACHES = [DENSE, "StaticCache", "DiffKV balanced", "DiffKV paper"]
STEPS = 8


def load(name: str, args: argparse.Namespace) -> transformers.PreTrainedModel:
    dtype = getattr(torch, args.dtype)
    if name != "random":
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    model = random_llama(dtype, **sizes, num_attention_heads=32, num_key_value_heads=8)
    for layer in model.model.layers:
        # with the initial weights, attention would be almost uniform
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(3.0)
    return model


def caches(model: transformers.PreTrainedModel, length: int) -> dict[str, Callable[[], Cache]]:
    return makers(model, length + STEPS, CACHES)


def prompt(model: transformers.PreTrainedModel, cache: Cache, tokens: torch.Tensor, chunk: int) -> None:
    """Reads the tokens [1, n] in chunks of `chunk` tokens; 0 reads all at once."""
    for part in tokens.split(chunk or tokens.shape[1], dim=1):
        step(model, cache, part)


def draw(model: transformers.PreTrainedModel, length: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))


def time_prompts(model: transformers.PreTrainedModel, length: int, chunk: int, args: argparse.Namespace) -> list[dict]:
    """Median milliseconds of each cache: processor time with one thread, elapsed time with several."""
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    tokens, made = draw(model, length), caches(model, length)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(args.repeats):
        for name, make in made.items():
            cache = make()
            started = clock()
            prompt(model, cache, tokens, chunk)
            taken[name].append(1e3 * (clock() - started))
            del cache
    return [
        {"length": length, "chunk": chunk, "cache": name, "ms": statistics.median(times), "of_all_ms": sorted(times)}
        for name, times in taken.items()
    ]


def trim() -> None:
    """Returns freed memory to the system, which otherwise counts it as resident."""
    gc.collect()
    if platform.system() == "Linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def measure_memory(args: argparse.Namespace) -> None:
    """Prints this process's peak memory beyond the loaded, warmed-up model."""
    model = load(args.models[0], args)
    make = caches(model, args.lengths[0])[args.memory_of]
    prompt(model, make(), draw(model, 256), 128)
    tokens = draw(model, args.lengths[0])
    trim()
    peak = PeakMemory(torch.device("cpu"))
    cache = make()
    prompt(model, cache, tokens, args.chunks[0])
    for _ in range(STEPS):
        step(model, cache, tokens[:, :1])
    print(json.dumps({"peak_bytes": peak.read()[1]}))


def peak_of(name: str, model: str, length: int, chunk: int, args: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--memory-of", name, "--models", model, "--lengths", str(length)]
    command += ["--chunks", str(chunk), "--dtype", args.dtype, "--threads", str(args.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_table(rows: list[dict]) -> None:
    print("| model | tokens | chunk | cache | ms | of dense | peak MB | of dense |\n|---|---|---|---|---|---|---|---|")

    def figure(row: dict, key: str, unit: float, form: str) -> list[str]:
        case = [row[name] for name in ("model", "length", "chunk")]
        same = [r for r in rows if r["cache"] == DENSE and [r[name] for name in ("model", "length", "chunk")] == case]
        if key not in row:
            return ["-", "-"]
        return [format(row[key] / unit, form), f"{row[key] / same[0][key]:.2f}"]

    for row in rows:
        start = [Path(row["model"]).name, row["length"], row["chunk"] or "all", row["cache"]]
        cells = [*start, *figure(row, "ms", 1, ".0f"), *figure(row, "peak_bytes", 1e6, ".1f")]
        print("| " + " | ".join(map(str, cells)) + " |")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["random", str(TINY)], help='folders, or "random"')
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 1024], help="0: the prompt in one forward")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory runs")
    parser.add_argument("--no-time", action="store_true", help="leave out the timed runs")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "prompt_cpu.jsonl", help="appended to")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    if args.memory_of:
        measure_memory(args)
        return
    about = {**about_machine(), "threads": args.threads, "dtype": args.dtype}
    rows: list[dict] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        model = load(name, args)
        check_lossless(model)
        for length in args.lengths:
            for chunk in (chunk for chunk in args.chunks if chunk < length):
                case = [{"length": length, "chunk": chunk, "cache": cache} for cache in caches(model, length)]
                case = case if args.no_time else time_prompts(model, length, chunk, args)
                for row in case:
                    row["model"] = name
                    if not args.no_memory:
                        row |= peak_of(row["cache"], name, length, chunk, args)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                rows += case
                append_rows(args.output, about, case)
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    print_table(rows)


if __name__ == "__main__":
    main()
