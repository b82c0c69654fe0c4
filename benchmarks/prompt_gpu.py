"""Prompt attention with the attention each token receives, against flash attention alone, one layer, on a GPU.

A prompt by itself, and new tokens over a past of as many tokens as the context, three tenths of it K8V4, four K4V2 and
the rest pruned. The latter is compared with dense attention from the new tokens to the whole past, uncompressed.
Outputs and received attention are checked against float32 on a short prompt and past before anything is timed.

    python benchmarks/prompt_gpu.py [--quick] [--contexts 8192 16384] [--new-tokens 512] [--observation-window 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from attention_gpu import BACKENDS, LIMITS, MODELS
from measure import Session, free_memory, parser, relative_error
from rows import random_rows
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from hf_diffkv.config import Precision
from hf_diffkv.ops.prefill_attention import StoredPast, prefill_attention
from hf_diffkv.ops.prefill_attention.reference import prefill_attention as reference

CONTEXTS = (2048, 8192, 16384, 32768, 65536)


# shares of a past at the high and the low level
SHARES = (0.3, 0.4)


def dense(query: Tensor, key: Tensor, value: Tensor, backend: str, causal: bool = True) -> Tensor:
    with sdpa_kernel(BACKENDS[backend]):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def inputs(context: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Query, key and value of one request, laid out in memory as a model's projections leave them."""
    query_heads, heads, dim = shape
    return tuple(
        torch.randn(1, context, count, dim, device=device).to(dtype).transpose(1, 2)
        for count in (query_heads, heads, heads)
    )


def compressed(context: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> StoredPast:
    """What is left of one request of `context` tokens, on scattered pages."""
    _, heads, dim = shape
    window = min(64, context // 4)
    tokens = tuple(int(share * (context - window)) for share in SHARES)
    rows = random_rows(Precision(8, 4), Precision(4, 2), 1, heads, dim, tokens, context, window, dtype, device)
    state = (rows.table, rows.high_count, rows.low_count, rows.window_key, rows.window_value)
    return StoredPast(rows.pages, rows.layout, *state, rows.window_start, rows.length, sum(tokens) + window)


def variants(window: int) -> dict[str, int | None]:
    return {"all queries": None, f"last {window} queries": window}


def check(shape: tuple[int, int, int], context: int, window: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Relative errors of output and received attention; raises `RuntimeError` if they are too large."""
    query, key, value = inputs(context, shape, dtype, device)
    exact = [x.float() for x in (query, key, value)]
    errors = {}
    for past in (None, compressed(context, shape, dtype, device)):
        for name, observation in variants(window).items():
            name = name if past is None else f"{name}, past"
            options = {"scaling": shape[2] ** -0.5, "observation_window": observation, "past": past}
            output, received = prefill_attention(query, key, value, **options)
            expected = reference(*exact, **options)
            errors[name] = [relative_error(output, expected[0]), relative_error(received, expected[1])]
            if max(errors[name]) > LIMITS[dtype]:
                raise RuntimeError(f"relative errors {errors[name]} against float32 with {name}, nothing timed")
    return errors


def measure(session: Session, context: int, model: str, args: argparse.Namespace) -> None:
    shape = MODELS[model] if not args.tiny else (4, 2, 32)
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    case = {"model": model, "context": context, "batch": 1, "dtype": str(dtype)[6:]}
    query, key, value = inputs(context, shape, dtype, session.device)
    operations = 2 * 2 * shape[0] * shape[2] * context * context / 2
    best = None
    for backend in ["flash", "cudnn"] if session.device.type == "cuda" else ["math"]:
        best = timed(session, {**case, "kind": "dense"}, backend, lambda b=backend: dense(query, key, value, b), best)
    for name, observation in variants(args.observation_window).items():
        flash = best
        row = {**case, "kind": "significance"}

        def call(observation: int | None = observation) -> object:
            return prefill_attention(query, key, value, scaling=shape[2] ** -0.5, observation_window=observation)

        took = timed(session, row, name, call, None, flash, operations)
        if took is not None and flash is not None:
            print(f"{model}, {context}, {name}: {1e6 * took:.0f} us, {took / flash:.2f} of the best dense", flush=True)


def measure_past(session: Session, context: int, model: str, args: argparse.Namespace) -> None:
    """New tokens over a past of `context` tokens."""
    shape = MODELS[model] if not args.tiny else (4, 2, 32)
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    new = args.new_tokens
    case = {"model": model, "context": context, "new_tokens": new, "batch": 1, "dtype": str(dtype)[6:]}
    query, key, value = inputs(new, shape, dtype, session.device)
    best = None
    _, past_key, past_value = inputs(context + new, shape, dtype, session.device)
    for backend in ["flash", "cudnn"] if session.device.type == "cuda" else ["math"]:
        row = {**case, "kind": "dense past"}
        best = timed(session, row, backend, lambda b=backend: dense(query, past_key, past_value, b, False), best)
    past = compressed(context, shape, dtype, session.device)
    for name, observation in variants(args.observation_window).items():
        options = {"scaling": shape[2] ** -0.5, "observation_window": observation, "past": past}
        row = {**case, "kind": "compressed past"}
        timed(session, row, name, lambda o=options: prefill_attention(query, key, value, **o), None, best)


def timed(
    session: Session,
    row: dict,
    name: str,
    call: Callable[[], object],
    best: float | None,
    against: float | None = None,
    operations: float | None = None,
) -> float | None:
    """Times `call`, writes a row, and returns the smaller of its seconds and `best`."""
    try:
        timing = session.time(call)
        kernels = session.kernel_times(call)
    except (RuntimeError, ValueError) as failure:
        session.failed(f"{row['model']}, context {row['context']}, {name}", failure)
        return best
    row = {**row, "name": name, **timing.row()}
    if against is not None:
        row["over_dense"] = round(timing.median / against, 4)
    if operations is not None:
        row["tflops"] = round(operations / timing.median / 1e12, 1)
    for part in ("flash_forward", "column_scores", "past_forward", "past_scores"):
        if part in kernels:
            row[f"{part}_us"] = round(kernels[part], 3)
    session.add(row)
    return timing.median if best is None else min(best, timing.median)


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "prompt_gpu")
    options.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options.add_argument("--observation-window", type=int, default=64)
    options.add_argument("--new-tokens", type=int, default=512, help="tokens that follow a past")
    args = options.parse_args(arguments)
    if args.quick:
        args.contexts = [8192, 32768]
    checked = 2048
    if args.tiny:
        args.contexts, args.observation_window, args.new_tokens, checked = [64], 8, 16, 48
    session = Session(args)
    dtype = torch.bfloat16 if session.device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    for model in args.models:
        shape = MODELS[model] if not args.tiny else (4, 2, 32)
        try:
            errors = check(shape, checked, args.observation_window, dtype, session.device)
        except (RuntimeError, ValueError) as failure:
            session.failed(f"{model}, check at {checked}", failure)
            continue
        session.add({"model": model, "context": checked, "kind": "check", "errors": errors})
        for context in args.contexts:
            # the heads' results and the log-sum-exp are small beside the inputs
            if session.has_time(f"{model}, context {context}"):
                measure(session, context, model, args)
            free_memory()
            if session.has_time(f"{model}, past of {context}"):
                measure_past(session, context, model, args)
            free_memory()
    return session


if __name__ == "__main__":
    main()
