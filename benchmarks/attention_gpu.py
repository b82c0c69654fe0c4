"""Decode attention over compressed pages against dense attention in bf16 and FP8, one layer, on a GPU.

Times are device times with a cold L2 cache; bytes count the stored tokens with all metadata, read once. Before it is
timed, every output, dense ones included, is checked against float32 attention over what is stored.

    python benchmarks/attention_gpu.py [--quick | --sweep] [--models llama-3-8b] [--batches 1 32] [--contexts 8192]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from cases import CONFIGS, MODELS
from engines import ENGINES, FP8, read
from measure import Session, free_memory, parser, relative_error
from rows import RandomRows
from sweep import MANY, ONE, SWEPT, sweep
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_diffkv.ops.table import ops_for_rows

BATCHES = (1, 8, 32, 64)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# the cases that the goals are stated for come first, so that a time limit cuts the others
FIRST = [(32, 8192), (1, 4096), (1, 8192), (64, 8192), (1, 131072), (32, 32768), (64, 32768), (8, 32768), (1, 32768)]
FIRST += [(32, 1024)]
# FP8 kernels may round weights as well
FP8_LIMIT = 5e-2
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-3}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def dense_calls(query: Tensor, key: Tensor, value: Tensor, backends: list[str]) -> dict[str, Callable[[], Tensor]]:
    """Ways to run dense attention; query [batch, query_heads, dim], key and value [batch, heads, tokens, dim].

    The group of a KV head is passed either as query heads or as query tokens; which is faster depends on the backend.
    """
    batch, heads, _, dim = key.shape

    def run(backend: str, as_tokens: bool) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            attend = torch.nn.functional.scaled_dot_product_attention
            if as_tokens:
                return attend(query.view(batch, heads, -1, dim), key, value).reshape(query.shape)
            return attend(query[:, :, None], key, value, enable_gqa=True).reshape(query.shape)

    ways = itertools.product(backends, (False, True))
    return {
        f"{backend}, group as {'tokens' if tokens else 'heads'}": lambda b=backend, t=tokens: run(b, t)
        for backend, tokens in ways
    }


def exact(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """float32 attention of one row: query [group, dim], key and value [tokens, dim]."""
    weights = torch.softmax(scaling * query.double() @ key.double().T, dim=-1)
    return (weights @ value.double()).float()


def check(output: Tensor, query: Tensor, dense: Callable[[int, int], tuple[Tensor, Tensor]], heads: int) -> float:
    """Worst relative error over the first and the last row; `dense` gives keys and values of a row."""
    batch, query_heads, dim = query.shape
    group = query_heads // heads
    worst = 0.0
    for request, head in {(0, 0), (batch - 1, heads - 1)}:
        part = slice(head * group, (head + 1) * group)
        expected = exact(query[request, part], *dense(request, head), dim**-0.5)
        worst = max(worst, relative_error(output[request, part], expected))
    return worst


def _swept_error(query: Tensor, heads: int, output: Tensor, rows: RandomRows) -> float:
    return check(output, query, rows.dense, heads)


def compressed_call(rows: RandomRows, query: Tensor) -> Callable[[], Tensor]:
    """Attention over `rows` with persistent buffers, as in a captured step."""
    allocate = ops_for_rows(rows.held).allocate_scratch
    scratch = None if allocate is None else allocate(query, rows.held, rows.bounds.max_tokens)
    return lambda: rows.attend(query, scratch=scratch)


@dataclass
class Dense:
    """The fastest dense attention of a case; `call` is None if there is none, or no memory for its keys and values."""

    name: str = ""
    median: float | None = None
    call: Callable[[], Tensor] | None = None

    def or_faster(self, other: Dense) -> Dense:
        return other if self.median is None or other.median < self.median else self


def measure_dense(session: Session, case: dict, query: Tensor, heads: int, backends: list[str]) -> Dense:
    """Times all dense variants."""
    batch, _, dim = query.shape
    elements = batch * heads * case["context"] * dim
    case = {**case, "kind": "dense"}
    best = Dense()
    if session.lacks_memory(2.2 * elements * query.element_size(), {**case, "name": "dense"}):
        return best
    key = torch.empty(batch, heads, case["context"], dim, dtype=query.dtype, device=query.device).normal_()
    value = torch.empty_like(key).normal_()
    errors, calls = {}, {}
    for name, call in dense_calls(query, key, value, backends).items():
        try:
            errors[name] = check(call(), query, lambda r, h: (key[r, h].float(), value[r, h].float()), heads)
            if errors[name] > LIMITS[query.dtype]:
                raise RuntimeError(f"relative error {errors[name]:.2g} against float32, nothing timed")
        except RuntimeError as failure:
            session.failed({**case, "name": name}, failure)
            continue
        calls[name] = call
    num_bytes = 2 * elements * query.element_size()
    for name, timing in zip(calls, session.time_all(list(calls.values())) if calls else ()):
        row = {**case, "name": name, "error": errors[name], **timing.row()}
        session.add(row | session.speed(num_bytes, timing.median))
        best = best.or_faster(Dense(name, timing.median, calls[name]))
    best = measure_engines(session, case, query, key, value, best)
    timing = session.time(read(query, key, value))
    row = {**case, "kind": "read", "name": "reading alone", **timing.row()}
    session.add(row | session.speed(num_bytes, timing.median))
    return best


def measure_engines(session: Session, case: dict, query: Tensor, key: Tensor, value: Tensor, best: Dense) -> Dense:
    """Times other projects' attention, one at a time as each copies the keys; returns the fastest bf16 or `best`."""
    heads = key.shape[1]
    for kind, name, make, narrow in ENGINES:
        mine = {**case, "kind": kind, "name": name}
        if not session.has_time(f"{name}, {case['model']}, batch {case['batch']}, context {case['context']}"):
            return best
        stored = [tensor.to(FP8) if narrow else tensor for tensor in (key, value)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored)
        if session.lacks_memory(1.1 * num_bytes, mine):
            continue
        try:
            call = make(query, *stored)
            error = check(call(), query, lambda r, h, kv=stored: (kv[0][r, h].float(), kv[1][r, h].float()), heads)
            if error > (FP8_LIMIT if narrow else LIMITS[query.dtype]):
                raise RuntimeError(f"relative error {error:.2g} against float32, nothing timed")
            timing = session.time(call)
        except ImportError as missing:
            session.leave_out(mine, f"not installed: {missing}")
            continue
        except Exception as failure:  # other projects' releases fail in many ways
            session.failed(mine, failure)
            continue
        session.add({**mine, "error": error, **timing.row()} | session.speed(num_bytes, timing.median))
        if kind == "dense":
            best = best.or_faster(Dense(name, timing.median, call))
    return best


