"""Decoding with a random-weight model in the shape of Llama-3-8B: DynamicCache, StaticCache with compile,
QuantizedCache and DiffKV (captured, captured with a compiled forward, from Python), each through `generate()`.

First come tokens per second at the largest batch whose cache fits a fixed number of bytes, then the time per token over
the context length at batch 1, which `tables.py` turns into slope x length + intercept and DiffKV's break-even lengths.
Before anything is timed, the lossless configuration's logits must be as close to float32 as DynamicCache's.

    python benchmarks/decode_gpu.py [--quick] [--parts budget] [--contexts 1024 4096] [--cache-bytes 16e9]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch
from measure import Profile, Session, free_memory, parser
from models_gpu import COMPILED, LEAN_STATIC, STATIC, Makers, attention_of, build_model, caches, check_lossless
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel, QuantizedCache, StoppingCriteria
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing
from hf_diffkv.store import settle
from hf_diffkv.store.compaction import compact
from hf_diffkv.store.step import refresh

CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536)
ATTENTION = ("attend_kernel", "finish_kernel")
PARTS = ("budget", "length")
# tokens whose kernels are recorded, after those in which a step is captured anew
PROFILED = (8, 24)


class Clock(StoppingCriteria):
    """Records the time at every token and never stops; with `profiled`, also the kernels between two tokens."""

    def __init__(self, session: Session, profiled: tuple[int, int] | None = None) -> None:
        self.gpu, self.device = session.gpu, session.device
        self.marks: list = []
        self.profiled = profiled
        self.kernels: dict[str, float] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if self.gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self.marks.append(mark)
        if self.profiled is not None and self.gpu:
            self._profile(len(self.marks))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def _profile(self, count: int) -> None:
        if count == self.profiled[0]:
            self.profile = Profile(self.device)
            self.profile.start()
        elif count == self.profiled[1]:
            self.kernels = self.profile.stop()

    def seconds(self) -> list[float]:
        """Seconds per token."""
        pairs = list(zip(self.marks, self.marks[1:]))
        if self.gpu:
            torch.cuda.synchronize(self.device)
            return [1e-3 * a.elapsed_time(b) for a, b in pairs]
        return [b - a for a, b in pairs]


class Warnings(logging.Handler):
    """Collects DiffKV's warnings, for example that steps could not be captured."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("hf_diffkv").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("hf_diffkv").removeHandler(self)

    def row(self) -> dict:
        return {"warnings": self.found} if self.found else {}


def generate(model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor, steps: int, clock: Clock) -> None:
    """Generates `steps` tokens; a StaticCache is compiled anew for its length alone, not once for all lengths."""
    model.set_attn_implementation(attention_of(name))
    options = {}
    if name in (STATIC, LEAN_STATIC):
        torch.compiler.reset()
        vars(model).pop("_compiled_call", None)
    elif name in COMPILED:
        options["compile_config"] = CompileConfig()
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        **passing(cache),
        max_new_tokens=steps,
        do_sample=False,
        stopping_criteria=[clock],
        **options,
    )


def per_token(
    session: Session, model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor, args: argparse.Namespace
) -> dict:
    """Milliseconds per token, without compilation and capture, which happen before.

    The mean includes the steps in which the host reads the device; the median does not.
    """
    clock = Clock(session)
    generate(model, name, cache, tokens, args.warmup + args.steps + 1, clock)
    seconds = clock.seconds()
    before, timed = seconds[: args.warmup], seconds[args.warmup :]
    lower, median, upper = statistics.quantiles(timed, n=4)
    return {
        "ms_per_token": round(1e3 * median, 4),
        "ms_quartiles": [round(1e3 * lower, 4), round(1e3 * upper, 4)],
        "ms_mean": round(1e3 * statistics.fmean(timed), 4),
        "tokens_timed": len(timed),
        "warm_up_seconds": round(sum(before), 4),
    }


def shares(
    session: Session, model: PreTrainedModel, name: str, cache: DiffKVCache, batch: int, ms_per_token: float
) -> dict:
    """Measures attention's share of a step's kernel time and a compaction's share of a step's time.

    The cache is unusable afterwards.
    """
    first, last = PROFILED
    clock = Clock(session, PROFILED)
    # as many ids as the cache has seen plus one: every forward is a step of one token, and any token will do
    cache.held_tokens.clear()
    ids = torch.zeros(batch, cache.get_seq_length() + 1, dtype=torch.int64, device=session.device)
    generate(model, name, cache, ids, last + 1, clock)
    found = {}
    total = sum(clock.kernels.values())
    if total:
        attention = sum(us for kernel, us in clock.kernels.items() if kernel in ATTENTION)
        finish_us = sum(us for kernel, us in clock.kernels.items() if kernel == "finish_kernel") / (last - first)
        found = {"kernels_us": round(total / (last - first), 1), "attention_share": round(attention / total, 4)}
        found["finish_share"] = round(1e-3 * finish_us / ms_per_token, 5)
    (store,) = cache.stores.all
    settle(store)
    refresh(store)
    free_list = store.pool.free_list
    # the newest token that left the windows leaves them again, whatever happened to it
    store.window_start -= 1
    state = [store.window_start, store.table.table, store.high_count, store.low_count, free_list.ring, free_list.state]
    saved = [tensor.clone() for tensor in state]

    def restore() -> None:
        for tensor, before in zip(state, saved):
            tensor.copy_(before)

    def compact_again() -> None:
        restore()
        compact(store)

    whole, copies = session.time_all([compact_again, restore])
    if int(store.flag):
        raise RuntimeError("the compaction was called off, its time means nothing")
    compaction = max(whole.median - copies.median, 0.0)
    return {
        **found,
        "compaction_us": round(1e6 * compaction, 2),
        "compaction_share": round(1e3 * compaction / ms_per_token, 5),
    }


