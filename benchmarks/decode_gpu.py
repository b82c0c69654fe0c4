"""Decoding with a random-weight model of the shape of Llama-3-8B: DynamicCache, StaticCache with compile,
QuantizedCache and DiffKV (captured, captured with a compiled forward, from Python), each through `generate()`.

First the time per token over the context length at batch 1, as slope x length + intercept, and where DiffKV breaks
even; then tokens per second at the largest batch whose cache fits a fixed number of bytes. The lossless configuration
must give DynamicCache's logits before anything is timed.

    python benchmarks/decode_gpu.py [--quick] [--contexts 1024 4096] [--cache-bytes 16e9]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from measure import Session, free_memory, parser, relative_error
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
)
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, DiffKVConfig

CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536)
DIFFKV = {
    "DiffKV K8V4": {"alpha_high": 0.0, "alpha_low": 0.0},
    "DiffKV K4V2": {"alpha_high": 1e9, "alpha_low": 0.0},
    "DiffKV 1/0": {"alpha_high": 1.0, "alpha_low": 0.0},
    "DiffKV 1/0, compiled": {"alpha_high": 1.0, "alpha_low": 0.0},
    "DiffKV 1/0, not captured": {"alpha_high": 1.0, "alpha_low": 0.0, "cuda_graphs": False},
    "DiffKV 1/0.3": {"alpha_high": 1.0, "alpha_low": 0.3},
}
PARTS = {
    "attention": ("attend_kernel", "merge_kernel", "score_kernel"),
    "compaction": ("find_victims_kernel", "plan_rows_kernel", "assign_pages_kernel", "move_tokens_kernel"),
}


def build_model(session: Session, tiny: bool) -> PreTrainedModel:
    """Keys and queries are drawn wide enough that attention is not uniform."""
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    size |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    if tiny:
        size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(
        **size,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with session.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data.mul_(3.0)
    model.generation_config.eos_token_id = None
    return model


def caches(model: PreTrainedModel, names: list[str] | None) -> dict[str, Callable[[int], Cache]]:
    """How to make each cache for so many tokens; those whose backend is missing are left out with a line."""
    config = model.config
    made: dict[str, Callable[[int], Cache]] = {
        "DynamicCache": lambda tokens: DynamicCache(config=config),
        "StaticCache, compiled": lambda tokens: StaticCache(config=config, max_cache_len=tokens),
    }
    for backend in ("quanto", "hqq"):
        name = f"QuantizedCache, {backend} 4 bit"
        try:
            QuantizedCache(backend=backend, config=config, nbits=4)
        except ImportError:
            print(f"skipped, {backend} is not installed: {name}", flush=True)
            continue
        made[name] = lambda tokens, backend=backend: QuantizedCache(backend=backend, config=config, nbits=4)
    for name, fields in DIFFKV.items():
        made[name] = lambda tokens, fields=fields: DiffKVCache(config, DiffKVConfig(**fields))
    return {name: make for name, make in made.items() if names is None or any(part in name for part in names)}


class Clock(StoppingCriteria):
    """Notes the time at every token and never stops."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if self.cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self.marks.append(mark)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def seconds(self, skip: int) -> list[float]:
        """Per token, without the first `skip`."""
        pairs = list(zip(self.marks[skip:], self.marks[skip + 1 :]))
        if self.cuda:
            torch.cuda.synchronize()
            return [1e-3 * a.elapsed_time(b) for a, b in pairs]
        return [b - a for a, b in pairs]


def attention_of(name: str) -> str:
    return "diffkv" if name.startswith("DiffKV") else "sdpa"


def generate(model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor, steps: int) -> Clock:
    model.set_attn_implementation(attention_of(name))
    options = {}
    if name.startswith("StaticCache"):
        # a length of its own is compiled for each length, instead of one form for all
        torch.compiler.reset()
        vars(model).pop("_compiled_call", None)
    elif name.endswith(", compiled"):
        options["compile_config"] = CompileConfig()
    clock = Clock(model.device)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        max_new_tokens=steps,
        do_sample=False,
        stopping_criteria=[clock],
        **options,
    )
    return clock


