"""Configurations that never choose between tokens hold neither sums nor positions; everything else is as usual."""

from __future__ import annotations

import pytest
import torch
from given_stores import select_rows
from test_compressed import Pair, left_padding

from hf_diffkv import DiffKVConfig, IntegrityError, Precision
from hf_diffkv.native import library
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.compact import rewrite
from hf_diffkv.pages import PageLayout
from hf_diffkv.store import check_integrity
from hf_diffkv.store.hide import hide_tokens

K5V3 = Precision(5, 3)
UNIFORM = {"high": K5V3, "low": K5V3, "alpha_high": 0.0}
# the first head at the low precision, the second at the high one
PER_HEAD = {"low": Precision(3, 2), "alpha_high": ((float("inf"), 0.0),)}


@pytest.mark.parametrize(
    "fields, selects",
    [
        ({}, False),
        ({"alpha_high": 1.0}, True),
        ({"alpha_high": 0.0}, False),
        ({"alpha_high": ((0.0, 0.0), (0.0, 0.0))}, False),
        ({"alpha_high": ((0.0, 0.0), (0.0, 0.1))}, True),
        ({"high": K5V3, "low": K5V3}, False),
        ({"high": K5V3, "low": K5V3, "alpha_low": (0.0, 0.5)}, True),
        ({"high": K5V3, "low": Precision(5, 3, 2, 1)}, True),
        ({"alpha_high": 0.0, "observation_window": 8}, False),
        ({"alpha_high": 0.0, "max_bytes": 1 << 20}, False),
        ({"alpha_high": 0.0, "max_bytes": 1 << 20, "until_full": None}, True),
        ({"alpha_high": 0.0, "policy": "leankv"}, True),
        ({"high": K5V3, "low": K5V3, "policy": "leankv"}, True),
        ({"alpha_high": float("inf")}, False),
        ({"alpha_high": ((0.0, float("inf")), (float("inf"), 0.0))}, False),
        ({"alpha_high": ((0.0, float("inf")), (1.0, 0.0))}, True),
        ({"alpha_high": float("inf"), "alpha_low": float("inf")}, True),
        ({"alpha_high": float("inf"), "max_bytes": 1 << 20, "until_full": None}, True),
        ({"alpha_high": ((0.0, float("inf")),), "max_bytes": 1 << 20}, False),
        ({"alpha_high": ((0.0, float("inf")),), "max_bytes": 1 << 20, "until_full": None}, True),
    ],
    ids=str,
)
def test_which_configurations_select(fields: dict, selects: bool) -> None:
    config = DiffKVConfig(**fields)
    assert config.selects is selects
    layout = PageLayout.of(config, 64, 64, 2, 1000)
    assert layout.selects is selects
    for tier in (layout.high, layout.low):
        assert (tier.score_bytes, tier.position_bytes) == ((4, 4) if selects else (0, 0))


@pytest.mark.parametrize(
    "name, sizes",
    [("quality", (102, 198)), ("balanced", (76, 148)), ("small", (62, 118))],
    ids=["K8V4", "K5V4", "K4V3g2/1"],
)
def test_bytes_of_the_presets(name: str, sizes: tuple[int, int]) -> None:
    """Checks a token's bytes at head_dim 64 and 128: codes, and 2 bytes of metadata per group, or 4 at 8 bits."""
    for dim, size in zip((64, 128), sizes):
        layout = PageLayout.of(DiffKVConfig.preset(name), dim, dim, 2, None)
        assert layout.high.token_bytes == layout.low.token_bytes == size
        assert layout.high.capacity * size <= layout.page_bytes


BACKENDS = [
    ("reference", torch.float64, {}),
    ("reference", torch.float64, {"metadata_bits": 16, "alpha_high": 1.0}),
    ("native", torch.float32, {}),
    ("native", torch.float32, {"metadata_bits": 16, "alpha_high": 1.0}),
    ("kernels", torch.float32, {"metadata_bits": 16}),
    ("reference", torch.float64, {**PER_HEAD}),
    ("native", torch.float32, {"metadata_bits": 16, **PER_HEAD}),
    ("native", torch.float32, {"adaptive_rounding": True, "rotate": True, "center": True, **PER_HEAD}),
    ("kernels", torch.float32, {"metadata_bits": 16, **PER_HEAD}),
]


@pytest.mark.parametrize("backend, dtype, fields", BACKENDS, ids=str)
def test_every_step_equals_the_simulation(backend: str, dtype: torch.dtype, fields: dict) -> None:
    """A ragged prompt, steps, hidden tokens, selected requests and a padded turn; nothing is written to sums."""
    if backend == "native" and library.library() is None:
        pytest.skip("the native code was not built")
    if backend == "kernels":
        pytest.importorskip("triton")
    config = DiffKVConfig.paper(**{**UNIFORM, **fields, "window": 4, "sinks": 3, "page_bytes": 320})
    # the interpreter is slow
    few = backend == "kernels"
    lengths = (18, 9) if few else (40, 20, 2)
    per_head = config.low != config.high
    pair = Pair(config, len(lengths), heads=1 if few and not per_head else 2, group=2, dim=16, dtype=dtype)
    pair.tolerance = Pair.tolerance if dtype == torch.float64 else 2e-3
    with use_backend(backend):
        pair.forward(lengths[0], left_padding(lengths))
        pair.compare()
        for step in range(2 if few else 20):
            pair.forward(1, torch.tensor([[True], [step % 4 > 0], [True]])[: len(lengths)])
            pair.compare()
        # holes within the first page and across pages, at the end, and spanning a whole row
        shown = pair.store.padding.mask().clone()
        shown[0, [5, 9, 10, 13]] = False
        shown[1, -8:] = False
        shown[2:] = False
        hide_tokens(pair.store, shown)
        pair.simulation.hide(shown)
        pair.compare()
        pair.follow(7, *[1] * (1 if few else 6), valid=left_padding((7, 1, 5)[: len(lengths)]))
        assert pair.store.scratch is None or pair.store.scratch.logits is None
        select_rows(pair.store, torch.tensor([1, 1, 0]))
    check_integrity(pair.store)
    assert not pair.store.window_score.any()
    at_low = torch.tensor([per_head, False])[: pair.heads]
    assert pair.store.high_count[..., ~at_low].any() and not pair.store.high_count[..., at_low].any()
    assert pair.store.low_count[..., at_low].any() == per_head and not pair.store.low_count[..., ~at_low].any()
    assert not pair.store.alpha_high[..., ~at_low].any(), "pages would be made ready for a low level"


def test_holes_longer_than_what_is_moved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that move by less than one part are where other tokens of that part go."""
    monkeypatch.setattr(rewrite, "MOVE_TOKENS", 7)
    pair = Pair(DiffKVConfig.paper(**UNIFORM, window=1, page_bytes=320), 2, heads=2, group=1, dim=16)
    pair.forward(60, left_padding((60, 45)))
    shown = pair.store.padding.mask().clone()
    shown[0, 3], shown[1, 20:22] = False, False
    hide_tokens(pair.store, shown)
    pair.simulation.hide(shown)
    pair.compare()


def test_integrity_counts_what_has_left_the_windows() -> None:
    pair = Pair(DiffKVConfig.paper(**UNIFORM, window=4, page_bytes=320), 1, heads=1, group=1, dim=16)
    pair.forward(19)
    pair.store.high_count -= 1
    with pytest.raises(IntegrityError, match="not every token outside the window"):
        check_integrity(pair.store)