def held_bytes(cache: Cache | None, tokens: int, model: PreTrainedModel) -> int:
    """Bytes a cache holds for one request: as reported by DiffKV, otherwise those of all keys and values."""
    if isinstance(cache, DiffKVCache):
        return cache.memory().bytes
    config = model.config
    dense = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens * model.dtype.itemsize
    # four bits, with a 16-bit scale and zero point per 64 elements
    return dense * 9 // 32 if isinstance(cache, QuantizedCache) else dense


def measure_contexts(session: Session, model: PreTrainedModel, makers: Makers, args: argparse.Namespace) -> None:
    """Times every cache per token at every length, batch 1."""
    cases = [(name, context) for context in args.contexts for name in makers if name not in COMPILED]
    # one compiled forward serves all lengths, unless a StaticCache comes in between
    cases += [(name, context) for name in COMPILED if name in makers for context in args.contexts]
    for name, context in cases:
        case = {"kind": "length", "cache": name, "context": context, "batch": 1}
        dense = held_bytes(None, context, model)
        if not session.has_time(f"{name}, context {context}") or session.lacks_memory(2 * dense + 4e9, case):
            continue
        try:
            measure_length(session, model, makers[name], case, args)
        except Exception as failure:  # compilers and backends fail in many ways
            session.failed(case, failure)


def measure_length(
    session: Session, model: PreTrainedModel, make: Callable[[int], Cache], case: dict, args: argparse.Namespace
) -> None:
    """One cache at one length."""
    name, context = case["cache"], case["context"]
    tokens = torch.randint(0, model.config.vocab_size, (1, context), device=session.device)
    cache = make(context + args.warmup + args.steps + 8)
    with Warnings() as warnings:
        row = per_token(session, model, name, cache, tokens, args)
    row |= warnings.row()
    if isinstance(cache, DiffKVCache):
        report = cache.memory()
        row |= {"config": cache.config.to_dict(), "cache_bytes": report.bytes, "ratio": round(report.ratio, 4)}
        row |= shares(session, model, name, cache, 1, row["ms_per_token"])
    session.add({**case, **row})
    print(f"{name}, context {context}: {row['ms_per_token']:.3f} ms per token", flush=True)


@torch.no_grad()
def fill(model: PreTrainedModel, name: str, cache: Cache, tokens: Tensor, batch: int) -> None:
    """Fills a cache with `batch` copies of one prompt: a real prompt of one request, then repeated."""
    model.set_attn_implementation(attention_of(name))
    if isinstance(cache, DiffKVCache):
        model(tokens, **passing(cache), logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        return
    dense = DynamicCache(config=model.config)
    model(tokens, **passing(dense), logits_to_keep=1)
    for index, layer in enumerate(dense.layers):
        key, value = (x.expand(batch, -1, -1, -1) for x in (layer.keys, layer.values))
        cache.update(key, value, index)
        layer.keys = layer.values = None


def measure_budget(session: Session, model: PreTrainedModel, makers: Makers, args: argparse.Namespace) -> None:
    """Tokens per second at the largest batch that fits `--cache-bytes`; whatever compiles comes last."""
    for name in sorted(makers, key=lambda name: name in (STATIC, LEAN_STATIC, *COMPILED)):
        case = {"kind": "budget", "cache": name, "context": args.budget_context}
        case["cache_bytes_allowed"] = int(args.cache_bytes)
        if not session.has_time(f"{name}, {args.cache_bytes / 1e9:.0f} GB of cache"):
            continue
        free_memory()
        try:
            measure_batch(session, model, makers[name], case, args)
        except Exception as failure:  # compilers and backends fail in many ways
            session.failed(case, failure)


def measure_batch(
    session: Session, model: PreTrainedModel, make: Callable[[int], Cache], case: dict, args: argparse.Namespace
) -> None:
    """One cache at the largest batch."""
    name, context = case["cache"], case["context"]
    tokens = torch.randint(0, model.config.vocab_size, (1, context), device=session.device)
    length = context + args.warmup + args.steps + 2
    one = make(length)
    fill(model, name, one, tokens, 1)
    per_sequence = held_bytes(one, length, model)
    del one
    batch = min(int(args.cache_bytes // per_sequence), args.max_batch)
    if batch == 0:
        session.leave_out(case, f"one sequence takes {per_sequence / 1e9:.1f} GB")
        return
    # a repeated cache briefly exists twice
    if session.lacks_memory(2.5 * batch * per_sequence, {**case, "batch": batch}):
        return
    cache = make(length)
    fill(model, name, cache, tokens, batch)
    ids = torch.cat([tokens, tokens[:, :1]], dim=1).expand(batch, -1).contiguous()
    with Warnings() as warnings:
        row = per_token(session, model, name, cache, ids, args)
    row |= warnings.row()
    row |= {"batch": batch, "bytes_per_sequence": per_sequence}
    row["tokens_per_second"] = round(1e3 * batch / row["ms_mean"], 1)
    if isinstance(cache, DiffKVCache):
        row |= {"config": cache.config.to_dict()}
        row |= shares(session, model, name, cache, batch, row["ms_per_token"])
    session.add({**case, **row})
    print(f"{name}, {context}: batch {batch}, {row['tokens_per_second']:.0f} tokens/s", flush=True)


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "decode_gpu")
    options.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="in this order")
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
    session.add({"kind": "check", **check_lossless(session, model, checked)})
    makers = caches(session, model, args.caches)
    for part in args.parts:
        {"budget": measure_budget, "length": measure_contexts}[part](session, model, makers, args)
    return session


if __name__ == "__main__":
    main()