def per_token(model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor, args: argparse.Namespace) -> dict:
    """Median and quartiles of the milliseconds per token; what compiles or captures comes before."""
    seconds = generate(model, name, cache, tokens, args.warmup + args.steps + 1).seconds(0)
    before, timed = seconds[: args.warmup], seconds[args.warmup :]
    lower, median, upper = statistics.quantiles(timed, n=4)
    return {
        "ms_per_token": round(1e3 * median, 4),
        "ms_quartiles": [round(1e3 * lower, 4), round(1e3 * upper, 4)],
        "tokens_timed": len(timed),
        "warm_up_seconds": round(sum(before), 4),
    }


def shares(session: Session, model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor) -> dict:
    """Device microseconds per token of DiffKV's kernels and of all others."""
    steps = 4

    def run() -> None:
        # as many ids as the cache has seen and one more: every forward is a step of one token
        generate(model, name, cache, tokens.new_zeros(1, cache.get_seq_length() + 1), steps)

    kernels = session.kernel_times(run, repeats=1)
    total = sum(kernels.values())
    if total == 0:
        return {}
    parts = {part: sum(us for k, us in kernels.items() if k in names) for part, names in PARTS.items()}
    return {
        "device_us_per_token": round(total / steps, 1),
        **{f"{part}_share": round(us / total, 4) for part, us in parts.items()},
    }


@torch.no_grad()
def check_lossless(model: PreTrainedModel, tokens: Tensor) -> float:
    """Relative difference between the logits of DynamicCache and of lossless DiffKV; stops where it is large."""
    logits = {}
    for name, cache in (
        ("Dense", DynamicCache(config=model.config)),
        ("DiffKV", DiffKVCache(model.config, DiffKVConfig.lossless())),
    ):
        model.set_attn_implementation(attention_of(name))
        model(tokens[:, :-4], past_key_values=cache)
        steps = [model(token, past_key_values=cache).logits for token in tokens[:, -4:].split(1, dim=1)]
        logits[name] = torch.cat(steps)
    error = relative_error(logits["DiffKV"], logits["Dense"])
    if error > (1e-4 if model.dtype == torch.float32 else 0.1):
        raise SystemExit(f"lossless logits differ by {error:.3g} of their norm; nothing timed.")
    return error


def held_bytes(cache: Cache, tokens: int, model: PreTrainedModel) -> int:
    """Bytes a cache holds per batch: as DiffKV reports, else 16-bit keys and values of all tokens."""
    if isinstance(cache, DiffKVCache):
        return cache.memory().bytes
    config = model.config
    dense = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens * model.dtype.itemsize
    # four bits and a scale and zero point of 16 bits per 64 elements
    return dense * 9 // 32 if isinstance(cache, QuantizedCache) else dense


def measure_contexts(session: Session, model: PreTrainedModel, args: argparse.Namespace) -> dict[str, list]:
    """Time per token of every cache at every length, batch 1."""
    found: dict[str, list] = {}
    for context in args.contexts:
        tokens = torch.randint(0, model.config.vocab_size, (1, context), device=session.device)
        for name, make in caches(model, args.caches).items():
            what = f"{name}, context {context}"
            room = context + args.warmup + args.steps + 8
            if not session.has_time(what) or not session.has_memory(4e9 if session.device.type == "cuda" else 0, what):
                continue
            try:
                cache = make(room)
                row = per_token(model, name, cache, tokens, args)
                if isinstance(cache, DiffKVCache):
                    report = cache.memory()
                    row |= {"cache_bytes": report.bytes, "ratio": round(report.ratio, 4)}
                    row |= shares(session, model, name, cache, tokens)
            except (RuntimeError, ValueError, MemoryError) as failure:
                session.failed(what, failure)
                continue
            session.add({"kind": "length", "cache": name, "context": context, "batch": 1, **row})
            found.setdefault(name, []).append((context, row["ms_per_token"]))
            print(f"{what}: {row['ms_per_token']:.3f} ms per token", flush=True)
            del cache
            free_memory()
    return found


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares slope (ms per token of context) and intercept (ms)."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope, mean_y - slope * mean_x


