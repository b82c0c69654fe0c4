"""Prompt attention with the attention that each token receives, against flash attention alone, one layer, on a GPU.

Two cases are timed: a prompt by itself, and new tokens over a past of the context's length, with 30% of it at K8V4, 40%
at K4V2 and the rest pruned. The latter is compared with dense attention from the new tokens to the whole uncompressed
past. Before anything is timed, outputs and received attention are checked against float32 on a short prompt and past.

    python benchmarks/prompt_gpu.py [--quick] [--contexts 8192 16384] [--new-tokens 512] [--observation-window 64]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from attention_gpu import BACKENDS, LIMITS
from cases import CONFIGS, MODELS
from measure import Session, free_memory, parser, relative_error
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from hf_diffkv.ops.prefill_attention.reference import prefill_attention as reference
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.table import ops_for
from hf_diffkv.pages import EarlierTokens

CONTEXTS = (2048, 8192, 16384, 32768, 65536)
# levels of a past
MIX = "30/40/30"


def dense(query: Tensor, key: Tensor, value: Tensor, backend: str, causal: bool = True) -> Tensor:
    with sdpa_kernel(BACKENDS[backend]):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def inputs(context: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Query, key and value of one request, with the memory layout of a model's projections."""
    query_heads, heads, dim = shape
    return tuple(
        torch.randn(1, context, count, dim, device=device).to(dtype).transpose(1, 2)
        for count in (query_heads, heads, heads)
    )


