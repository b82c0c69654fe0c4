"""Targets for an NVIDIA H200, and whether the results meet them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lengths import length_lines

STATIC = "StaticCache, compiled"
HEADER = ("target", "aim", "worst measured", "where", "best measured", "cases", "met")
# precision: share of peak memory bandwidth, speed-up over the best dense attention in bf16
ATTENTION = {"K8V8": (0.7, 1.7), "K8V4": (0.65, 2.0), "K4V2": (0.55, 3.0)}
# whole-model caches for which the targets are stated: the default, and the paper's two levels
CACHES = ("DiffKV balanced", "DiffKV paper")


@dataclass
class Target:
    """One target. It is met if the worst figure reaches it.

    Attributes:
        figures: measured figures, each with its case.
    """

    what: str
    limit: float
    at_least: bool
    figures: list[tuple[float, str]] = field(default_factory=list)

    def line(self) -> tuple[object, ...]:
        """Returns the cells of a table row with `HEADER`."""
        aim = f"{'at least' if self.at_least else 'at most'} {self.limit:g}"
        if not self.figures:
            return (self.what, aim, None, None, None, 0, "not measured")
        low, high = min(self.figures), max(self.figures)
        worst, best = (low, high) if self.at_least else (high, low)
        met = worst[0] >= self.limit if self.at_least else worst[0] <= self.limit
        return (self.what, aim, worst[0], worst[1], best[0], len(self.figures), "yes" if met else "no")


def lines(found: dict[str, list[dict]]) -> list[tuple[object, ...]]:
    """One line per target, from the results of each benchmark of one device."""
    rows = {name: [r for r in mine if "failed" not in r and "left_out" not in r] for name, mine in found.items()}
    made = attention(rows.get("attention_gpu", [])) + decode(rows.get("decode_gpu", []))
    made += prompt(rows.get("prompt_gpu", [])) + first_token(rows.get("ttft_gpu", []))
    return [target.line() for target in made]


def figures(rows: Iterable[dict], value: Callable[[dict], float | None]) -> list[tuple[float, str]]:
    """Returns the figure that `value` finds in each row, and the row's case. Rows without a figure are left out."""
    keys = ("model", "cache", "name", "batch", "context")
    pairs = ((value(row), ", ".join(f"{key} {row[key]}" for key in keys if key in row)) for row in rows)
    return [(figure, where) for figure, where in pairs if figure is not None]


def attention(rows: list[dict]) -> list[Target]:
    """Decode attention of one layer."""
    compressed = [r for r in rows if r["kind"] == "compressed"]
    # enough work for the whole device
    large = [r for r in compressed if r["batch"] * r["kv_heads"] >= 256 and r["context"] >= 8192]
    case = "256 or more rows, 8k or more tokens"
    made = []
    for name, (share, speed_up) in ATTENTION.items():
        mine = [r for r in large if r["name"] == name]
        made.append(Target(f"{name}: share of peak, {case}", share, True, figures(mine, _get("share_of_peak"))))
        made.append(Target(f"{name}: speed-up, {case}", speed_up, True, figures(mine, _get("speed_up"))))
    for name in ATTENTION:
        mine = [r for r in compressed if (r["name"], r["batch"], r["context"]) == (name, 1, 131072)]
        made.append(Target(f"{name}: speed-up, batch 1, 128k", 1.5, True, figures(mine, _get("speed_up"))))
    fp8 = {_case(r): r["us"] for r in sorted(rows, key=lambda r: -r["us"]) if r["kind"] == "fp8"}
    mine = [r for r in large if r["name"] == "K4V2"]
    made.append(Target(f"K4V2: speed-up over FP8 KV, {case}", 1.0, True, figures(mine, _over(fp8))))
    alone = [r for r in compressed if r["batch"] == 1 and r["context"] >= 4096 and r["name"] != "FP16"]
    made.append(Target("every precision: speed-up, batch 1, from 4k on", 1.0, True, figures(alone, _get("speed_up"))))
    made.append(Target(f"merging and keeping scores, of attention, {case}", 0.1, False, figures(large, finish_share)))
    return made


