import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import interpreted  # noqa: F401
import numpy as np
import pytest
import torch
import triton.language as tl
from decode_cases import NARROW, NARROW_PAIRS
from hand_pages import read_token

from hf_diffkv.config import Precision
from hf_diffkv.ops.decode_attention import launch, reference
from hf_diffkv.ops.decode_attention.scratch import KernelConfig, Scratch
from hf_diffkv.ops.quantize import reference as quantize
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import HIGH, LOW, LayerRows, PageLayout
from hf_diffkv.pages.segments import Contents, as_scores, segments
from hf_diffkv.precision import SUPPORTED_BITS
from tools.kernels.rows import given_rows

TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
K8V4, K4V2, K16V16 = Precision(8, 4), Precision(4, 2), Precision(16, 16)


@dataclass
class Case:
    """Queries and the rows they attend to."""

    query: torch.Tensor
    rows: LayerRows

    @property
    def layout(self):
        return self.rows.layout

    @property
    def scaling(self):
        return self.layout.high.key_dim**-0.5

    @property
    def max_tokens(self):
        window = (self.rows.length - self.rows.window_start)[:, None]
        return int((self.rows.high_count + self.rows.low_count + window).max())

    def copy(self):
        rows = self.rows
        pool = SimpleNamespace(pages=rows.pages.clone(), free_list=rows.free_list)
        return replace(self, rows=replace(rows, pool=pool, window_score=rows.window_score.clone()))


