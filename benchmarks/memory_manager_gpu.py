"""Memory management in one decode step: compaction of all layers on a GPU, against the CPU and alongside attention.

The CPU runs the same round in vectorised PyTorch on all threads, on a copy of the same rows. Moving counts and tokens
between host and device, which a manager on the host would also need, is timed separately. Before anything is timed,
both sides must produce the same counts, tables and free lists (DiffKV, SOSP 2025, figures 13 and 14).

    python benchmarks/memory_manager_gpu.py [--quick] [--batches 1 8 32] [--context 4096]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from attention_gpu import compressed_call
from cases import CONFIGS, MODELS
from measure import Session, free_memory, parser
from rows import RandomRows
from torch import Tensor

from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.table import ops_for_rows
from hf_diffkv.pages import FreeList

LAYERS = 32
MIX = "30/40/30"


@dataclass
class Round:
    """One round of Algorithm 1 over all rows of all layers, and how to undo it."""

    rows: RandomRows
    window: int
    thresholds: tuple[Tensor, Tensor]
    flag: Tensor

    def state(self) -> list[Tensor]:
        """Returns the tensors that a round changes, other than page contents."""
        held = self.rows.held
        return [held.page_table, *held.counts, held.window_start, held.free_list.ring, held.free_list.state]

    def run(self) -> None:
        compact_windows = ops_for_rows(self.rows.held).compact_windows
        compact_windows(self.rows.held, self.window, *self.thresholds, bounds=self.rows.bounds, flag=self.flag)

    def to(self, device: torch.device) -> Round:
        """Copies everything to another device."""
        rows, held, pool = self.rows, self.rows.held, SimpleNamespace(free_list=FreeList(device))
        pool.pages = held.pages.to(device, copy=True)
        pool.free_list.ring = held.free_list.ring.to(device, copy=True)
        pool.free_list.state = held.free_list.state.to(device, copy=True)
        tensors = {name: part.to(device, copy=True) for name, part in vars(held).items() if isinstance(part, Tensor)}
        bounds = replace(rows.bounds, tiers=[(*given, device) for *given, _ in rows.bounds.tiers])
        twin = replace(rows, held=replace(held, pool=pool, **tensors), bounds=bounds)
        high, low, flag = (part.to(device, copy=True) for part in (*self.thresholds, self.flag))
        return Round(twin, self.window, (high, low), flag)


def make_round(batch: int, heads: int, dim: int, context: int, window: int, layers: int, session: Session) -> Round:
    """All layers as one batch of rows; a candidate leaves every window, as in each step in the paper."""
    config = CONFIGS[MIX]
    tokens = config.tokens(context - window)
    dtype = session.dtype
    count = layers * batch * heads
    rows = config.random_rows(
        layers * batch, heads, dim, tokens, context, window, dtype, session.device, spare_pages=2 * count
    )
    device = session.device
    rows.held.free_list.extend(rows.held.pages.shape[0] - 2 * count, 2 * count)
    rows.held.window_score.mul_(window)
    # about a third of the candidates at each level, and victims that must move
    thresholds = tuple(torch.full((layers * batch, heads), limit, device=device) for limit in (0.66, 0.33))
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    return Round(rows, window - 1, thresholds, flag)


def check(step: Round, twin: Round) -> None:
    """Raises `RuntimeError` unless both devices do the same."""
    step.run()
    with use_backend("reference"):
        twin.run()
    for name, got, expected in zip(("table", "high", "low", "ring", "state"), step.state(), twin.state()):
        # the unused part of the ring may differ
        if name == "ring":
            got, expected = step.rows.held.free_list.ids(), twin.rows.held.free_list.ids()
            got, expected = got.sort().values, expected.sort().values
        if name == "table":
            got, expected = got != 0, expected != 0
        if not torch.equal(got.cpu(), expected.cpu()):
            raise RuntimeError(f"{name} differs between the device and the CPU")
    if int(step.flag) or int(twin.flag):
        raise RuntimeError("the round was called off")


def repeatable(step: Round) -> tuple[Callable[[], None], Callable[[], None]]:
    """A round that starts from the same tables every time, and the copies alone."""
    saved = [tensor.clone() for tensor in step.state()]

    def restore() -> None:
        for tensor, before in zip(step.state(), saved):
            tensor.copy_(before)

    def call() -> None:
        restore()
        step.run()

    return call, restore


def measure(session: Session, batch: int, args: argparse.Namespace) -> None:
    query_heads, heads, dim = MODELS["llama-3-8b"] if not args.tiny else (4, 2, 32)
    config = CONFIGS[MIX]
    tokens = config.tokens(args.context - args.window)
    case = {"batch": batch, "context": args.context, "window": args.window, "layers": args.layers}
    device_case, cpu_case = {"kind": "device", **case}, {"kind": "cpu", **case}
    if session.lacks_memory(1.2 * config.needed_bytes(args.layers * batch, heads, dim, tokens), device_case):
        return
    try:
        step = make_round(batch, heads, dim, args.context, args.window, args.layers, session)
        with_cpu = step.rows.held.pages.numel() <= args.cpu_bytes
        before = [tensor.clone() for tensor in step.state()]
        if with_cpu:
            twin = step.to(torch.device("cpu"))
            check(step, twin)
            for one in (step, twin):
                for tensor, saved in zip(one.state(), before):
                    tensor.copy_(saved)
        else:
            session.leave_out(cpu_case, f"{step.rows.held.pages.numel() / 1e9:.1f} GB of pages, see --cpu-bytes")
        call, restore = repeatable(step)
        query = torch.randn(args.layers * batch, query_heads, dim, device=session.device).to(step.rows.held.dtype)
        whole, copies, attention = session.time_all([call, restore, compressed_call(step.rows, query)])
        compaction = max(whole.median - copies.median, 0.0)
        row = {**device_case, "rows": args.layers * batch * heads, **whole.row()}
        row["compaction_us"] = round(1e6 * compaction, 3)
        row["kernels"] = {
            name: round(us, 3)
            for name, us in session.kernel_times(step.run, repeats=1).items()
            if name.endswith("_kernel")
        }
        row["attention_us"] = round(1e6 * attention.median, 3)
        row["share_of_attention"] = round(compaction / attention.median, 4)
        session.add(row)
        line = f"batch {batch}: {row['compaction_us']} us, {100 * row['share_of_attention']:.2f} % of attention"
        if with_cpu:
            with use_backend("reference"):
                host = time_host(twin, min(session.repeats, 5))
            session.add({**cpu_case, "threads": torch.get_num_threads(), **host})
            line += f", on the CPU {host['us']:.1f} us"
        print(line, flush=True)
    except (RuntimeError, ValueError) as failure:
        session.failed(device_case, failure)


def time_host(twin: Round, repeats: int) -> dict:
    """Wall time of a round on the CPU."""
    import statistics
    import time

    saved = [tensor.clone() for tensor in twin.state()]
    seconds = []
    for _ in range(repeats + 1):
        for tensor, before in zip(twin.state(), saved):
            tensor.copy_(before)
        started = time.perf_counter()
        twin.run()
        seconds.append(time.perf_counter() - started)
    lower, median, upper = statistics.quantiles(seconds[1:], n=4) if repeats > 1 else seconds[1:] * 3
    return {"us": round(1e6 * median, 3), "us_quartiles": [round(1e6 * lower, 3), round(1e6 * upper, 3)]}


def main(arguments: list[str] | None = None) -> Session:
    options = parser(__doc__, "memory_manager_gpu")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options.add_argument("--context", type=int, default=4096)
    options.add_argument("--window", type=int, default=64)
    options.add_argument("--layers", type=int, default=LAYERS)
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--cpu-bytes", type=float, default=8e9, help="largest pool that the CPU side is run on")
    args = options.parse_args(arguments)
    if args.tiny:
        args.batches, args.context, args.window, args.layers, args.threads = [1, 2], 96, 8, 2, 1
    if args.quick:
        args.batches = [1, 8, 32]
    torch.set_num_threads(args.threads)
    session = Session(args)
    torch.manual_seed(0)
    for batch in args.batches:
        if session.has_time(f"memory manager, batch {batch}"):
            measure(session, batch, args)
        free_memory()
    return session


if __name__ == "__main__":
    main()
