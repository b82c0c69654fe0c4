"""Time per generated token and peak memory on a CPU: DynamicCache, StaticCache, QuantizedCache and DiffKV side by side.

Two random layers with the attention shape of Llama-3-8B (32 query heads, 8 KV heads of 128). Every cache is filled by a
real prompt; then the caches take turns generating in one process, so that they share whatever else the machine does.
Peak memory is taken in a fresh process per cache. Outputs are checked before anything is timed: the lossless
configuration must give DynamicCache's logits.

    python benchmarks/decode_cpu.py [--contexts 1024 4096 16384] [--dtype bfloat16] [--output results.jsonl]
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
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig

CHUNK = 1024
RESULTS = Path(__file__).parent / "results" / "decode_cpu.jsonl"
DIFFKV = {
    "DiffKV K8V4": {"alpha_high": 0.0, "alpha_low": 0.0},
    "DiffKV K4V2": {"alpha_high": 1e9, "alpha_low": 0.0},
    "DiffKV 1/0": {"alpha_high": 1.0, "alpha_low": 0.0},
}


def build_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """Random weights; keys and queries are drawn wide enough that attention is not uniform."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(3.0)
    return model


def caches(model: transformers.PreTrainedModel, context: int, steps: int) -> dict[str, Callable[[], Cache]]:
    """How to make each cache; those whose backend is missing are left out."""
    config = model.config
    made: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=context + steps),
    }
    for backend, bits in (("quanto", 4), ("hqq", 4)):
        try:
            QuantizedCache(backend=backend, config=config, nbits=bits)
        except ImportError:
            continue
        made[f"QuantizedCache {backend} {bits} bit"] = lambda backend=backend, bits=bits: QuantizedCache(
            backend=backend, config=config, nbits=bits
        )
    for name, thresholds in DIFFKV.items():
        made[name] = lambda thresholds=thresholds: DiffKVCache(config, DiffKVConfig(**thresholds))
    return made


def wanted(name: str, args: argparse.Namespace) -> bool:
    return args.caches is None or any(part in name for part in args.caches)


def attention_of(name: str) -> str:
    return "diffkv" if name.startswith("DiffKV") else "sdpa"


@torch.no_grad()
def fill(model: transformers.PreTrainedModel, name: str, cache: Cache, tokens: torch.Tensor) -> torch.Tensor:
    """Runs the prompt, in chunks except for DiffKV, whose levels a chunked prompt would change. Returns the logits."""
    model.set_attn_implementation(attention_of(name))
    size = tokens.shape[1] if name.startswith(("DiffKV", "Quantized")) else CHUNK
    for start in range(0, tokens.shape[1], size):
        output = model(tokens[:, start : start + size], past_key_values=cache, logits_to_keep=1)
    return output.logits[:, -1]