def add_lines(session: Session, found: dict[str, list]) -> None:
    """Slope and intercept of each cache, and from which length on DiffKV is faster than each other cache."""
    lines = {name: fit(points) for name, points in found.items() if len(points) > 1}
    for name, (slope, intercept) in lines.items():
        row = {
            "kind": "line",
            "cache": name,
            "slope_us_per_1k": round(1e6 * slope, 4),
            "intercept_ms": round(intercept, 4),
        }
        if name.startswith("DiffKV"):
            row["break_even"] = {
                other: break_even((slope, intercept), line)
                for other, line in lines.items()
                if not other.startswith("DiffKV")
            }
        session.add(row)


def break_even(mine: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Length from which on the first line is lower; 0 where it always is, None where it never becomes so."""
    if mine[0] >= other[0]:
        return 0.0 if mine[1] <= other[1] and mine[0] == other[0] else None
    return round(max(0.0, (mine[1] - other[1]) / (other[0] - mine[0])), 1)


@torch.no_grad()
def fill(model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor, batch: int) -> None:
    """`batch` copies of one prompt: a real prompt of one request, then repeated."""
    model.set_attn_implementation(attention_of(name))
    if isinstance(cache, DiffKVCache):
        model(tokens, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        return
    dense = DynamicCache(config=model.config)
    model(tokens, past_key_values=dense, logits_to_keep=1)
    for index, layer in enumerate(dense.layers):
        key, value = (x.expand(batch, -1, -1, -1) for x in (layer.keys, layer.values))
        cache.update(key, value, index)
        layer.keys = layer.values = None


def measure_budget(session: Session, model: PreTrainedModel, args: argparse.Namespace) -> None:
    """Tokens per second at the largest batch that fits `--cache-bytes`."""
    context = args.budget_context
    tokens = torch.randint(0, model.config.vocab_size, (1, context), device=session.device)
    steps = args.warmup + args.steps + 2
    for name, make in caches(model, args.caches).items():
        what = f"{name}, {args.cache_bytes / 1e9:.0f} GB of cache, context {context}"
        if not session.has_time(what):
            continue
        try:
            one = make(context + steps)
            fill(model, name, one, tokens, 1)
            per_sequence = held_bytes(one, context + steps, model)
            del one
            batch = min(int(args.cache_bytes // per_sequence), args.max_batch)
            # a repeated cache exists twice for a moment
            if batch == 0 or not session.has_memory(2.5 * batch * per_sequence, f"{what}, batch {batch}"):
                continue
            cache = make(context + steps)
            fill(model, name, cache, tokens, batch)
            next_token = tokens[:, :1].expand(batch, 1)
            row = per_token(model, name, cache, torch.cat([tokens.expand(batch, -1), next_token], dim=1), args)
        except (RuntimeError, ValueError, MemoryError) as failure:
            session.failed(what, failure)
            continue
        row |= {"kind": "budget", "cache": name, "context": context, "batch": batch}
        row |= {"bytes_per_sequence": per_sequence, "cache_bytes_allowed": int(args.cache_bytes)}
        row["tokens_per_second"] = round(1e3 * batch / row["ms_per_token"], 1)
        session.add(row)
        print(f"{what}: batch {batch}, {row['tokens_per_second']:.0f} tokens/s", flush=True)
        del cache
        free_memory()


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "decode_gpu")
    options.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options.add_argument("--caches", nargs="+", help="only caches whose name contains one of these")
    options.add_argument("--steps", type=int, default=48, help="timed tokens")
    options.add_argument("--warmup", type=int, default=20, help="tokens before them")
    options.add_argument("--cache-bytes", type=float, default=16e9)
    options.add_argument("--budget-context", type=int, default=8192)
    options.add_argument("--max-batch", type=int, default=512)
    args = options.parse_args(arguments)
    if args.quick:
        args.contexts = [1024, 4096, 16384]
    if args.tiny:
        args.contexts, args.budget_context, args.cache_bytes = [96, 160], 96, 3e5
        args.steps, args.warmup = 4, 2
    session = Session(args)
    model = build_model(session, args.tiny)
    checked = torch.randint(0, model.config.vocab_size, (1, 96 if args.tiny else 512), device=session.device)
    session.add({"kind": "check", "lossless_error": check_lossless(model, checked)})
    add_lines(session, measure_contexts(session, model, args))
    measure_budget(session, model, args)
    return session


if __name__ == "__main__":
    main()
