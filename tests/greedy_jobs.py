"""Runs of `hf_diffkv.running.side_by_side` with the same text every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_diffkv.running.side_by_side import Job


def greedy_job(
    cache: str, model: Path, turns: list[str], new: int, config: dict, dtype: str = "float32", **fields: Any
) -> Job:
    """Returns a greedy job on the CPU with at most `new` tokens in each answer."""
    return Job(cache, str(model), turns, new, config, dtype, device="cpu", seed=0, sample=False, **fields)
