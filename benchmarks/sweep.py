"""Compares settings of the decode attention kernel: blocks, warps, stages, registers, and splits of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from cases import CONFIGS
from measure import Session, free_memory
from rows import RandomRows
from torch import Tensor

# tokens per step, warps, stages, registers per thread; a multiprocessor runs as many warps as registers allow
SETTINGS = (
    (32, 1, 3, 200),
    (32, 1, 3, 255),
    (32, 1, 3, 168),
    (32, 1, 2, 200),
    (32, 1, 2, 168),
    (32, 1, 2, 128),
    (64, 2, 2, 128),
    (64, 2, 3, 128),
    (64, 2, 3, 168),
    (64, 1, 2, 200),
    (16, 1, 2, 128),
    (16, 1, 3, 168),
)
# relative to the default number of splits
SPLIT_SHARES = (1.0, 0.5, 0.25)
SWEPT = ("K8V4", "K4V2", "quality", "balanced", "small", "K6V5-K4V3")
# where registers matter most, and where splits do
MANY, ONE = (32, 8192), (1, 8192)


def sweep(
    session: Session,
    case: dict,
    name: str,
    query: Tensor,
    heads: int,
    check: Callable[[Tensor, RandomRows], float],
    limit: float,
) -> None:
    """Times all settings of one precision in turns, with one line each.

    A single request is timed with several numbers of splits, several requests with several compiler settings.

    Args:
        case: result fields of the case, with its context and window.
        query: [batch, query_heads, dim].
        check: relative error of an output; above `limit`, nothing is timed.
    """
    from hf_diffkv.ops.decode_attention.scratch import KernelConfig, Scratch, backend_of

    config, (batch, query_heads, dim) = CONFIGS[name], query.shape
    tokens = config.tokens(case["context"] - case["window"])
    case = {**case, "kind": "sweep", "name": name}
    if session.lacks_memory(1.1 * config.needed_bytes(batch, heads, dim, tokens), case):
        return
    size = (batch, heads, dim, tokens, case["context"], case["window"])
    rows = config.random_rows(*size, query.dtype, query.device)
    chosen = KernelConfig.choose(rows.layout, query_heads // heads, query.dtype, backend_of(query.device))
    allocate = partial(Scratch.allocate, query, rows.held, rows.bounds.max_tokens)
    if batch == 1:
        most = allocate(config=chosen).splits
        tried = [(chosen, max(1, int(share * most))) for share in SPLIT_SHARES]
    else:
        tried = [(_with(chosen, *setting), None) for setting in SETTINGS]
    calls, settings = [], []
    for config, splits in tried:
        setting = {"block": config.block, "num_warps": config.num_warps, "num_stages": config.num_stages}
        setting |= dict(config.options)
        try:
            scratch = allocate(splits=splits, config=config)
            setting["splits"] = scratch.splits
            call = partial(rows.attend, query, scratch=scratch)
            error = check(call(), rows)
            if error > limit:
                raise RuntimeError(f"relative error {error:.2g} against float32, nothing timed")
        except Exception as failure:  # a compiler rejects settings in many ways
            session.failed(case | setting, failure)
            continue
        calls.append(call)
        settings.append(setting)
    for setting, timing, call in zip(settings, session.time_all(calls), calls):
        row = {**case, **setting, **timing.row(), **session.speed(rows.bytes_read, timing.median)}
        row |= {
            f"{kernel.removesuffix('_kernel')}_us": round(us, 3) for kernel, us in session.kernel_times(call).items()
        }
        session.add(row)
        print(f"{name}, {setting}: {row['us']:.1f} us, {row['gb_per_s']} GB/s", flush=True)
    del calls, rows
    free_memory()


def _with(config: object, block: int, num_warps: int, num_stages: int, registers: int) -> object:
    """Returns `config` with other compiler settings."""
    options = tuple(option for option in config.options if option[0] != "maxnreg")
    changes = {"block": block, "num_warps": num_warps, "num_stages": num_stages}
    return dataclasses.replace(config, **changes, options=(*options, ("maxnreg", registers)))