def compressed(context: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> EarlierTokens:
    """Returns the stored tokens of one request of `context` tokens, on scattered pages."""
    _, heads, dim = shape
    window = min(64, context // 4)
    config = CONFIGS[MIX]
    tokens = config.tokens(context - window)
    rows = config.random_rows(1, heads, dim, tokens, context, window, dtype, device)
    return EarlierTokens(rows.held, sum(tokens) + window)


def variants(window: int) -> dict[str, int | None]:
    return {"all queries": None, f"last {window} queries": window}


def check(shape: tuple[int, int, int], context: int, window: int, dtype: torch.dtype, device: torch.device) -> dict:
    """Relative errors of output and received attention; raises `RuntimeError` if they are too large."""
    query, key, value = inputs(context, shape, dtype, device)
    exact = [x.float() for x in (query, key, value)]
    errors = {}
    for past in (EarlierTokens(), compressed(context, shape, dtype, device)):
        for name, observation in variants(window).items():
            name = f"{name}, past" if past.stored else name
            options = {"softmax": Softmax(shape[2] ** -0.5), "observed": observation, "past": past}
            output, received = ops_for(device, dtype).prefill_attention(query, key, value, **options)
            expected = reference(*exact, **options)
            errors[name] = [relative_error(output, expected[0]), relative_error(received, expected[1])]
            if max(errors[name]) > LIMITS[dtype]:
                raise RuntimeError(f"relative errors {errors[name]} against float32 with {name}, nothing timed")
    return errors


def measure(session: Session, context: int, model: str, args: argparse.Namespace) -> None:
    shape = MODELS[model] if not args.tiny else (4, 2, 32)
    case = {"model": model, "context": context, "batch": 1, "dtype": str(session.dtype)[6:]}
    query, key, value = inputs(context, shape, session.dtype, session.device)
    prefill_attention = ops_for(session.device, session.dtype).prefill_attention
    ways = {
        name: lambda o=observation: prefill_attention(query, key, value, Softmax(shape[2] ** -0.5), observed=o)
        for name, observation in variants(args.observation_window).items()
    }
    plain = {b: lambda b=b: dense(query, key, value, b) for b in backends(session)}
    operations = 2 * 2 * shape[0] * shape[2] * context * context / 2
    compare(session, case, ("dense", plain), ("significance", ways), operations)


def measure_past(session: Session, context: int, model: str, args: argparse.Namespace) -> None:
    """Times new tokens over a past of `context` tokens."""
    shape = MODELS[model] if not args.tiny else (4, 2, 32)
    new = args.new_tokens
    case = {"model": model, "context": context, "new_tokens": new, "batch": 1, "dtype": str(session.dtype)[6:]}
    query, key, value = inputs(new, shape, session.dtype, session.device)
    _, past_key, past_value = inputs(context + new, shape, session.dtype, session.device)
    past = compressed(context, shape, session.dtype, session.device)
    options = {"softmax": Softmax(shape[2] ** -0.5), "past": past}
    prefill_attention = ops_for(session.device, session.dtype).prefill_attention
    ways = {
        name: lambda o=observation: prefill_attention(query, key, value, observed=o, **options)
        for name, observation in variants(args.observation_window).items()
    }
    plain = {b: lambda b=b: dense(query, past_key, past_value, b, False) for b in backends(session)}
    compare(session, case, ("dense past", plain), ("compressed past", ways))


def backends(session: Session) -> list[str]:
    return ["flash", "cudnn"] if session.gpu else ["math"]


def compare(
    session: Session,
    case: dict,
    plain: tuple[str, dict[str, Callable[[], object]]],
    ways: tuple[str, dict[str, Callable[[], object]]],
    operations: float | None = None,
) -> None:
    """Times all calls in turns; each group is a kind of result and its calls by name, dense attention first."""
    found = []
    for kind, calls in (plain, ways):
        for name, call in calls.items():
            try:
                call()
            except (RuntimeError, ValueError) as failure:
                session.failed({**case, "kind": kind, "name": name}, failure)
                continue
            found.append((kind, name, call))
    try:
        timings = session.time_all([call for _, _, call in found])
    except RuntimeError as failure:
        session.failed({**case, "kind": ways[0], "name": "all"}, failure)
        return
    taken = {name: timing.median for (_, name, _), timing in zip(found, timings)}
    best = min((taken[name] for name in plain[1] if name in taken), default=None)
    for (kind, name, call), timing in zip(found, timings):
        row = {**case, "kind": kind, "name": name, **timing.row()}
        if kind == ways[0]:
            row |= {} if best is None else {"over_dense": round(timing.median / best, 4)}
            row |= {"over_flash": round(timing.median / taken["flash"], 4)} if "flash" in taken else {}
            kernels = session.kernel_times(call)
            parts = ("flash_forward", "column_scores", "past_forward", "past_scores")
            row |= {f"{part}_us": round(kernels[part], 3) for part in parts if part in kernels}
        if operations is not None:
            row["tflops"] = round(operations / timing.median / 1e12, 1)
        session.add(row)
        if kind == ways[0] and best is not None:
            what = f"{case['model']}, {case['context']}, {kind}, {name}"
            print(f"{what}: {row['us']:.0f} us, {row['over_dense']:.2f} of the best dense", flush=True)


def checked_model(session: Session, model: str, context: int, args: argparse.Namespace) -> bool:
    """Returns whether a model's shape passes `check`, and adds a result that says so."""
    shape = MODELS[model] if not args.tiny else (4, 2, 32)
    case = {"model": model, "context": context, "kind": "check"}
    try:
        errors = check(shape, context, args.observation_window, session.dtype, session.device)
    except (RuntimeError, ValueError) as failure:
        session.failed(case, failure)
        return False
    session.add({**case, "errors": errors})
    return True


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
    torch.manual_seed(0)
    right = [model for model in args.models if checked_model(session, model, checked, args)]
    # the cases that the goals are stated for come first
    for part, context, model in itertools.product((measure, measure_past), args.contexts, right):
        if session.has_time(f"{part.__name__}, {model}, context {context}"):
            case = {"model": model, "context": context, "kind": part.__name__}
            try:
                part(session, context, model, args)
            except RuntimeError as failure:
                session.failed(case, failure)
        free_memory()
    return session


if __name__ == "__main__":
    main()
