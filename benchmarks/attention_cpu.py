"""Decode attention of a single layer on a CPU: native code against the best dense attention in bfloat16.

There is one new token, with 8 KV heads of 128 and 32 query heads; keys and values are random, all in one tier except
for a window of 64. Competitors take turns in one process, so that other load affects all of them alike. Figures are
medians; on a busy machine, only their ratios are meaningful.

    python benchmarks/attention_cpu.py [--tokens 4096 16384] [--threads 1] [--instructions avx512vnni]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cpu_caches import about_machine

from hf_diffkv.config.presets import PRESETS
from hf_diffkv.native import library
from hf_diffkv.ops.decode_attention import native, reference
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.table import ops_for
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import LayerRows, PagePool
from hf_diffkv.pages.layout import UNIFORM_NUMBERS, PageLayout
from hf_diffkv.pages.segments import Contents
from hf_diffkv.precision import Precision

HEADS, QUERY_HEADS, DIM, WINDOW = 8, 32, 128, 64
# with sums and positions, and without, as in the presets
PRECISIONS = {
    **{name: (Precision.parse(name), {}) for name in ("K8V4", "K4V2", "K6V4", "K5V3")},
    **{f"preset {name}": (fields["high"], UNIFORM_NUMBERS) for name, fields in PRESETS.items()},
}


class Layer:
    """One request with `tokens` tokens, all of which but the window are stored at `precision`."""

    def __init__(self, precision: Precision, numbers: dict[str, int], tokens: int, dtype: torch.dtype) -> None:
        self.layout = PageLayout.build(precision, precision, DIM, DIM, dtype.itemsize, **numbers)
        tier, stored = self.layout.high, tokens - WINDOW
        pages = -(-stored // tier.capacity)
        self.pool = PagePool(self.layout.page_bytes, torch.device("cpu"))
        self.pool.ensure_free(HEADS * pages)
        ids = 1 + torch.arange(HEADS * pages).view(HEADS, pages)
        table = torch.zeros(1, HEADS, pages + 2, dtype=torch.int32)
        table[0, :, :pages] = ids
        self.high, self.low = torch.full((1, HEADS), stored), torch.zeros(1, HEADS)
        index = torch.arange(stored)
        for head in range(HEADS):
            key, value = torch.randn(2, stored, DIM)
            page = ids[head][index // tier.capacity]
            contents = Contents(key, value, torch.zeros(stored), index)
            ops_for(self.pool.pages.device, dtype, tier).store_tokens(
                self.pool.pages, tier, page, index % tier.capacity, contents, dtype
            )
        window = torch.randn(2, 1, HEADS, WINDOW, DIM).to(dtype)
        none, no_sinks = torch.zeros(1, HEADS), torch.zeros(1, dtype=torch.int64)
        self.rows = LayerRows(
            layout=self.layout,
            pool=self.pool,
            page_table=table,
            high_count=self.high.int(),
            low_count=self.low.int(),
            window_key=window[0].contiguous(),
            window_value=window[1].contiguous(),
            window_score=torch.zeros(1, HEADS, WINDOW),
            window_start=torch.tensor([stored]),
            length=torch.tensor([tokens]),
            sink_end=no_sinks,
            sink_slots=0,
            key_offset=torch.zeros(1, HEADS, 0),
            alpha_high=none,
            alpha_low=none,
            invalid=torch.zeros((), dtype=torch.bool),
        )

    def native(self, query: torch.Tensor) -> torch.Tensor:
        return native.decode_attention(query, self.rows, Softmax(DIM**-0.5))

    def reference(self, query: torch.Tensor) -> torch.Tensor:
        tiers = ((self.high, self.layout.high), (self.low, self.layout.low))
        bounds = Bounds(0, [(c.numpy().ravel(), 0, tier.capacity, c.device) for c, tier in tiers])
        return reference.decode_attention(query, self.rows, Softmax(DIM**-0.5), bounds=bounds)


def competitors(tokens: int, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    dtype = getattr(torch, args.dtype)
    query = 1.5 * torch.randn(1, QUERY_HEADS, DIM)
    query = query.to(dtype)
    key, value = torch.randn(2, 1, HEADS, tokens, DIM).to(dtype)
    grouped = query.view(1, HEADS, -1, DIM)
    made: dict[str, Callable[[], object]] = {
        "dense, a group as a sequence": lambda: F.scaled_dot_product_attention(grouped, key, value),
        "dense, enable_gqa": lambda: F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True),
    }
    for name in args.precisions:
        layer = Layer(*PRECISIONS[name], tokens, dtype)
        expected, got = layer.reference(query).float(), layer.native(query).float()
        error = float((got - expected).norm() / expected.norm())
        if not error < (1e-5 if dtype == torch.float32 else 5e-3):
            raise SystemExit(f"{name}: native code is {error:.1e} off the reference; nothing is timed.")
        made[name] = lambda layer=layer: layer.native(query)
        if args.reference:
            made[f"{name} in PyTorch"] = lambda layer=layer: layer.reference(query)
    return made


def measure(made: dict[str, Callable[[], object]], seconds: float, threads: int) -> dict[str, float]:
    """Median milliseconds of each, in turns: processor time with one thread, elapsed time with several."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in made}
    for run in made.values():
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[next(iter(taken))]) < 5:
        for name, run in made.items():
            started = clock()
            run()
            taken[name].append(1e3 * (clock() - started))
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="per number of tokens")
    parser.add_argument("--instructions", choices=library.INSTRUCTIONS, help="default: the best there are")
    parser.add_argument("--reference", action="store_true", help="the PyTorch reference as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if library.library() is None:
        raise SystemExit("the native library is not built: make native")
    with library.use_instructions(args.instructions or library.instructions()):
        about = {**about_machine(), "threads": args.threads, "dtype": args.dtype}
        print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
        print("| tokens | attention | ms | of the best dense one |\n|---|---|---|---|")
        for tokens in args.tokens:
            taken = measure(competitors(tokens, args), args.seconds, args.threads)
            best = min(time for name, time in taken.items() if name.startswith("dense"))
            for name, time_taken in taken.items():
                print(f"| {tokens} | {name} | {time_taken:.3f} | {time_taken / best:.2f} |")


if __name__ == "__main__":
    main()