def make_case(
    high_tokens,
    low_tokens,
    window,
    *,
    high=K8V4,
    low=K4V2,
    key_dim=32,
    value_dim=None,
    group=2,
    dtype=torch.float16,
    slots=24,
    seed=0,
    first_page=1,
    pages=None,
    **numbers,
):
    """A cache with `high_tokens`, `low_tokens` (int [batch][kv_heads]) and `window` (int [batch]) tokens.

    Everything that holds no token is poisoned: pages with 0xFF bytes, the window with NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    value_dim = value_dim or key_dim
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    layout = PageLayout.build(high, low, key_dim, value_dim, element_bytes, **numbers)
    counts = tuple(torch.tensor(count, dtype=torch.int32) for count in (high_tokens, low_tokens))
    batch, kv_heads = counts[0].shape
    tiers = (layout.high, layout.low)
    used = [-(-count // tier.capacity) for count, tier in zip(counts, tiers)]
    total = int(sum(used).sum())
    width = int(sum(used).max()) + 1
    if pages is None:
        pages = torch.full((first_page + total, layout.page_bytes), 0xFF, dtype=torch.uint8)
    ids = iter((first_page + torch.randperm(total, generator=generator)).tolist())
    table = torch.zeros(batch, kv_heads, width, dtype=torch.int32)

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    for tier, tier_layout in enumerate(tiers):
        for b in range(batch):
            for h in range(kv_heads):
                count = int(counts[tier][b, h])
                row_pages = torch.tensor([next(ids) for _ in range(int(used[tier][b, h]))], dtype=torch.int64)
                columns = torch.arange(len(row_pages))
                table[b, h, columns if tier == HIGH else width - 1 - columns] = row_pages.int()
                token = torch.arange(count)
                key, value = randn(count, key_dim, scale=1.5), randn(count, value_dim)
                contents = Contents(key, value, torch.rand(count, generator=generator), token)
                page = row_pages[token // tier_layout.capacity]
                quantize.store_tokens(pages, tier_layout, page, token % tier_layout.capacity, contents, dtype)
    window = torch.tensor(window)
    start = torch.maximum(counts[0].max(1).values + counts[1].max(1).values, torch.tensor(0)).long() + 7
    start = torch.where(window == 0, 0, start)
    length = start + window
    key = torch.full((batch, kv_heads, slots, key_dim), math.nan, dtype=dtype)
    value = torch.full((batch, kv_heads, slots, value_dim), math.nan, dtype=dtype)
    score = torch.full((batch, kv_heads, slots), math.nan)
    for b in range(batch):
        slot = torch.arange(int(start[b]), int(length[b])) % slots
        key[b, :, slot] = randn(kv_heads, len(slot), key_dim, scale=1.5)
        value[b, :, slot] = randn(kv_heads, len(slot), value_dim)
        score[b, :, slot] = torch.rand(kv_heads, len(slot), generator=generator)
    query = randn(batch, kv_heads * group, key_dim)
    held = {"page_table": table, "high_count": counts[0], "low_count": counts[1], "pages": pages}
    held |= {"window_score": score, "window_start": start, "length": length}
    return Case(query, given_rows(layout, key, value, **held))


def poison(scratch):
    for buffer in (scratch.output, scratch.peak, scratch.total, scratch.logits, scratch.block_peak):
        buffer.fill_(math.nan)
    return scratch


def make_scratch(case, splits=3, **config):
    chosen = KernelConfig.choose(case.layout, case.query.shape[1] // case.rows.heads, case.query.dtype, "cpu")
    config = replace(chosen, **config)
    return poison(Scratch.allocate(case.query, case.rows, case.max_tokens, splits=splits, config=config))


def run_kernel(case, splits=3, block=32, scratch=None, operand=None, softcap=None, sinks=None, **options):
    operand = operand or (tl.float32 if case.query.dtype == torch.float32 else tl.float16)
    scratch = scratch or make_scratch(case, splits, block=block, operand=operand)
    softmax = Softmax(case.scaling, softcap, sinks)
    return launch.decode_attention(
        case.query, case.rows, softmax, bounds=Bounds(case.max_tokens), scratch=scratch, **options
    )


def run_reference(case, softcap=None, sinks=None, **options):
    """The oracle needs a window without NaN, such as the cache keeps."""
    rows = case.rows
    tiers = [
        (rows.counts[tier].flatten().numpy(), 0, layout.capacity, torch.device("cpu"))
        for tier, layout in ((HIGH, case.layout.high), (LOW, case.layout.low))
    ]
    clean = replace(rows, window_key=rows.window_key.nan_to_num(), window_value=rows.window_value.nan_to_num())
    return reference.decode_attention(
        case.query, clean, Softmax(case.scaling, softcap, sinks), bounds=Bounds(0, tiers), **options
    )


def relative_error(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))


def stored_by_hand(rows, row, dtype):
    """Dense keys and values of a row's pages, high tokens then low ones, decoded from the page format's definition."""
    found, table = [], rows.page_table.view(-1, rows.width)[row]
    for tier, layout in ((HIGH, rows.layout.high), (LOW, rows.layout.low)):
        for token in range(int(rows.counts[tier].view(-1)[row])):
            entry, slot = divmod(token, layout.capacity)
            page = rows.pages[int(table[entry if tier == HIGH else rows.width - 1 - entry])]
            found.append(read_token(page.numpy(), layout, slot, dtype)[:2])
    return [torch.from_numpy(np.stack(part)).float() for part in zip(*found)]


def gains(before, after):
    """Returns how much the scores of all attended tokens grew: pages [tiers][tokens] and window."""
    result = []
    for tier, layout in ((HIGH, before.layout.high), (LOW, before.layout.low)):
        old, new = (as_scores(segments(case.rows.pages, layout).score) for case in (before, after))
        width = before.rows.width
        for row, count in enumerate(before.rows.counts[tier].flatten().tolist()):
            token = torch.arange(count)
            entry = token // layout.capacity
            page = before.rows.page_table.view(-1, width)[row, entry if tier == HIGH else width - 1 - entry].long()
            slot = token % layout.capacity
            result.append(new[page, slot] - old[page, slot])
    held = ~before.rows.window_score.isnan()
    result.append((after.rows.window_score - before.rows.window_score)[held])
    assert after.rows.window_score[~held].isnan().all()
    return torch.cat(result)


def untouched(before, after):
    """Whether nothing in the pages changed except the scores of stored tokens."""
    mask = torch.ones_like(before.rows.pages, dtype=torch.bool)
    width = before.rows.width
    for tier, layout in ((HIGH, before.layout.high), (LOW, before.layout.low)):
        for row, count in enumerate(before.rows.counts[tier].flatten().tolist()):
            for entry in range(-(-count // layout.capacity)):
                page = int(before.rows.page_table.view(-1, width)[row, entry if tier == HIGH else width - 1 - entry])
                stored = min(layout.capacity, count - entry * layout.capacity)
                mask[page, layout.score_offset : layout.score_offset + layout.score_bytes * stored] = False
    return torch.equal(before.rows.pages[mask], after.rows.pages[mask])


def assert_like_reference(case, **options):
    kernel_options = {key: options.pop(key) for key in ("splits", "block", "scratch", "operand") if key in options}
    mine, oracle = case.copy(), case.copy()
    got = run_kernel(mine, **kernel_options, **options)
    want = run_reference(oracle, **options)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.isfinite(got).all()
    assert relative_error(got, want) < TOLERANCE[case.query.dtype]
    expected = gains(case, oracle)
    if case.layout.high.score_bytes == 4:
        assert relative_error(gains(case, mine), expected) < 1e-3
    else:
        # received attention differs by little, so few sums are rounded the other way
        off = (gains(case, mine) - expected).abs()
        assert (off < 1e-4 + 2e-3 * expected).float().mean() > 0.9
        assert (off <= 2**-10 + 2e-3 * expected).all()
    assert untouched(case, mine)
    return mine, got


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precisions", [(K8V4, K4V2), (Precision(8, 8), K8V4), (K16V16, K16V16)])
@pytest.mark.sampled(100)
def test_common_precisions_match_the_reference(precisions, dtype):
    high, low = precisions
    case = make_case([[70, 0]], [[33, 150]], [19], high=high, low=low, key_dim=64, group=4, dtype=dtype)
    assert_like_reference(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numbers", NARROW, ids=str)
@pytest.mark.parametrize(
    "high, low",
    [*NARROW_PAIRS, (Precision(4, 5, 4, 8), Precision(2, 3, 8, 8))],
    ids=lambda precision: precision.name,
)
@pytest.mark.sampled(100)
def test_narrow_pages_match_the_reference(high, low, numbers, dtype):
    case = make_case([[70, 0]], [[33, 90]], [19], high=high, low=low, key_dim=64, group=2, dtype=dtype, **numbers)
    assert_like_reference(case)


@pytest.mark.parametrize("v_bits", SUPPORTED_BITS)
@pytest.mark.parametrize("k_bits", SUPPORTED_BITS)
@pytest.mark.sampled(16)
def test_every_pair_of_bits_matches_the_reference(k_bits, v_bits):
    precision = Precision(k_bits, v_bits)
    case = make_case([[37]], [[0]], [5], high=precision, low=precision, key_dim=32, group=1)
    assert_like_reference(case, splits=1, block=64)


@pytest.mark.parametrize(
    ("high", "low", "key_dim", "value_dim"),
    [
        (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4), 64, 64),
        (Precision(8, 8, 4, 8), Precision(2, 2, 4, 2), 64, 64),
        (Precision(4, 4, 3, 3), Precision(4, 2, 6, 12), 24, 48),
        (Precision(8, 2, 5, 1), Precision(1, 1, 2, 4), 40, 80),
        (Precision(6, 3, 2, 4), Precision(5, 5, 4, 2), 64, 64),
        (Precision(6, 5, 3, 3), Precision(3, 3, 6, 12), 24, 48),
    ],
)
@pytest.mark.sampled(6)
def test_quantisation_groups_match_the_reference(high, low, key_dim, value_dim):
    case = make_case([[40]], [[21]], [6], high=high, low=low, key_dim=key_dim, value_dim=value_dim)
    assert_like_reference(case, splits=1, block=64)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "group"),
    [
        (8, 8, 2),
        (16, 32, 1),
        (80, 80, 7),
        (96, 64, 5),
        (64, 128, 8),
        (256, 256, 4),
        (32, 24, 16),
        (128, 128, 3),
        (512, 512, 8),
        (72, 112, 2),
        (192, 128, 8),
    ],
)
@pytest.mark.sampled(16)
def test_head_shapes_match_the_reference(key_dim, value_dim, group):
    case = make_case([[40]], [[41]], [18], key_dim=key_dim, value_dim=value_dim, group=group)
    assert_like_reference(case, splits=2)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (80, 80), (96, 64), (64, 96), (128, 128), (256, 256)])
@pytest.mark.sampled(6)
def test_codes_of_two_fields_match_the_reference(key_dim, value_dim):
    """Rows whose fields, and the halves of whose quarters, have any alignment."""
    precisions = {"high": Precision(6, 3), "low": Precision(3, 5)}
    dims = {"key_dim": key_dim, "value_dim": value_dim}
    assert_like_reference(make_case([[40]], [[41]], [18], dtype=torch.float32, **precisions, **dims), splits=2)


def test_value_dim_that_has_no_quarters():
    precision = Precision(8, 8)
    case = make_case([[9]], [[3]], [4], high=precision, low=K16V16, key_dim=30, value_dim=18)
    assert_like_reference(case)


@pytest.mark.parametrize("splits", [1, 2, 7, 20])
@pytest.mark.sampled(100)
def test_any_number_of_splits_gives_the_same(splits):
    case = make_case([[130]], [[64]], [24], seed=splits)
    assert_like_reference(case, splits=splits, block=16)


@pytest.mark.parametrize("shares", [1, 2, 5, 40])
def test_any_number_of_shares_adds_the_same_scores(monkeypatch, shares):
    monkeypatch.setattr(launch, "SHARE_TOKENS", 16)
    monkeypatch.setattr(launch, "_shares", lambda *_: shares)
    assert_like_reference(make_case([[200, 7]], [[90, 0]], [8]))


@pytest.mark.parametrize("rows, tokens, splits, shares", [(8, 8192, 64, 18), (256, 8192, 6, 18), (512, 1 << 17, 6, 16)])
def test_shares_follow_the_tokens_until_the_device_is_full(rows, tokens, splits, shares):
    assert launch._shares(rows, SimpleNamespace(splits=splits, max_tokens=tokens)) == shares


def test_full_last_pages_and_tier_boundaries():
    layout = PageLayout.build(K8V4, K4V2, 64, 64, 2)
    high, low = layout.high.capacity, layout.low.capacity
    case = make_case([[high, 2 * high, high + 1]], [[low, low - 1, 2 * low]], [24], key_dim=64)
    assert case.layout == layout
    assert_like_reference(case, splits=4)


def test_empty_tiers_one_token_and_empty_rows():
    case = make_case([[0, 0], [1, 0], [0, 0], [0, 17]], [[0, 0], [0, 1], [0, 0], [0, 0]], [1, 1, 0, 24])
    mine, got = assert_like_reference(case)
    assert (got[2] == 0).all()
    # the newest token is all that request 0 sees, and adds to no score
    assert torch.equal(mine.rows.window_score[0].nan_to_num(), case.rows.window_score[0].nan_to_num())


@pytest.mark.slow
def test_one_long_request_among_short_ones():
    case = make_case([[600]] + [[3]] * 4, [[500]] + [[0]] * 4, [20, 1, 2, 3, 4], group=4)
    assert_like_reference(case, splits=6, block=64)


def test_rows_that_are_not_valid_return_zeros_and_score_nothing():
    case = make_case([[20], [20]], [[9], [9]], [12, 12])
    valid = torch.tensor([False, True])
    mine, got = assert_like_reference(case, valid=valid)
    assert (got[0] == 0).all() and (got[1] != 0).any()
    assert torch.equal(mine.rows.window_score[0].nan_to_num(), case.rows.window_score[0].nan_to_num())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.sampled(6)
def test_softcap_and_sinks_match_the_reference(softcap, with_sinks):
    case = make_case([[25, 0]], [[40, 0]], [1], group=3)
    # every other element, which no kernel may read as if they were adjacent
    sinks = torch.tensor([[0.5, -2.0, 30.0, 1.0, -1.0, 0.0], [9.0] * 6], dtype=torch.float16).T.contiguous()[:, 0]
    sinks = sinks if with_sinks else None
    assert_like_reference(case, softcap=softcap, sinks=sinks)


def test_more_than_six_thousand_tokens_in_one_head_score():
    case = make_case([[3100]], [[3333]], [50], key_dim=16, slots=64, group=4)
    mine, _ = assert_like_reference(case, splits=5, block=256)
    # every query head's probabilities sum to 1, so without the newest token's share the maxima reach about 1
    assert 0.9 < float(gains(case, mine).sum()) <= 4


def test_offsets_beyond_two_gigabytes():
    page_bytes = PageLayout.build(K8V4, K4V2, 32, 32, 2).page_bytes
    first_page = 2**31 // page_bytes + 3
    # reserved but not touched: only the pages in use become resident
    pages = torch.empty(first_page + 32, page_bytes, dtype=torch.uint8)
    assert pages.numel() > 2**31
    pages[first_page:] = 0xFF
    case = make_case([[90]], [[150]], [9], first_page=first_page, pages=pages)
    near = make_case([[90]], [[150]], [9])
    expected = run_reference(near.copy())
    before = pages[first_page:].clone()
    got = run_kernel(case)
    assert relative_error(got, expected) < TOLERANCE[torch.float16]
    run_kernel(near)
    used = len(near.rows.pages) - 1
    assert not torch.equal(before, pages[first_page:])
    assert torch.equal(near.rows.pages[1:], pages[first_page : first_page + used])


@pytest.mark.parametrize("high, low", [(K8V4, K4V2), (Precision(6, 4), Precision(5, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.sampled(4)
def test_matches_dense_attention_in_float32(dtype, high, low):
    case = make_case([[45, 20]], [[30, 61]], [17], high=high, low=low, group=3, dtype=dtype)
    mine, held = case.copy(), case.rows
    got = run_kernel(mine)[0].float().view(2, 3, -1)
    new, old = (segments(each.rows.pages, case.layout.high).score for each in (mine, case))
    slot = torch.arange(int(held.window_start[0]), int(held.length[0])) % held.slots
    for row in range(2):
        keys, values = stored_by_hand(held, row, dtype)
        keys = torch.cat([keys, held.window_key[0, row, slot].float()])
        values = torch.cat([values, held.window_value[0, row, slot].float()])
        query = case.query[0].float().view(2, 3, -1)[row]
        probabilities = torch.softmax(query @ keys.T * case.scaling, dim=-1)
        assert relative_error(got[row], probabilities @ values) < TOLERANCE[dtype]
        received = probabilities.amax(0)
        gained = (mine.rows.window_score - held.window_score)[0, row, slot]
        assert gained[-1] == 0
        torch.testing.assert_close(gained[:-1], received[-17:-1], rtol=1e-2, atol=1e-5)
        capacity, width = case.layout.high.capacity, held.width
        token = torch.arange(int(held.high_count[0, row]))
        page = held.page_table.view(-1, width)[row, token // capacity].long()
        gained = (new - old)[page, token % capacity]
        torch.testing.assert_close(gained, received[: len(token)], rtol=1e-2, atol=1e-5)


def test_scratch_is_reused_and_checked():
    long = make_case([[200]], [[100]], [24])
    short = make_case([[10]], [[3]], [2], seed=1)
    scratch = make_scratch(long, splits=4, block=32, operand=tl.float16)
    assert_like_reference(long, scratch=scratch)
    assert_like_reference(short, scratch=scratch)
    small = make_scratch(short)
    with pytest.raises(ValueError, match="scratch holds 15 tokens"):
        run_kernel(long, scratch=small)
    other = make_case([[10, 10]], [[3, 3]], [2])
    with pytest.raises(ValueError, match="made for 1 rows"):
        run_kernel(other, scratch=small)


def test_the_launcher_allocates_its_own_scratch():
    case = make_case([[30]], [[9]], [4])
    expected = run_reference(case.copy())
    got = launch.decode_attention(case.query, case.rows, Softmax(case.scaling), bounds=Bounds(case.max_tokens))
    assert relative_error(got, expected) < 1e-3


def test_nothing_is_read_back_from_the_device(monkeypatch):
    class Recorder:
        def __getitem__(self, grid):
            return lambda **arguments: launched.append((grid, arguments))

    launched = []
    for name in ("attend_kernel", "finish_kernel"):
        monkeypatch.setattr(launch, name, Recorder())
    case = make_case([[30]], [[9]], [4])
    tensors = {name: t.to("meta") for name, t in vars(case.rows).items() if isinstance(t, torch.Tensor)}
    pool = SimpleNamespace(pages=case.rows.pages.to("meta"), free_list=None)
    valid = torch.ones(1, dtype=torch.bool, device="meta")
    rows = replace(case.rows, pool=pool, **tensors)
    launch.decode_attention(case.query.to("meta"), rows, Softmax(1.0), bounds=Bounds(50), valid=valid)
    # plus a share of the scores for each tier and the window
    assert [grid for grid, _ in launched] == [(1, 1), (1, case.query.shape[1] + 3)]


def test_wrong_arguments_are_refused():
    case = make_case([[3]], [[0]], [2])
    for query, scaling, message in (
        (case.query, 0.0, "scaling"),
        (case.query.double(), 1.0, "float64"),
        (case.query.float(), 1.0, "query is torch.float32 but the stored tokens are torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            launch.decode_attention(query, case.rows, Softmax(scaling), bounds=Bounds(9))


@pytest.mark.parametrize("backend", ["cuda", "hip"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_shipped_configurations_are_consistent(backend, dtype):
    for dim in (64, 80, 128, 256):
        for precision in (K8V4, K16V16):
            layout = PageLayout.build(precision, K4V2, dim, dim, 2)
            for group in (1, 5, 16):
                config = KernelConfig.choose(layout, group, dtype, backend)
                assert config.heads >= group and config.block % 16 == 0
                # fp16 needs inline PTX, which only NVIDIA compiles
                if config.mode:
                    assert backend == "cuda" and config.operand == tl.float16
                if dtype == torch.float32:
                    assert config.raw == config.operand == tl.float32


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, 4)])
@pytest.mark.parametrize("splits", [1, 3])
def test_nan_of_a_query_stays_in_its_output(splits, sinks, softcap):
    case = make_case([[40], [70]], [[50], [0]], [9, 5], group=4)
    case.query[1, 2, 3] = math.nan
    got = run_kernel(case, splits=splits, sinks=sinks, softcap=softcap)
    assert got[1, 2].isnan().all()
    got[1, 2] = 0
    assert got.isfinite().all()
