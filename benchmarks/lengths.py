"""Fits lines to each cache's time per token over the context length, and finds where one cache becomes faster."""

from __future__ import annotations

import statistics


def length_lines(lengths: list[dict]) -> list[tuple[str, tuple[float, float], dict[str, float | None]]]:
    """Fits a line to the times per token of each cache.

    Returns:
        Name, line (`fit`) and, for DiffKV caches, the length from which each other cache is slower. Caches measured at
        only one length are left out.
    """
    points: dict[str, list] = {}
    for row in lengths:
        points.setdefault(row["cache"], []).append((row["context"], row["ms_per_token"]))
    found = {name: fit(mine) for name, mine in points.items() if len(mine) > 1}
    others = [name for name in found if not name.startswith("DiffKV")]
    return [
        (name, line, {o: break_even(line, found[o]) for o in others} if name.startswith("DiffKV") else {})
        for name, line in found.items()
    ]


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least-squares slope (ms per token of context) and intercept (ms)."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope, mean_y - slope * mean_x


def break_even(mine: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Length from which the first line is lower; 0 if it always is, None if it never is."""
    if mine[0] >= other[0]:
        return 0.0 if mine[1] <= other[1] and mine[0] == other[0] else None
    return round(max(0.0, (mine[1] - other[1]) / (other[0] - mine[0])), 1)
