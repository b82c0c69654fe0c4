import copy
from types import SimpleNamespace

import interpreted  # noqa: F401
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_compact_reference import Rewrite
from test_quantize_kernel import NARROW

from hf_diffkv.config import Precision
from hf_diffkv.ops import table
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.compact import launch, reference
from hf_diffkv.ops.compact.kernels import pair_ranks, sum_totals
from hf_diffkv.ops.quantize import launch as quantize_launch
from hf_diffkv.ops.quantize.reference import load_tokens, store_tokens
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import HIGH, LOW, FreeList, PageLayout, column
from hf_diffkv.pages.segments import Contents, segments
from tools.kernels.rows import given_rows

K8V4, K4V2 = Precision(8, 4), Precision(4, 2)
CPU = torch.device("cpu")


class State:
    """Rows of stored tokens on separate pages, with a free list that has wrapped around once."""

    # shape of the rows: requests and heads
    shape = (-1, 1)

    def __init__(self, layout, high_counts, low_counts, dtype=torch.float16, seed=0, spare=6, scores=None):
        self.layout, self.dtype = layout, dtype
        self.generator = torch.Generator().manual_seed(seed)
        rows = len(high_counts)
        self.high_count = torch.tensor(high_counts, dtype=torch.int32)
        self.low_count = torch.tensor(low_counts, dtype=torch.int32)
        needs = [
            [-(-count // tier.capacity) for count in counts]
            for counts, tier in ((high_counts, layout.high), (low_counts, layout.low))
        ]
        width = max(a + b for a, b in zip(*needs)) + 3
        total = sum(map(sum, needs)) + 2 * rows + spare
        self.pages = torch.full((total + 1, layout.page_bytes), 0xFF, dtype=torch.uint8)
        ids = (1 + torch.randperm(total, generator=self.generator)).tolist()
        self.table = torch.zeros(rows, width, dtype=torch.int32)
        self.length = torch.tensor([a + b + 10 for a, b in zip(high_counts, low_counts)])
        for row in range(rows):
            held = high_counts[row] + low_counts[row]
            positions = torch.randperm(held, generator=self.generator)
            for tier, tier_layout, need, count in (
                (HIGH, layout.high, needs[HIGH][row], high_counts[row]),
                (LOW, layout.low, needs[LOW][row], low_counts[row]),
            ):
                own = torch.tensor([ids.pop() for _ in range(need)], dtype=torch.int32)
                self.table[row, column(tier, torch.arange(need), width)] = own
                index = torch.arange(count)
                position, positions = positions[:count], positions[count:]
                store_tokens(
                    self.pages,
                    tier_layout,
                    own.long()[index // tier_layout.capacity],
                    index % tier_layout.capacity,
                    Contents(
                        self.normal(count, layout.high.key_dim),
                        self.normal(count, layout.high.value_dim),
                        self.random_scores(position, row) if scores is None else torch.full((count,), scores),
                        position,
                    ),
                    dtype,
                )
        self.free_list = FreeList(CPU)
        capacity = len(ids) + 5
        start = capacity - 2
        self.free_list.ring = torch.full((capacity,), -1, dtype=torch.int32)
        self.free_list.ring[(start + torch.arange(len(ids))) % capacity] = torch.tensor(ids, dtype=torch.int32)
        self.free_list.state.copy_(torch.tensor([start, len(ids), capacity]))

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def random_scores(self, position, row):
        """Random means between 0 and 2 / N, so that every level occurs; coarse, so that ties occur."""
        later = (self.length[row] - 1 - position).clamp(min=1).float()
        mean = torch.randint(0, 9, position.shape, generator=self.generator) / 4.0 / self.length[row]
        return mean * later

    def clone(self):
        other = copy.copy(self)
        for name in ("pages", "table", "high_count", "low_count", "length"):
            setattr(other, name, getattr(self, name).clone())
        other.free_list = FreeList(CPU)
        other.free_list.ring = self.free_list.ring.clone()
        other.free_list.state = self.free_list.state.clone()
        return other

    def candidates(self, leaving=None, mean=None):
        """Draws one more candidate per row: key, value, score, position, whether it leaves, length."""
        rows = self.length.numel()
        self.length += 1
        position = self.length - 10
        later = (self.length - 1 - position).clamp(min=1)
        relative = torch.randint(0, 9, (rows,), generator=self.generator) / 4.0 if mean is None else torch.tensor(mean)
        return (
            self.normal(rows, self.layout.high.key_dim),
            self.normal(rows, self.layout.high.value_dim),
            (relative / self.length * later).float(),
            position,
            torch.ones(rows, dtype=torch.bool) if leaving is None else torch.tensor(leaving),
            self.length.clone(),
        )

    def thresholds(self, high=1.5, low=0.75):
        return (high / self.length).float(), (low / self.length).float()

    def by_head(self, of_rows):
        return of_rows.unflatten(0, self.shape) if len(of_rows) else of_rows[:, None]

    def compact(self, op, candidates, thresholds, **options):
        """Runs a round with one of the ops, over windows that hold one candidate each and start later afterwards."""
        key, value, score, *of_rows = map(self.by_head, candidates)
        position, leaving, length = (each[:, 0].contiguous() for each in of_rows)
        rows = given_rows(
            self.layout,
            key[:, :, None],
            value[:, :, None],
            pool=SimpleNamespace(pages=self.pages, free_list=self.free_list),
            page_table=self.by_head(self.table),
            high_count=self.by_head(self.high_count),
            low_count=self.by_head(self.low_count),
            window_score=score[:, :, None],
            # a window that nothing leaves is empty
            window_start=torch.where(leaving, position, length.to(position.dtype)),
            length=length,
        )
        thresholds = [None if each is None else self.by_head(each) for each in thresholds]
        op.compact_windows(rows, 0, *thresholds, **options)
        assert torch.equal(rows.window_start, torch.where(leaving, position + 1, length))

    def token(self, row):
        """All stored tokens of a row: {position: (tier, score, key, value)}."""
        found = {}
        tiers = ((HIGH, self.layout.high, self.high_count), (LOW, self.layout.low, self.low_count))
        for tier, tier_layout, counts in tiers:
            index = torch.arange(int(counts[row]))
            page = self.table[row, column(tier, index // tier_layout.capacity, self.table.shape[1])].long()
            slot = index % tier_layout.capacity
            key, value = load_tokens(self.pages, tier_layout, page, slot, self.dtype)
            view = segments(self.pages, tier_layout)
            for i, position in enumerate(view.positions(page, slot).tolist()):
                assert position not in found
                found[position] = (tier, float(view.scores(page, slot)[i]), key[i], value[i])
        return found


def run_kernel(state, candidates, thresholds, flag=None):
    most = int(max(state.high_count.max(), state.low_count.max()))
    flag = torch.zeros(1, dtype=torch.int32) if flag is None else flag
    state.compact(launch, candidates, thresholds, bounds=Bounds(most), flag=flag)
    return flag


def run_reference(state, candidates, thresholds):
    tiers = [
        (count.numpy().astype(np.int64), 0, tier.capacity, CPU)
        for count, tier in ((state.high_count, state.layout.high), (state.low_count, state.layout.low))
    ]
    state.compact(reference, candidates, thresholds, bounds=Bounds(0, tiers))


def assert_alike(got, expected):
    for name in ("high_count", "low_count", "table"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert torch.equal(got.free_list.state, expected.free_list.state)
    assert torch.equal(got.free_list.ring, expected.free_list.ring)
    assert torch.equal(got.pages[1:], expected.pages[1:])
    assert (got.pages[0] == 0xFF).all()


def assert_steps_alike(state, steps, run=run_kernel, **thresholds):
    expected = state.clone()
    for _ in range(steps):
        candidates, limits = state.candidates(), state.thresholds(**thresholds)
        assert int(run(state, candidates, limits)) == 0
        with use_backend("reference"):
            run_reference(expected, candidates, limits)
        assert_alike(state, expected)


def small_layout(high=K8V4, low=K4V2, key_dim=32, value_dim=32, page_bytes=1024, element_bytes=2, **numbers):
    return PageLayout.build(high, low, key_dim, value_dim, element_bytes, page_bytes=page_bytes, **numbers)


@pytest.mark.parametrize("numbers", [{}, *NARROW], ids=str)
@pytest.mark.slow
def test_many_rows_over_many_steps(numbers):
    layout = small_layout(**numbers)
    full = layout.high.capacity
    counts = [0, 1, full - 1, full, full + 1, 3 * full, 7, 0, 2, 5]
    state = State(layout, counts, counts[::-1], seed=1, spare=40)
    assert_steps_alike(state, 12)


@pytest.mark.parametrize(
    "high, low, key_dim, value_dim, dtype",
    [
        (Precision(8, 8), K8V4, 64, 64, torch.bfloat16),
        (Precision(16, 16), Precision(16, 16), 16, 16, torch.bfloat16),
        (Precision(16, 16), Precision(8, 4), 80, 96, torch.float32),
        (Precision(4, 16), Precision(16, 2), 24, 16, torch.bfloat16),
        (Precision(8, 2, 2, 4), Precision(4, 1, 3, 2), 96, 64, torch.float16),
        (Precision(6, 4), Precision(5, 3), 64, 64, torch.bfloat16),
        (Precision(5, 6, 3, 1), Precision(3, 2, 2, 4), 96, 80, torch.float16),
        (K8V4, K4V2, 128, 128, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.sampled(100)
def test_precisions_dims_and_dtypes(high, low, key_dim, value_dim, dtype):
    layout = small_layout(high, low, key_dim, value_dim, 4096, dtype.itemsize)
    state = State(layout, [9, 0, 30, 4], [3, 12, 0, 8], dtype=dtype, seed=2, spare=8)
    assert_steps_alike(state, 4)


@pytest.mark.parametrize("high, low", [(Precision(6, 4), Precision(5, 3)), (Precision(4, 16, 2, 1), Precision(1, 8))])
@pytest.mark.sampled(100)
def test_narrow_pages(high, low):
    for numbers in NARROW:
        layout = small_layout(high, low, 64, 40, 2048, **numbers)
        assert_steps_alike(State(layout, [9, 0, 70, 4], [3, 120, 0, 8], seed=2, spare=8), 4)


def test_one_long_row_among_short_ones_is_searched_in_splits(monkeypatch):
    monkeypatch.setattr(launch, "SEARCH_TOKENS", 64)
    monkeypatch.setattr(launch, "SEARCH_PROGRAMS", 12)
    layout = small_layout()
    state = State(layout, [401, 3, 0], [333, 0, 2], seed=3)
    assert launch._splits(layout, 3, 401)[0] > 1
    assert_steps_alike(state, 4)


def test_max_tokens_only_balances_the_work(monkeypatch):
    monkeypatch.setattr(launch, "SEARCH_TOKENS", 64)
    state = State(small_layout(), [300, 7], [40, 90], seed=4)
    expected = state.clone()
    candidates, limits = state.candidates(mean=[2.0, 1.0]), state.thresholds()
    state.compact(launch, candidates, limits, bounds=Bounds(1), flag=torch.zeros(1, dtype=torch.int32))
    run_reference(expected, candidates, limits)
    assert_alike(state, expected)


@pytest.mark.parametrize("low", [1.5, 0.0])
@pytest.mark.sampled(100)
def test_without_a_low_tier_and_without_pruning(low):
    state = State(small_layout(), [20, 0, 5], [0, 0, 11], seed=5)
    assert_steps_alike(state, 3, low=low)


def test_rows_with_nothing_to_do_stay_as_they_are():
    state = State(small_layout(), [5, 6], [7, 0], seed=6)
    before = state.clone()
    candidates = state.candidates(leaving=[False, False])
    assert int(run_kernel(state, candidates, state.thresholds())) == 0
    before.length = state.length
    assert_alike(state, before)


def test_ties_go_to_the_oldest():
    state = State(small_layout(), [40], [0], seed=7, scores=0.0)
    run_kernel(state, state.candidates(mean=[2.0]), state.thresholds(low=0.0))
    tokens = state.token(0)
    assert [position for position, token in tokens.items() if token[0] == LOW] == [0]


def test_against_a_dense_simulation_of_algorithm_1():
    layout = small_layout()
    state = State(layout, [30, 2], [17, 0], seed=8, spare=20)
    dense = [{p: list(t) for p, t in state.token(row).items()} for row in range(2)]
    for _ in range(15):
        candidates, (high, low) = state.candidates(), state.thresholds()
        key, value, score, position, _, length = candidates
        run_kernel(state, candidates, (high, low))
        for row in range(2):
            own = float(score[row]), int(position[row]), key[row], value[row]
            simulate(dense[row], *own, int(length[row]), high[row].numpy(), low[row].numpy())
    for row in range(2):
        stored = state.token(row)
        assert {p: t[0] for p, t in stored.items()} == {p: t[0] for p, t in dense[row].items()}
        for p, (tier, score, key, value) in stored.items():
            precision, (_, wanted_score, *wanted) = (K8V4, K4V2)[tier], dense[row][p]
            assert score == wanted_score
            for got, want, bits in zip((key, value), wanted, (precision.k_bits, precision.v_bits)):
                want = want.float()
                # demoted tokens have been quantised twice
                bound = float(want.max() - want.min()) / (2**bits - 1) + 0.05
                assert float((got - want).abs().max()) <= bound


def simulate(tokens, score, position, key, value, length, high, low):
    """Algorithm 1 for one row over {position: [tier, score, key, value]}, with float32 thresholds `high` and `low`."""

    def mean(score, position):
        return np.float32(score) / np.float32(max(length - 1 - position, 1))

    own = mean(score, position)
    tier = HIGH if own >= high else LOW
    if own < low:
        return
    ranked = sorted((mean(t[1], p), p) for p, t in tokens.items() if t[0] == tier)
    tokens[position] = [tier, score, key, value]
    if not ranked:
        return
    least, victim = ranked[0]
    if least < low:
        del tokens[victim]
    elif tier == HIGH and least < high:
        tokens[victim][0] = LOW


def unservable(reason):
    """A state that needs two more pages but lacks them, or places for them in its rows; and its candidates."""
    layout = small_layout()
    full = layout.high.capacity
    state = State(layout, [full, full, 3], [0, 0, 0], seed=9, scores=1e6)
    candidates = state.candidates(mean=[2.0, 2.0, 2.0])
    if reason == "free list":
        state.free_list.state[1] = 1
    else:
        state.table = state.table[:, :1].contiguous()
    return state, candidates


@pytest.mark.parametrize("reason", ["free list", "row"])
def test_a_round_that_cannot_be_served_is_called_off(reason):
    state, candidates = unservable(reason)
    before = state.clone()
    flag = torch.tensor([4], dtype=torch.int32)
    assert run_kernel(state, candidates, state.thresholds(), flag) is flag
    assert flag.item() == (5 if reason == "free list" else 6)
    assert_alike(state, before)


def test_no_rows():
    state = State(small_layout(), [1], [0])
    candidates, limits = state.candidates(), state.thresholds()
    for name in ("table", "high_count", "low_count"):
        setattr(state, name, getattr(state, name)[:0])
    flag = torch.zeros(1, dtype=torch.int32)
    state.compact(launch, [x[:0] for x in candidates], [x[:0] for x in limits], bounds=Bounds(0), flag=flag)
    assert int(flag) == 0


def test_bad_inputs_are_named():
    state = State(small_layout(), [1], [0])
    candidates, limits = list(state.candidates()), state.thresholds()
    candidates[3] = candidates[3].int()
    with pytest.raises(ValueError, match="window_start"):
        run_kernel(state, candidates, limits)
    state.high_count = state.high_count.long()
    with pytest.raises(ValueError, match="high_count"):
        run_kernel(state, state.candidates(), limits)


@triton.jit
def rank_kernel(first, second, ranks, totals, count, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    a, b, all_a, all_b = pair_ranks(
        tl.load(first + row, mask=inside, other=0) != 0, tl.load(second + row, mask=inside, other=0) != 0
    )
    tl.store(ranks + row, a, mask=inside)
    tl.store(ranks + count + row, b, mask=inside)
    tl.store(totals + block, all_a)
    tl.store(totals + tl.num_programs(0) + block, all_b)


@triton.jit
def add_kernel(ranks, totals, sums, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    for which in tl.static_range(2):
        before, every = sum_totals(totals + which * blocks, block, blocks, CHUNK)
        rank = tl.load(ranks + which * count + row, mask=row < count, other=0)
        tl.store(ranks + which * count + row, rank + before, mask=row < count)
        tl.store(sums + which, every)


@pytest.mark.parametrize("count", [1, 64, 65, 1000])
def test_prefix_sums_over_many_blocks(count):
    marks = torch.randint(0, 2, (2, count), generator=torch.Generator().manual_seed(count), dtype=torch.uint8)
    blocks = triton.cdiv(count, 64)
    ranks = torch.full((2, count), -1, dtype=torch.int32)
    totals = torch.full((2, blocks), -1, dtype=torch.int32)
    sums = torch.full((2,), -1, dtype=torch.int32)
    rank_kernel[(blocks,)](marks[0], marks[1], ranks, totals, count, BLOCK=64)
    add_kernel[(blocks,)](ranks, totals, sums, count, BLOCK=64, CHUNK=4)
    assert torch.equal(ranks.long(), marks.long().cumsum(1) - marks)
    assert torch.equal(sums.long(), marks.sum(1))


@pytest.mark.slow
def test_many_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(launch, "PLAN_ROWS", 16)
    monkeypatch.setattr(launch, "TOTALS_CHUNK", 2)
    layout = small_layout()
    full = layout.high.capacity
    state = State(layout, [full, 0, 2 * full, 1] * 20, [layout.low.capacity, 0, 0, 3] * 20, seed=10, spare=200)
    assert_steps_alike(state, 2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(6)
def test_rewriting_rows_leaves_the_same_bytes_as_the_reference(seed):
    twins = {}
    for backend in ("kernels", "reference"):
        with use_backend(backend):
            twins[backend] = Rewrite(seed)
            twins[backend].run()
    rows, expected = twins["kernels"].rows, twins["reference"].rows
    rows.check(twins["kernels"].expected)
    used = rows.pool.capacity
    assert torch.equal(rows.pool.pages[:used], expected.pool.pages[:used])
    assert torch.equal(rows.table, expected.table)


def test_rewriting_moves_tokens_by_the_kernel(monkeypatch):
    moved = []
    monkeypatch.setattr(quantize_launch, "move_tokens", lambda *args: moved.append(args[2].numel()))
    table.ops_of.cache_clear()
    with use_backend("kernels"):
        Rewrite(0).run()
    table.ops_of.cache_clear()
    assert sum(moved) > 50


class HeadsOfOneRequest(State):
    """The rows are the heads of a single request, which have one length."""

    shape = (1, -1)


def test_heads_of_one_request():
    state = HeadsOfOneRequest(small_layout(), [7, 5, 9], [2, 4, 0], seed=4, spare=40)
    assert_steps_alike(state, 4)
