"""The prompt kernels over compressed pages, in Triton's interpreter, against the reference and a dense softmax."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import NARROW
from hand_past import attend_prompt, hand_past
from test_prefill_attention_kernel import assert_alike, check, make_inputs, poisoned_buffers, small_tiles  # noqa: F401
from test_prefill_attention_reference import dense, past_options

from hf_diffkv.config import Precision
from hf_diffkv.ops.prefill_attention import launch, tiles

K8V4, K4V2, FULL = Precision(8, 4), Precision(4, 2), Precision(16, 16)


def draw(batch, heads, group, *dims, **options):
    inputs = make_inputs(batch, heads * group, heads, *dims, **options)
    return inputs["query"], inputs["key"], inputs["value"]


def check_past(held, new, dtype=torch.float32, **options):
    """Compares with both; held: from `hand_past`, new: from `draw`."""
    past, *dense_past = held
    scaling = new[0].shape[-1] ** -0.5
    inputs = dict(zip(("query", "key", "value"), new)) | {"scaling": scaling, "past": past} | options
    got = check(inputs, dtype)
    assert_alike(got, dense(*new, scaling, **past_options(*dense_past), **options), dtype)
    assert (got[1][..., : past.tokens].masked_select(~dense_past[2]) == 0).all()
    return got


ROWS = {
    "both levels and a window": ([[40, 3], [0, 70]], [[90, 0], [5, 33]], [10, 1]),
    "no window": ([[17, 0]], [[0, 16]], [0]),
    "one level": ([[0, 0], [35, 1]], [[31, 64], [0, 0]], [0, 0]),
    "window alone": ([[0, 0], [0, 0]], [[0, 0], [0, 0]], [24, 5]),
    "nothing": ([[0, 0], [0, 0]], [[0, 0], [0, 0]], [0, 0]),
    "rows of nothing": ([[0, 0], [0, 20]], [[0, 0], [0, 0]], [0, 3]),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.sampled(100)
def test_levels_and_splits(rows, splits, small_tiles, monkeypatch):  # noqa: F811
    monkeypatch.setattr(launch, "choose_splits", lambda *_: splits)
    batch = len(rows[2])
    check_past(hand_past(*rows, key_dim=16), draw(batch, 2, 2, 19, 16))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.sampled(100)
def test_padding_and_the_observation_window(length, window, small_tiles, monkeypatch):  # noqa: F811
    """Padded queries may hold NaN; one request has no real token at all."""
    monkeypatch.setattr(launch, "choose_splits", lambda *_: 2)
    valid = torch.ones(3, length, dtype=torch.bool)
    valid[1, : length * 2 // 3] = False
    valid[2] = False
    past, *held = hand_past([[30], [0], [20]], [[33], [50], [3]], [9, 4, 2], key_dim=16)
    new = draw(3, 1, 3, length, 16)
    options = {"valid": valid, "observation_window": window}
    want = dense(*new, 0.25, **past_options(*held), **options)
    for tensor in new:
        tensor.masked_fill_(~valid[:, None, :, None], torch.nan)
    got = attend_prompt(launch.prefill_attention, *new, scaling=0.25, past=past, **options)
    assert_alike(got, want, torch.float32)
    assert (got[0].masked_select(~valid[:, None, :, None]) == 0).all()


PAIRS = [
    (K8V4, K4V2),
    (Precision(8, 8), Precision(4, 4)),
    (FULL, Precision(8, 8)),
    (FULL, FULL),
    (Precision(16, 8), Precision(2, 16)),
    (Precision(8, 16), Precision(1, 2)),
    (Precision(4, 2), Precision(2, 1)),
    (Precision(8, 4, 4, 8), Precision(4, 2, 8, 1)),
    (Precision(4, 4, 2, 2), Precision(1, 1, 4, 8)),
    (Precision(6, 4), Precision(5, 3)),
    (Precision(5, 6), Precision(1, 3)),
    (Precision(6, 3, 4, 8), Precision(3, 5, 8, 2)),
]


@pytest.mark.parametrize("high, low", PAIRS, ids=lambda p: f"{p.name}-{p.k_groups}{p.v_groups}")
@pytest.mark.sampled(100)
def test_precisions(high, low, small_tiles):  # noqa: F811
    check_past(hand_past([[37]], [[60]], [5], high=high, low=low, key_dim=16), draw(1, 1, 2, 5, 16))


@pytest.mark.parametrize("numbers", NARROW, ids=str)
@pytest.mark.parametrize("high, low", [*PAIRS[:1], *PAIRS[6:]], ids=lambda p: f"{p.name}-{p.k_groups}{p.v_groups}")
@pytest.mark.sampled(100)
def test_narrow_pages(high, low, numbers, small_tiles):  # noqa: F811
    check_past(hand_past([[37]], [[60]], [5], high=high, low=low, key_dim=16, **numbers), draw(1, 1, 2, 5, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("high", [K8V4, FULL], ids=lambda p: p.name)
@pytest.mark.sampled(100)
def test_low_precision_models(high, dtype):
    held = hand_past([[37, 5]], [[60, 90]], [5], high=high, dtype=dtype, key_dim=32)
    check_past(held, draw(1, 2, 2, 9, 32, dtype=dtype), dtype)


@pytest.mark.parametrize(
    "key_dim, value_dim",
    [
        *((dim, dim) for dim in (8, 64, 80, 96, 256, 512)),
        *((16, 40), (24, 16), (128, 64), (72, 112), (192, 128)),
    ],
)
@pytest.mark.sampled(100)
def test_head_dimensions(key_dim, value_dim):
    low = Precision(4, 2) if value_dim % 8 else Precision(4, 1)
    held = hand_past([[19]], [[21]], [3], low=low, key_dim=key_dim, value_dim=value_dim)
    check_past(held, draw(1, 1, 2, 3, key_dim, value_dim))


@pytest.mark.parametrize("key_dim, value_dim", [(8, 8), (24, 40), (80, 80), (96, 128)])
@pytest.mark.sampled(6)
def test_codes_of_two_fields_in_rows_of_any_alignment(key_dim, value_dim):
    held = hand_past(
        [[19]], [[21]], [3], high=Precision(6, 5), low=Precision(3, 1), key_dim=key_dim, value_dim=value_dim
    )
    check_past(held, draw(1, 1, 2, 3, key_dim, value_dim))


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.sampled(100)
def test_group_sizes(group, small_tiles, monkeypatch):  # noqa: F811
    """Blocks of rows begin and end inside a group."""
    held = hand_past([[20, 40]], [[70, 1]], [7], key_dim=16)
    shared = check_past(held, draw(1, 2, group, 11, 16))
    monkeypatch.setattr(launch, "MANY_PROGRAMS", 0)
    walked = check_past(held, draw(1, 2, group, 11, 16))
    torch.testing.assert_close(shared, walked, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [-1, 0, 1])
@pytest.mark.sampled(100)
def test_tokens_that_end_near_the_end_of_a_page_or_block(tokens, small_tiles):  # noqa: F811
    layout = hand_past([[1]], [[1]], [0])[0].rows.layout
    high, low = 2 * layout.high.capacity + tokens, 64 + tokens
    check_past(hand_past([[high]], [[low]], [16 + tokens]), draw(1, 1, 1, 3, 16))


@pytest.mark.slow
def test_one_long_row_and_many_short(monkeypatch):
    """One head has more than six thousand tokens, divided among several splits."""
    monkeypatch.setattr(launch, "choose_splits", lambda *_: 5)
    monkeypatch.setattr(launch, "past_tile", lambda *_: tiles.Tile(16, 512, 1, 1))
    monkeypatch.setattr(launch, "column_tile", lambda *_: tiles.Tile(16, 512, 1, 1))
    held = hand_past([[2100], [3], [0]], [[4000], [0], [9]], [20, 1, 0], key_dim=8)
    assert held[0].tokens > 6000
    check_past(held, draw(3, 1, 2, 5, 8), observation_window=3)


@pytest.mark.parametrize("softcap, sinks", [(5.0, None), (None, [0.5, 3.0]), (2.0, [-torch.inf, 20.0])])
@pytest.mark.sampled(100)
def test_soft_cap_and_sinks(softcap, sinks, small_tiles):  # noqa: F811
    sinks = None if sinks is None else torch.tensor(sinks)
    check_past(hand_past([[30]], [[40]], [7]), draw(1, 1, 2, 20, 16), softcap=softcap, sinks=sinks)


def test_a_mask_among_the_new_tokens_leaves_the_past_visible(small_tiles):  # noqa: F811
    mask = torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[:, :, 4] = False
    check_past(hand_past([[30]], [[40]], [7]), draw(1, 1, 2, 20, 16), mask=mask)


def test_a_window_that_wraps_and_is_full(small_tiles):  # noqa: F811
    check_past(hand_past([[0]], [[0]], [18], slots=18), draw(1, 1, 2, 4, 16))


def test_strided_queries():
    held = hand_past([[30, 2]], [[40, 0]], [7])
    query, key, value = draw(1, 2, 2, 6, 16)
    expected = check_past(held, (query, key, value))
    got = check_past(held, (query.transpose(1, 2).contiguous().transpose(1, 2), key, value))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "programs, tokens, expected", [(8, 100, 1), (8, 100_000, 64), (1000, 100_000, 1), (128, 4096, 5)]
)
def test_splits_fill_a_device(programs, tokens, expected):
    assert launch.choose_splits(programs, tokens, 132) == expected


@pytest.mark.parametrize(
    "past, message",
    [
        (hand_past([[3]], [[4]], [2], dtype=torch.float64), "window_key must be one of"),
        (hand_past([[3]], [[4]], [2], key_dim=8), "head dimensions"),
        (hand_past([[3, 1]], [[4, 1]], [2]), "KV heads"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(past, message):
    new = draw(1, 1, 1, 2, 16)
    with pytest.raises(ValueError, match=message):
        attend_prompt(launch.prefill_attention, *new, scaling=1.0, past=past[0])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: {"page_table": rows.page_table.long()}, "page_table must be contiguous torch.int32"),
        (lambda rows: {"high_count": rows.high_count[:, :0]}, "high_count"),
        (lambda rows: {"window_value": rows.window_value.mT.contiguous().mT}, "window_value must be contiguous"),
        (lambda rows: {"length": rows.length.int()}, "length must be contiguous torch.int64"),
        (lambda rows: {"invalid": rows.invalid.to("meta")}, "invalid is on meta, but window_key is on cpu"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(change, message):
    rows = hand_past([[3]], [[4]], [2])[0].rows
    with pytest.raises(ValueError, match=message):
        replace(rows, **change(rows))
