"""Prompt attention from compiled code, alone, over a dense and over a compressed past, against dense attention."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hand_past import attend_prompt, hand_past
from selection import cases
from test_prefill_attention_kernel import relative_error
from test_prefill_attention_reference import dense, past_options
from test_prefill_past_kernel import ROWS, draw

from hf_diffkv.config import Precision
from hf_diffkv.ops.prefill_attention import launch

K8V4, K4V2, K8V8, FULL = Precision(8, 4), Precision(4, 2), Precision(8, 8), Precision(16, 16)
# relative errors of the output and of the attention received
LIMITS = {torch.float32: (1e-4, 1e-4), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 1e-2)}


def check(new, scaling=None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """`past` in the options is what `hand_past` returns."""
    scaling = scaling or new[0].shape[-1] ** -0.5
    held = options.pop("past", None)
    theirs = {} if held is None else past_options(*held[1:])
    got = attend_prompt(launch.prefill_attention, *new, scaling=scaling, past=held and held[0], **options)
    want = dense(*new, scaling, **theirs, **options)
    for mine, expected, limit in zip(got, want, LIMITS[new[0].dtype]):
        assert mine.shape == expected.shape and torch.isfinite(mine).all()
        assert relative_error(mine, expected) < limit
    return got


@cases(
    "dim, dtype, length",
    [(64, torch.bfloat16, 330)],
    [
        *product((80, 96, 128, 256), (torch.bfloat16, torch.float16), (330,)),
        (64, torch.float16, 40),
        (128, torch.float32, 90),
    ],
)
def test_a_prompt(dim, dtype, length, emulator) -> None:
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, : length // 3] = False
    new = draw(2, 1, 1, length, dim, dtype=dtype)
    for tensor in new:
        tensor.masked_fill_(~valid[:, None, :, None], torch.nan)
    output, _ = check(new, valid=valid)
    assert (output.masked_select(~valid[:, None, :, None]) == 0).all()
    assert [name for name, _ in emulator.launched] == ["row_extents", "flash_forward", "column_scores"]
    if length > 300:
        assert not emulator.never_run("flash_forward") and not emulator.never_run("column_scores")


@cases("dim, dtype", [(64, torch.float16)], [(dim, torch.bfloat16) for dim in (80, 128, 256)])
@pytest.mark.slow
def test_a_long_compressed_past(dim, dtype, emulator) -> None:
    """Loads that run ahead of their use need some rounds to be seen wrong."""
    held = hand_past([[200]], [[210]], [200], key_dim=dim, dtype=dtype, slots=210)
    check(draw(1, 1, 2, 5, dim, dtype=dtype), past=held)
    assert not emulator.never_run("past_forward") and not emulator.never_run("past_scores")


@cases(
    "high, low, dim, dtype, rows",
    [
        (K8V4, K4V2, 64, torch.float16, "both levels and a window"),
        (FULL, FULL, 64, torch.bfloat16, "both levels and a window"),
        (Precision(6, 3), Precision(5, 2), 64, torch.bfloat16, "both levels and a window"),
    ],
    [
        *((Precision(5, 6), Precision(3, 1), dim, torch.float16, "one level") for dim in (64, 80, 128, 256)),
        (Precision(6, 4), Precision(5, 3), 128, torch.bfloat16, "both levels and a window"),
        (Precision(6, 5, 2, 4), Precision(3, 3, 8, 4), 64, torch.bfloat16, "both levels and a window"),
        *((K8V4, K4V2, 64, torch.bfloat16, rows) for rows in ROWS),
        *((K8V4, K4V2, dim, torch.bfloat16, "both levels and a window") for dim in (80, 96, 128, 256)),
        *((pair, pair, dim, torch.bfloat16, "both levels and a window") for pair in (K8V8, FULL) for dim in (128, 256)),
        (K8V4, K4V2, 128, torch.float16, "both levels and a window"),
        (K8V4, K4V2, 128, torch.float32, "both levels and a window"),
        (Precision(16, 8), Precision(2, 1), 128, torch.bfloat16, "both levels and a window"),
        (Precision(8, 4, 4, 4), Precision(4, 2, 4, 4), 128, torch.bfloat16, "both levels and a window"),
    ],
)
@pytest.mark.slow
def test_a_compressed_past(high, low, dim, dtype, rows, emulator, monkeypatch) -> None:
    monkeypatch.setattr(launch, "choose_splits", lambda *_: 2)
    held = hand_past(*ROWS[rows], high=high, low=low, key_dim=dim, dtype=dtype)
    check(draw(len(ROWS[rows][2]), 2, 2, 19, dim, dtype=dtype), past=held)
    if held[0].tokens:
        names = [name for name, _ in emulator.launched]
        assert names == ["past_forward", "flash_forward", "past_scores", "column_scores"]


@pytest.mark.slow
def test_matrix_products_of_warp_groups(hopper) -> None:
    """The prompt kernels for sm_90, where matrices are read from shared memory by the products themselves."""
    held = hand_past([[200]], [[260]], [140], key_dim=64, dtype=torch.bfloat16, slots=160)
    check(draw(1, 1, 1, 330, 64, dtype=torch.bfloat16), past=held)
    for name in ("flash_forward", "column_scores", "past_forward", "past_scores"):
        assert not hopper.never_run(name)
    assert "wgmma" in hopper.kernels["flash_forward"].ptx


@cases("dtype, dim", [(torch.bfloat16, 64)], [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float16, 80)])
@pytest.mark.slow
def test_everything_at_once(dtype, dim, emulator) -> None:
    """A mask, soft-capping, sinks and an observation window over both kinds of past."""
    length, tokens = 35, 21
    new = draw(2, 1, 2, length, dim, dtype=dtype)
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :9] = False
    mask = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(3)) < 0.5
    mask |= torch.eye(length, dtype=torch.bool)
    past = draw(2, 1, 1, tokens, dim, dtype=dtype)
    options = {
        "valid": valid,
        "mask": mask & valid[:, None, None, :],
        "softcap": 4.0,
        "sinks": torch.tensor([0.5, -1.0], dtype=dtype),
        "observation_window": 7,
        "past_key": past[1],
        "past_value": past[2],
        "past_valid": torch.arange(tokens).expand(2, 1, tokens) % 5 != 2,
    }
    check(new, **options)


@cases("order", ["descending"], ["random"])
@pytest.mark.slow
def test_the_order_of_blocks_does_not_matter(order, emulator, monkeypatch) -> None:
    """Several programs add to the same scores by atomic maxima; the first launch leaves them apart."""
    monkeypatch.setattr(launch, "choose_splits", lambda *_: 3)
    held = hand_past([[90, 3]], [[40, 0]], [9], key_dim=64, dtype=torch.float16)
    new = draw(1, 2, 2, 70, 64, dtype=torch.float16)
    first = attend_prompt(launch.prefill_attention, *new, scaling=0.125, past=held[0])
    emulator.order = order
    second = attend_prompt(launch.prefill_attention, *new, scaling=0.125, past=held[0])
    torch.testing.assert_close(second, first, rtol=0, atol=0)
