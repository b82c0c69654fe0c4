"""What is aimed at on an NVIDIA H200, and whether the results reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

HEADER = ("target", "aim", "worst measured", "where", "best measured", "cases", "met")
# precision: share of the memory's peak, speed-up over the best dense attention in bf16
ATTENTION = {"K8V8": (0.7, 1.7), "K8V4": (0.6, 2.0), "K4V2": (0.5, 3.0)}


@dataclass
class Target:
    """One aim; it is met where the worst figure reaches it.

    Attributes:
        figures: what was measured, and where.
    """

    what: str
    limit: float
    at_least: bool
    figures: list[tuple[float, str]] = field(default_factory=list)

    def line(self) -> tuple[object, ...]:
        """As a line of a table with `HEADER`."""
        aim = f"{'at least' if self.at_least else 'at most'} {self.limit:g}"
        if not self.figures:
            return (self.what, aim, None, None, None, 0, "not measured")
        low, high = min(self.figures), max(self.figures)
        worst, best = (low, high) if self.at_least else (high, low)
        met = worst[0] >= self.limit if self.at_least else worst[0] <= self.limit
        return (self.what, aim, worst[0], worst[1], best[0], len(self.figures), "yes" if met else "no")


def lines(found: dict[str, list[dict]]) -> list[tuple[object, ...]]:
    """A line for every target, from the results of each benchmark of one device."""
    rows = {name: [r for r in mine if "failed" not in r and "left_out" not in r] for name, mine in found.items()}
    made = attention(rows.get("attention_gpu", [])) + decode(rows.get("decode_gpu", []))
    return [target.line() for target in made + prompt(rows.get("prompt_gpu", []))]


def figures(rows: Iterable[dict], value: Callable[[dict], float | None]) -> list[tuple[float, str]]:
    """What `value` finds in each row, and the row's case."""
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
    made.append(Target(f"keeping scores, of attention, {case}", 0.1, False, figures(large, score_share)))
    return made


def score_share(row: dict) -> float | None:
    """Of the time of the attention kernels; None where they were not seen one by one."""
    parts = [row.get(f"{part}_us") for part in ("attend", "merge", "score")]
    return None if None in parts or not sum(parts) else parts[2] / sum(parts)


def decode(rows: list[dict]) -> list[Target]:
    """Whole steps of a model of 8B parameters; steps that ran otherwise than asked do not count."""
    rows = [r for r in rows if not r.get("warnings")]
    captured = [r for r in rows if "not captured" not in r["cache"]]
    made = [Target("compaction, of a captured step", 0.01, False, figures(captured, _get("compaction_share")))]
    lengths = [r for r in captured if r["kind"] == "length"]
    static = {r["context"]: r["ms_per_token"] for r in lengths if r["cache"].startswith("StaticCache")}

    def of_static(row: dict) -> float | None:
        return row["ms_per_token"] / static[row["context"]] if row["context"] in static else None

    for name in ("DiffKV 1/0", "DiffKV 1/0, compiled"):
        mine = [r for r in lengths if r["cache"] == name]
        short, long = ([r for r in mine if (r["context"] >= 4096) == late] for late in (False, True))
        short = [r for r in short if r["context"] == 1024]
        made.append(Target(f"{name}: step, of StaticCache's, 1k", 1.1, False, figures(short, of_static)))
        made.append(Target(f"{name}: step, of StaticCache's, from 4k on", 1.0, False, figures(long, of_static)))
    return made


def prompt(rows: list[dict]) -> list[Target]:
    """Prompt attention with what each token receives, over flash attention alone."""
    long = [r for r in rows if r["kind"] == "significance" and r["context"] >= 8192]
    every, some = ([r for r in long if (r["name"] == "all queries") == all_of_them] for all_of_them in (True, False))
    return [
        Target("prompt, all queries: over flash attention, from 8k on", 1.35, False, figures(every, _over_flash)),
        Target("prompt, newest queries: over flash attention, from 8k on", 1.1, False, figures(some, _over_flash)),
    ]


def _get(name: str) -> Callable[[dict], float | None]:
    return lambda row: row.get(name)


_over_flash = _get("over_flash")
