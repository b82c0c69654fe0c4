"""Settings of the decode attention kernel against each other: stages of loads ahead, registers, and splits of a row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

from cases import CONFIGS
from measure import Session, free_memory
from rows import RandomRows
from torch import Tensor

STAGES, REGISTERS, SPLITS = (2, 3), (None, 168), (4, 8, 16)
# where the settings matter most; each is compiled four times
SWEPT = ("K8V4", "K4V2")
BATCH, CONTEXT = 32, 8192


def sweep(
    session: Session,
    case: dict,
    name: str,
    query: Tensor,
    heads: int,
    check: Callable[[Tensor, RandomRows], float],
    limit: float,
) -> None:
    """Times all settings of one precision in turns; a line each.

    Args:
        case: result fields of the case, with its context and window.
        query: [batch, query_heads, dim].
        check: relative error of an output; above `limit` nothing is timed.
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
    calls, settings = [], []
    for stages, registers, splits in itertools.product(STAGES, REGISTERS, SPLITS):
        setting = {"num_stages": stages, "maxnreg": registers, "splits": splits}
        options = tuple(option for option in chosen.options if option[0] != "maxnreg")
        options += () if registers is None else (("maxnreg", registers),)
        config = dataclasses.replace(chosen, num_stages=stages, options=options)
        try:
            scratch = Scratch.allocate(query, rows.held, rows.bounds.max_tokens, splits=splits, config=config)
            call = partial(rows.attend, query, scratch=scratch)
            error = check(call(), rows)
            if error > limit:
                raise RuntimeError(f"relative error {error:.2g} against float32, nothing timed")
        except Exception as failure:  # a compiler refuses settings in many ways
            session.failed(case | setting, failure)
            continue
        calls.append(call)
        settings.append(setting)
    for setting, timing in zip(settings, session.time_all(calls)):
        row = {**case, **setting, **timing.row(), **session.speed(rows.bytes_read, timing.median)}
        session.add(row)
        print(f"{name}, {setting}: {row['us']:.1f} us, {row['gb_per_s']} GB/s", flush=True)
    del calls, rows
    free_memory()
