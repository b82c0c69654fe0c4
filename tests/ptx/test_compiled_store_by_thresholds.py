"""Rows that are levelled anew by compiled code, byte for byte against the reference."""

from __future__ import annotations

import torch
from selection import cases
from test_store_by_thresholds_kernel import K4V2, K8V4, State, compare_turns

from hf_diffkv.config import Precision


@cases(
    "high, low, dim, dtype, bits, last",
    [(K8V4, K4V2, 64, torch.bfloat16, 16, ((7, 1, 0.0),))],
    [
        (K8V4, K4V2, 128, torch.bfloat16, 32, ((20, 1, 0.6), (12, 1, 0.0))),
        (Precision(16, 8), Precision(3, 5), 80, torch.float16, 16, ((12, 1, 0.0),)),
    ],
)
def test_rows_are_levelled(high, low, dim, dtype, bits, last, emulator) -> None:
    """A padded prompt, a turn in which tokens sink and high rows end earlier, and turns until low rows do."""
    turns = ((30, 7, 1.0), (30, 3, 0.1), *last)
    seen = compare_turns(State(high, low, dtype, dim=dim, bits=bits), turns)
    assert seen["demoted"] and seen["pruned"], seen
    names = ["decide", "count", "list", "level_new", "advance"]
    turn = ["decide", "count", "list", "demote", "close", "level_window", "level_new", "advance"]
    assert [name.removesuffix("_kernel") for name, _ in emulator.launched] == names + turn * (len(turns) - 1)
    # not in both tiers are pages given back
    assert [name for name in turn if emulator.never_run(f"{name}_kernel")] == ["advance"]
