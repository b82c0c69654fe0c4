"""Rules that turn significance into levels: scores and lengths in, levels out."""

from __future__ import annotations

from .diffkv import DiffKVPolicy, mean_significance

POLICIES = {"diffkv": DiffKVPolicy()}


def get_policy(name: str) -> DiffKVPolicy:
    """The policy called `name`; `ValueError` where there is none."""
    if name not in POLICIES:
        raise ValueError(f"policy={name!r} is unknown; use one of {sorted(POLICIES)}.")
    return POLICIES[name]


__all__ = ["POLICIES", "DiffKVPolicy", "get_policy", "mean_significance"]
