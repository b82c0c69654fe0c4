"""Compiled kernels against the PyTorch reference on the same device, at real sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chosen_ops import compact_windows, load_tokens, move_tokens, prefill_attention, store_tokens
from rows import RandomRows, random_rows

from hf_diffkv.config import Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import HIGH, LOW, EarlierTokens, PageLayout, column
from hf_diffkv.pages.segments import Contents, segments

K8V4, K4V2, K8V8, FULL = Precision(8, 4), Precision(4, 2), Precision(8, 8), Precision(16, 16)
GROUPED = Precision(4, 2, 2, 4)
# bytes from which on an offset needs 64 bits
BEYOND = 2**31
# weights times scales are rounded to fp16 and then multiplied by codes that are not centred: 5e-4 to 8e-4 by arithmetic
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-4}


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def attend(
    rows: RandomRows, query: torch.Tensor, backend: str, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and all scores afterwards, on a copy of the rows."""
    rows = copy.deepcopy(rows)
    with use_backend(backend):
        output = rows.attend(query, **options)
    held = rows.held
    scores = [held.window_score]
    for tier, layout in ((HIGH, rows.layout.high), (LOW, rows.layout.low)):
        for request, head in ((0, 0), (-1, -1)):
            token = torch.arange(rows.tokens[tier], device=query.device)
            page = held.page_table[request, head][column(tier, token // layout.capacity, held.width)].long()
            scores.append(segments(held.pages, layout).score[page, token % layout.capacity])
    return output, scores


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "high, low, dim, group, batch, tokens",
    [
        (K8V4, K4V2, 128, 4, 4, (3000, 9001)),
        (K8V4, K4V2, 128, 7, 3, (0, 777)),
        (K8V4, K4V2, 64, 1, 2, (513, 0)),
        (K8V4, K4V2, 256, 8, 2, (65, 130)),
        (K8V4, K4V2, 512, 8, 2, (300, 700)),
        (K8V4, K4V2, 80, 5, 2, (1, 1)),
        (K8V4, K4V2, 96, 4, 2, (500, 700)),
        (K8V4, K4V2, 32, 4, 2, (500, 700)),
        (K8V4, K4V2, 16, 4, 2, (500, 700)),
        (K8V8, K8V4, 128, 4, 2, (2048, 2048)),
        (FULL, FULL, 128, 4, 2, (2048, 100)),
        (K8V4, GROUPED, 128, 4, 2, (300, 900)),
        (K8V4, K4V2, 128, 4, 1, (20000, 60000)),
    ],
)
def test_decode_attention(device, high, low, dim, group, batch, tokens, dtype) -> None:
    rows = random_rows(high, low, batch, 2, dim, tokens, sum(tokens) + 64, 64, dtype, device)
    query = torch.randn(batch, 2 * group, dim, device=device).to(dtype)
    output, scores = attend(rows, query, "kernels")
    # uncompressed rows are read in the dtype of the query
    expected, expected_scores = attend(rows, query if high is FULL else query.float(), "reference")
    assert relative(output, expected) < LIMITS[dtype]
    before = [rows.held.window_score]
    torch.testing.assert_close(scores, expected_scores, rtol=1e-3, atol=LIMITS[dtype])
    # the step must have added something
    assert not torch.equal(scores[0], before[0])


def test_decode_options(device) -> None:
    rows = random_rows(K8V4, K4V2, 3, 2, 128, (900, 300), 1264, 64, torch.bfloat16, device)
    query = torch.randn(3, 8, 128, device=device).bfloat16()
    valid = torch.tensor([True, False, True], device=device)
    options = {"softcap": 20.0, "sinks": torch.randn(8, device=device), "valid": valid}
    output, scores = attend(rows, query, "kernels", **options)
    expected, expected_scores = attend(rows, query.float(), "reference", **options)
    assert relative(output, expected) < 1e-2
    torch.testing.assert_close(scores[0], expected_scores[0], rtol=1e-3, atol=1e-2)


def test_pages_beyond_two_gigabytes(device) -> None:
    """Compares with the same rows at the end of a pool of more than 2^31 bytes."""
    rows = random_rows(K8V4, K4V2, 2, 2, 128, (500, 900), 1464, 64, torch.bfloat16, device)
    query = torch.randn(2, 8, 128, device=device).bfloat16()
    expected, expected_scores = attend(rows, query, "kernels")
    rows = rows.behind(BEYOND)
    output, scores = attend(rows, query, "kernels")
    assert torch.equal(output, expected)
    torch.testing.assert_close(scores, expected_scores)
    layout, pages = rows.layout.high, rows.held.pages
    page = torch.tensor([pages.shape[0] - 1, BEYOND // rows.layout.page_bytes + 100], device=device)
    slot = torch.tensor([layout.capacity - 1, 0], device=device)
    key, value = torch.randn(2, 2, 128, device=device).bfloat16()
    score, position = torch.rand(2, device=device), torch.arange(2, device=device)
    with use_backend("kernels"):
        store_tokens(pages, layout, page, slot, Contents(key, value, score, position), torch.bfloat16)
        got = load_tokens(pages, layout, page, slot, torch.bfloat16)
    with use_backend("reference"):
        want = load_tokens(pages, layout, page, slot, torch.bfloat16)
    for a, b, original in zip(got, want, (key, value)):
        torch.testing.assert_close(a, b.float(), rtol=1e-6, atol=1e-6)
        # four bits of the values lose a tenth
        assert relative(a, original) < 0.15


@pytest.mark.parametrize("precision, dim", [(K8V4, 128), (K4V2, 64), (K8V8, 80), (FULL, 128), (GROUPED, 128)])
def test_quantisation(device, precision, dim) -> None:
    layout = PageLayout.build(precision, precision, dim, dim, 2).high
    count = 5 * layout.capacity
    token = torch.randperm(count, device=device)
    page, slot = 1 + token // layout.capacity, token % layout.capacity
    key, value = torch.randn(2, count, dim, device=device).bfloat16()
    score, position = torch.rand(count, device=device), token
    found = {}
    for backend in ("kernels", "reference"):
        pages = torch.full((6, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
        with use_backend(backend):
            store_tokens(pages, layout, page, slot, Contents(key, value, score, position), torch.bfloat16)
            found[backend] = (pages, *load_tokens(pages, layout, page, slot, torch.bfloat16))
    # a code may differ by one where a quotient is rounded differently
    different = (found["kernels"][0] != found["reference"][0]).float().mean()
    assert different < 1e-3
    for a, b in zip(found["kernels"][1:], found["reference"][1:]):
        assert relative(a, b) < 1e-2


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("length, dim", [(4097, 128), (513, 256), (513, 512), (1025, 80), (513, 32), (257, 16)])
def test_prompt_attention(device, length, dim, window) -> None:
    query = torch.randn(2, 8, length, dim, device=device).bfloat16()
    key, value = torch.randn(2, 2, 2, length, dim, device=device).bfloat16()
    compare_prompts(query, key, value, None, observed=window)


@pytest.mark.parametrize("dims", [(32, 16), (40, 16), (72, 16), (64, 32), (96, 64), (192, 128), (64, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_prompts_whose_values_have_other_widths(device, dims, dtype, length: int = 700) -> None:
    query = torch.randn(2, 8, length, dims[0], device=device).to(dtype)
    key, value = (torch.randn(2, 2, length, dim, device=device).to(dtype) for dim in dims)
    compare_prompts(query, key, value, None, observed=64)


@pytest.mark.parametrize("precision, dim", [(K8V4, 128), (K4V2, 80), (FULL, 64), (GROUPED, 128), (Precision(2, 1), 8)])
def test_moves(device, precision, dim) -> None:
    layout = PageLayout.build(precision, precision, dim, dim, 2).high
    pages = torch.randint(0, 256, (500, layout.page_bytes), dtype=torch.uint8, device=device)
    source, target = torch.randperm(500 * layout.capacity, device=device)[: 498 * layout.capacity].view(2, -1)
    places = (source // layout.capacity, source % layout.capacity, target // layout.capacity, target % layout.capacity)
    found = {}
    for backend in ("kernels", "reference"):
        found[backend] = pages.clone()
        with use_backend(backend):
            move_tokens(found[backend], layout, *places, torch.bfloat16)
    assert torch.equal(found["kernels"], found["reference"])
    assert not torch.equal(found["kernels"], pages)


def compare_prompts(query, key, value, past: EarlierTokens | None, **options: Any) -> None:
    """The kernels with what the reference makes of the same in float32; the second request is padded on the left."""
    valid = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    valid[1:, : query.shape[2] // 3] = False
    softmax = Softmax(query.shape[3] ** -0.5, options.pop("softcap", None), options.pop("sinks", None))
    options |= {"valid": valid, "past": past or EarlierTokens()}
    with use_backend("kernels"):
        output, received = prefill_attention(query, key, value, softmax, **options)
    with use_backend("reference"):
        expected, expected_received = prefill_attention(query.float(), key.float(), value.float(), softmax, **options)
    real = valid[:, None, :, None]
    limit = LIMITS[query.dtype]
    assert relative(output * real, expected * real) < limit
    assert relative(received, expected_received) < limit


def stored_past(rows: RandomRows) -> EarlierTokens:
    return EarlierTokens(rows.held, sum(rows.tokens) + rows.held.slots - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "high, low, dim, group, batch, tokens, length",
    [
        (K8V4, K4V2, 128, 4, 2, (3000, 9001), 700),
        (K8V4, K4V2, 128, 7, 3, (0, 777), 5),
        (K8V4, K4V2, 64, 1, 2, (513, 0), 130),
        (K8V4, K4V2, 256, 8, 2, (65, 130), 257),
        (K8V4, K4V2, 80, 5, 2, (1, 1), 33),
        (K8V4, K4V2, 96, 4, 2, (500, 700), 64),
        (K8V4, K4V2, 32, 4, 2, (500, 700), 64),
        (K8V8, K8V4, 128, 4, 2, (2048, 2048), 1),
        (FULL, FULL, 128, 4, 2, (2048, 100), 300),
        (FULL, Precision(2, 1), 128, 4, 2, (300, 900), 300),
        (K8V4, GROUPED, 128, 4, 2, (300, 900), 300),
        (K8V4, K4V2, 128, 4, 1, (20000, 60000), 40),
    ],
)
def test_prompt_attention_over_a_compressed_past(device, high, low, dim, group, batch, tokens, length, dtype) -> None:
    rows = random_rows(high, low, batch, 2, dim, tokens, sum(tokens) + 64, 64, dtype, device)
    # rows of different lengths, in whole pages or not
    rows.held.high_count[-1, -1] //= 2
    rows.held.low_count[0, 0] = 0
    query = torch.randn(batch, 2 * group, length, dim, device=device).to(dtype)
    key, value = torch.randn(2, batch, 2, length, dim, device=device).to(dtype)
    compare_prompts(query, key, value, stored_past(rows))
    compare_prompts(query, key, value, stored_past(rows), observed=16)


def test_prompt_options_over_a_compressed_past(device, tokens=(900, 300), length: int = 200) -> None:
    rows = random_rows(K8V4, K4V2, 2, 2, 128, tokens, sum(tokens) + 64, 64, torch.bfloat16, device)
    query = torch.randn(2, 8, length, 128, device=device).bfloat16()
    key, value = torch.randn(2, 2, 2, length, 128, device=device).bfloat16()
    mask = torch.rand(2, 1, length, length, device=device) < 0.5
    options = {"softcap": 20.0, "sinks": torch.randn(8, device=device), "mask": mask}
    compare_prompts(query, key, value, stored_past(rows), **options)


def test_prompt_attention_over_pages_beyond_two_gigabytes(device, tokens=(500, 900), length: int = 100) -> None:
    """Compares with the same rows at the end of a pool of more than 2^31 bytes."""
    rows = random_rows(K8V4, K4V2, 2, 2, 128, tokens, sum(tokens) + 64, 64, torch.bfloat16, device)
    query = torch.randn(2, 8, length, 128, device=device).bfloat16()
    key, value = torch.randn(2, 2, 2, length, 128, device=device).bfloat16()
    with use_backend("kernels"):
        expected = prefill_attention(query, key, value, Softmax(0.1), past=stored_past(rows))
    rows = rows.behind(BEYOND)
    with use_backend("kernels"):
        got = prefill_attention(query, key, value, Softmax(0.1), past=stored_past(rows))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_compaction(device, heads: int = 8, batch: int = 64) -> None:
    """Three rounds: the same counts, the same owners, no page lost."""
    count = heads * batch
    rows = random_rows(K8V4, K4V2, batch, heads, 128, (400, 500), 1000, 64, torch.bfloat16, device, 4 * count)
    twins = {"kernels": rows, "reference": copy.deepcopy(rows)}
    states = {}
    for backend, mine in twins.items():
        generator, held = torch.Generator(device).manual_seed(1), mine.held
        held.free_list.extend(held.pages.shape[0] - 4 * count, 4 * count)
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        limits = [torch.full((batch, heads), limit, device=device) for limit in (0.6, 0.0005)]
        for step in range(3):
            held.length.fill_(1000 + step)
            held.window_score.copy_(torch.rand(held.window_score.shape, device=device, generator=generator) * 64)
            full = torch.rand(batch, device=device, generator=generator) < 0.9
            held.window_start.copy_(torch.where(full, 936 + step, 937 + step))
            with use_backend(backend):
                compact_windows(held, 63, *limits, bounds=mine.bounds, flag=flag)
        assert int(flag) == 0
        used = held.page_table[held.page_table != 0]
        everything = torch.cat([used, held.free_list.ids().to(used.dtype)]).sort().values
        assert torch.equal(everything.cpu(), torch.arange(1, held.pages.shape[0], dtype=used.dtype))
        states[backend] = held.counts
    torch.testing.assert_close(states["kernels"], states["reference"], rtol=0, atol=0)