def measure_config(session: Session, case: dict, name: str, query: Tensor, heads: int, dense: Dense) -> None:
    """Times one precision in turns with the fastest dense attention, which is the baseline of its speed-up."""
    batch, _, dim = query.shape
    config = CONFIGS[name]
    tokens = config.tokens(case["context"] - case["window"])
    case = {**case, "kind": "compressed", "name": name}
    num_bytes = 1.1 * config.needed_bytes(batch, heads, dim, tokens)
    if not session.has_memory(num_bytes):
        dense.call = None
    if session.lacks_memory(num_bytes, case):
        return
    try:
        size = (batch, heads, dim, tokens, case["context"], case["window"])
        rows = config.random_rows(*size, query.dtype, query.device)
        call = compressed_call(rows, query)
        error = check(call(), query, rows.dense, heads)
        if error > LIMITS[query.dtype]:
            raise RuntimeError(f"relative error {error:.2g} against float32, nothing timed")
        timing, *others = session.time_all([call] if dense.call is None else [call, dense.call])
        kernels = session.kernel_times(call)
    except (RuntimeError, ValueError) as failure:
        session.failed(case, failure)
        return
    row = {**case, "error": error, **timing.row(), **session.speed(rows.bytes_read, timing.median)}
    for part in ("attend", "finish"):
        found = [us for kernel, us in kernels.items() if kernel == f"{part}_kernel"]
        row |= {f"{part}_us": round(sum(found), 3)} if found else {}
    if dense.median is not None:
        median = others[0].median if others else dense.median
        row |= {"dense": dense.name, "dense_us": round(1e6 * median, 3), "speed_up": round(median / timing.median, 3)}
    session.add(row)
    what = f"{name}, {case['model']}, batch {batch}, context {case['context']}"
    speed_up = row.get("speed_up", float("nan"))
    print(f"{what}: {row['us']:.1f} us, {row['gb_per_s']} GB/s, speed-up {speed_up:.2f}, error {error:.1g}", flush=True)


def grid(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Batch and context of every case, the most informative first."""
    wanted = list(itertools.product(args.batches, args.contexts))
    first = [case for case in FIRST if case in wanted]
    return first if args.quick else first + [case for case in wanted if case not in first]


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "attention_gpu")
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    options.add_argument("--window", type=int, default=64)
    options.add_argument("--sweep", action="store_true", help="settings of the kernel instead, on one case")
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    args = options.parse_args(arguments)
    session = Session(args)
    dtype, cases, backends = getattr(torch, args.dtype), grid(args), ["flash", "cudnn", "efficient"]
    if args.sweep:
        cases, args.models = [MANY, ONE], args.models[:1]
    if args.tiny:
        dtype, cases, backends, args.window = torch.float32, [(2, 96)], ["math"], 8
    for (batch, context), model in itertools.product(cases, args.models):
        query_heads, heads, dim = MODELS[model] if not args.tiny else (4, 2, 32)
        if not session.has_time(f"{model}, batch {batch}, context {context}"):
            break
        torch.manual_seed(0)
        query = torch.randn(batch, query_heads, dim, device=session.device).to(dtype)
        case = {"model": model, "kv_heads": heads, "batch": batch, "context": context}
        case |= {"window": args.window, "dtype": str(dtype)[6:]}
        if args.sweep:
            for name in (name for name in SWEPT if name in args.configs):
                right = partial(_swept_error, query, heads)
                sweep(session, case, name, query, heads, right, LIMITS[dtype])
            continue
        try:
            dense = measure_dense(session, case, query, heads, backends)
        except RuntimeError as failure:
            session.failed({**case, "kind": "dense", "name": "dense"}, failure)
            dense = Dense()
        for name in args.configs:
            if session.has_time(f"{name}, {model}, batch {batch}, context {context}"):
                measure_config(session, case, name, query, heads, dense)
            free_memory()
        del dense
        free_memory()
    return session


if __name__ == "__main__":
    main()