def _case(row: dict) -> tuple:
    return tuple(row[key] for key in ("model", "batch", "context"))


def _over(others: dict[tuple, float]) -> Callable[[dict], float | None]:
    """Returns a function from a row to the time of its case in `others`, in microseconds, divided by the row's own."""
    return lambda row: others[_case(row)] / row["us"] if _case(row) in others else None


def finish_share(row: dict) -> float | None:
    """Returns the second kernel's share of attention time, or None if the kernels were not timed separately."""
    parts = [row.get(f"{part}_us") for part in ("attend", "finish")]
    return None if None in parts or not sum(parts) else parts[1] / sum(parts)


def decode(rows: list[dict]) -> list[Target]:
    """Whole steps of an 8B-parameter model; steps that did not run as requested do not count."""
    rows = [r for r in rows if not r.get("warnings")]
    captured = [r for r in rows if "not captured" not in r["cache"]]
    made = [
        Target("compaction, of a captured step", 0.01, False, figures(captured, _get("compaction_share"))),
        Target("merging and keeping scores, of a captured step", 0.08, False, figures(captured, _get("finish_share"))),
    ]
    lengths = [r for r in captured if r["kind"] == "length"]
    static = {r["context"]: r["ms_per_token"] for r in lengths if r["cache"] == STATIC}

    def of_static(row: dict) -> float | None:
        return row["ms_per_token"] / static[row["context"]] if row["context"] in static else None

    for name in ("DiffKV 1/0", "DiffKV 1/0, compiled", "DiffKV balanced", "DiffKV balanced, compiled"):
        mine = [r for r in lengths if r["cache"] == name]
        short = [r for r in mine if r["context"] == 1024]
        long = [r for r in mine if r["context"] >= 4096]
        made.append(Target(f"{name}: step, of StaticCache's, 1k", 1.1, False, figures(short, of_static)))
        made.append(Target(f"{name}: step, of StaticCache's, from 4k on", 1.0, False, figures(long, of_static)))
    ahead = {name: others for name, _, others in length_lines(lengths)}
    for name in CACHES:
        found = ahead.get(name, {})
        # None: it never becomes faster
        points = [(math.inf if found[STATIC] is None else found[STATIC], name)] if STATIC in found else []
        made.append(Target(f"{name}: tokens from which on a step is faster than StaticCache's", 2048, False, points))
    return made + budget([r for r in rows if r["kind"] == "budget"])


def budget(rows: list[dict]) -> list[Target]:
    """Tokens per second with caches of equal bytes."""
    dense = {_budget(r): r["tokens_per_second"] for r in rows if r["cache"] == "DynamicCache"}

    def of_dense(row: dict) -> float | None:
        return row["tokens_per_second"] / dense[_budget(row)] if _budget(row) in dense else None

    return [
        Target(
            f"{name}: tokens per second, of DynamicCache's with as many bytes",
            5.0,
            True,
            figures([r for r in rows if r["cache"] == name], of_dense),
        )
        for name in CACHES
    ]


def _budget(row: dict) -> tuple:
    return row["context"], row["cache_bytes_allowed"]


def first_token(rows: list[dict]) -> list[Target]:
    """Prompts of a whole model."""
    return [
        Target(
            f"{name}: first token, of the best dense prompt's time",
            1.25,
            False,
            figures([r for r in rows if r["cache"] == name], _get("over_dense")),
        )
        for name in CACHES
    ]


def prompt(rows: list[dict]) -> list[Target]:
    """Prompt attention with the attention that each token receives, over flash attention alone."""
    long = [r for r in rows if r["kind"] == "significance" and r["context"] >= 8192]
    every, some = ([r for r in long if (r["name"] == "all queries") == all_of_them] for all_of_them in (True, False))
    return [
        Target("prompt, all queries: over flash attention, from 8k on", 1.35, False, figures(every, _over_flash)),
        Target("prompt, newest queries: over flash attention, from 8k on", 1.1, False, figures(some, _over_flash)),
    ]


def _get(name: str) -> Callable[[dict], float | None]:
    return lambda row: row.get(name)


_over_flash = _get("over_flash")