@torch.no_grad()
def step(model: transformers.PreTrainedModel, name: str, cache: Cache, token: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(attention_of(name))
    return model(token, past_key_values=cache).logits[:, -1]


def check_lossless(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> None:
    """Dense and lossless logits must agree, else no figure is worth printing."""
    dense = DynamicCache(config=model.config)
    lossless = DiffKVCache(model.config, DiffKVConfig.lossless())
    tokens = tokens[:, :512]
    fill(model, "Dense", dense, tokens)
    fill(model, "DiffKV", lossless, tokens)
    for _ in range(4):
        expected = step(model, "Dense", dense, tokens[:, :1])
        got = step(model, "DiffKV", lossless, tokens[:, :1])
        spread = float(expected.float().std())
        error = float((got - expected).float().square().mean().sqrt())
        limit = (1e-4 if model.dtype == torch.float32 else 0.05) * spread
        if error > limit:
            raise SystemExit(f"lossless logits differ by {error:.3g} (spread {spread:.3g}); not timing anything.")


def time_context(model: transformers.PreTrainedModel, context: int, args: argparse.Namespace) -> list[dict]:
    """Median seconds per token of every cache at one context length."""
    torch.manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (1, context))
    check_lossless(model, tokens)
    held, prompt_seconds = {}, {}
    for name, make in caches(model, context, args.steps + 4).items():
        if not wanted(name, args):
            continue
        print(f"  filling {name} with {context} tokens", file=sys.stderr, flush=True)
        cache = make()
        started = time.perf_counter()
        fill(model, name, cache, tokens)
        prompt_seconds[name] = time.perf_counter() - started
        held[name] = cache
    seconds: dict[str, list[float]] = {name: [] for name in held}
    for index in range(args.steps + 2):
        for name, cache in held.items():
            started = time.perf_counter()
            step(model, name, cache, tokens[:, index : index + 1])
            if index >= 2:
                seconds[name].append(time.perf_counter() - started)
    rows = []
    for name, cache in held.items():
        quarter = statistics.quantiles(seconds[name], n=4)
        row = {
            "context": context,
            "cache": name,
            "ms_per_token": 1e3 * statistics.median(seconds[name]),
            "ms_quartiles": [1e3 * quarter[0], 1e3 * quarter[2]],
            "prompt_seconds": prompt_seconds[name],
        }
        if isinstance(cache, DiffKVCache):
            report = cache.memory()
            row |= {"cache_bytes": report.bytes, "ratio": report.ratio, "payload_ratio": report.payload_ratio}
            row["tokens"] = report.tokens
        rows.append(row)
    held.clear()
    gc.collect()
    return rows


def peak_bytes() -> int:
    """Highest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise SystemExit("peak memory is read from /proc, which this system lacks.")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def trim() -> None:
    """Gives freed memory back to the system, which otherwise counts as resident."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def measure_memory(args: argparse.Namespace) -> None:
    """Runs one cache alone and prints what the process took beyond the loaded, warmed-up model."""
    torch.set_num_threads(args.threads)
    model = build_model(args)
    name, context = args.memory_of, args.contexts[0]
    warm = DynamicCache(config=model.config)
    tokens = torch.randint(0, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
    fill(model, "Dense", warm, tokens[:, :CHUNK])
    del warm
    trim()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    cache = caches(model, context, 8)[name]()
    fill(model, name, cache, tokens)
    peak_prompt = peak_bytes() - before
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    for index in range(4):
        step(model, name, cache, tokens[:, index : index + 1])
    print(json.dumps({"peak_prompt_bytes": peak_prompt, "peak_decode_bytes": peak_bytes() - before}))


def memory_rows(args: argparse.Namespace, context: int, names: list[str]) -> dict[str, dict]:
    rows = {}
    for name in names:
        command = [sys.executable, __file__, "--memory-of", name, "--contexts", str(context), "--dtype", args.dtype]
        command += ["--threads", str(args.threads), "--hidden-size", str(args.hidden_size)]
        command += ["--intermediate-size", str(args.intermediate_size)]
        print(f"  measuring the memory of {name} at {context}", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
    return rows


def environment(args: argparse.Namespace) -> dict:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "threads": args.threads,
        "dtype": args.dtype,
        "layers": 2,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_diffkv": hf_diffkv.__version__,
        "commit": commit.stdout.strip(),
    }


def print_table(rows: list[dict]) -> None:
    print("| context | cache | ms per token | of DynamicCache | of StaticCache | peak in prompt | peak in decode |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        same = {other["cache"]: other["ms_per_token"] for other in rows if other["context"] == row["context"]}
        ratios = [row["ms_per_token"] / same.get(name, float("nan")) for name in ("DynamicCache", "StaticCache")]
        peaks = [
            f"{row[key] / 1e6:.0f} MB" if key in row else "-" for key in ("peak_prompt_bytes", "peak_decode_bytes")
        ]
        print(
            f"| {row['context']} | {row['cache']} | {row['ms_per_token']:.1f} | {ratios[0]:.2f}x | {ratios[1]:.2f}x | "
            f"{peaks[0]} | {peaks[1]} |"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--steps", type=int, default=20, help="timed tokens per cache")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--intermediate-size", type=int, default=14336)
    parser.add_argument("--caches", nargs="+", help="only caches whose name contains one of these")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON lines are appended here")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.memory_of:
        measure_memory(args)
        return
    torch.set_num_threads(args.threads)
    model = build_model(args)
    rows = []
    for context in args.contexts:
        rows += time_context(model, context, args)
    del model
    gc.collect()
    if not args.no_memory:
        for context in args.contexts:
            here = [row for row in rows if row["context"] == context]
            memory = memory_rows(args, context, [row["cache"] for row in here])
            for row in here:
                row |= memory[row["cache"]]
    about = environment(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a") as file:
        for row in rows:
            file.write(json.dumps({**about, **row}) + "\n")
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    print_table(rows)


if __name__ == "__main__":
    main()
