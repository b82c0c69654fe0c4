"""Algorithm 1 and the rewriting of rows, against a plain Python model of tokens in lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hand_pages import HandStore, read_token, write_token

from hf_diffkv.config import Precision
from hf_diffkv.ops.compact import DenseTokens, NewTokens, rewrite_rows, stored_tokens
from hf_diffkv.ops.compact.reference import compact_windows
from hf_diffkv.ops.table import ops_for_rows
from hf_diffkv.ops.tiles import Bounds
from hf_diffkv.pages import HIGH, LOW, LayerRows, PageLayout, PagePool

DIM = 16
DTYPE = torch.float32
LAYOUT = PageLayout.build(Precision(8, 4), Precision(4, 2), DIM, DIM, DTYPE.itemsize, 320)
TIERS = (LAYOUT.high, LAYOUT.low)


@dataclass
class Token:
    """One stored token: its tier, decoded contents, sum and position."""

    tier: int
    key: np.ndarray
    value: np.ndarray
    score: float
    position: int

    def at(self, tier: int) -> Token:
        """Returns the token with its current state quantised for `tier`."""
        page = np.zeros(LAYOUT.page_bytes, dtype=np.uint8)
        write_token(page, TIERS[tier], 0, self.key, self.value, self.score, self.position, DTYPE)
        return Token(tier, *read_token(page, TIERS[tier], 0, DTYPE))

    def mean(self, length: int) -> np.float32:
        return np.float32(self.score) / np.float32(max(length - 1 - self.position, 1))


class Rows:
    """Rows with random tokens in a pool, and the same tokens as lists."""

    def __init__(self, high: list[int], low: list[int], means, extra: int, max_pages: int | None = None) -> None:
        """means: function (row, tier, index) -> mean significance, or None for random means around 1 / length."""
        self.rng = np.random.default_rng(0)
        self.store = HandStore(LAYOUT, high, low, DTYPE)
        self.length = [int(a + b + self.rng.integers(2, 40)) for a, b in zip(high, low)]
        self.tokens: list[list[Token]] = []
        for row, counts in enumerate(zip(high, low)):
            positions = self.rng.permutation(self.length[row] - 2).tolist()
            for tier, count in enumerate(counts):
                for index in range(count):
                    position = positions.pop()
                    mean = means(row, tier, index) or self.rng.uniform(0.2, 3.0) / self.length[row]
                    score = float(np.float32(mean * max(self.length[row] - 1 - position, 1)))
                    self.store.write(tier, row, index, self.draw(), self.draw(), score, position)
            self.tokens.append(self.read(row))
        self.pool = self.store.into_pool(extra, max_pages)
        # room for every token at either level
        width = max(-(-(a + b + 40) // LAYOUT.high.capacity) + 2 for a, b in zip(high, low))
        old = self.store.table
        self.table = torch.zeros(len(high), width, dtype=torch.int32)
        for row, count in enumerate(high):
            pages = -(-count // LAYOUT.high.capacity)
            self.table[row, :pages] = old[row, :pages]
            self.table[row, width - (old.shape[1] - pages) :] = old[row, pages:]
        self.store.table = self.table
        self.high_count, self.low_count = self.store.counts

    def layer(self, *window: torch.Tensor, **given: torch.Tensor) -> LayerRows:
        """Returns the rows in the form that ops take, with empty windows unless others are given."""
        window = window or torch.zeros(2, len(self.tokens), 1, 1, DIM, dtype=DTYPE).unbind()
        return self.store.rows(1, *window, pool=self.pool, **given)

    def draw(self) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=DIM)).to(DTYPE)

    def candidate(self, score: float, length: int) -> Token:
        """The second-newest token of a row."""
        return Token(HIGH, self.draw().numpy(), self.draw().numpy(), score, length - 2)

    def read(self, row: int) -> list[Token]:
        return [Token(*token) for token in self.store.read_row(row)]

    def check(self, expected: list[list[Token]]) -> None:
        """Checks that every row holds exactly these tokens on its own pages, and that no other page is lost."""
        for row, tokens in enumerate(expected):
            found = {token.position: token for token in self.read(row)}
            assert len(found) == int(self.high_count[row] + self.low_count[row]) == len(tokens)
            for token in tokens:
                other = found[token.position]
                assert (other.tier, np.float32(other.score)) == (token.tier, np.float32(token.score))
                np.testing.assert_array_equal(other.key, token.key)
                np.testing.assert_array_equal(other.value, token.value)
        owned = []
        for row in range(len(expected)):
            pages = [-(-int(c[row]) // tier.capacity) for c, tier in zip((self.high_count, self.low_count), TIERS)]
            entries = self.table[row].tolist()
            used = entries[: pages[HIGH]] + entries[len(entries) - pages[LOW] :]
            assert sum(entry != 0 for entry in entries) == sum(pages)
            owned += used
        everything = sorted(owned + self.pool.free_list.ids().tolist())
        assert everything == list(range(1, self.pool.capacity))


def run_step(rows: Rows, candidates: list[Token], leaving: list[bool], high: list[float], low: list[float]) -> None:
    key, value = (torch.from_numpy(np.stack(part)).to(DTYPE) for part in zip(*((c.key, c.value) for c in candidates)))
    tiers = [
        (count.numpy(), 1, tier.capacity, torch.device("cpu"))
        for count, tier in zip((rows.high_count, rows.low_count), TIERS)
    ]
    # one head, whose windows each hold a candidate
    length, position = torch.tensor(rows.length), torch.tensor([c.position for c in candidates])
    window = {
        "window_score": torch.tensor([c.score for c in candidates], dtype=torch.float32)[:, None, None],
        # a window that nothing leaves is empty
        "window_start": torch.where(torch.tensor(leaving), position, length),
        "length": length,
    }
    layer = rows.layer(key[:, None, None], value[:, None, None], **window)
    thresholds = (torch.tensor(each, dtype=torch.float32)[:, None] for each in (high, low))
    compact_windows(layer, 0, *thresholds, bounds=Bounds(0, tiers))


def algorithm_one(
    tokens: list[Token], candidate: Token, length: int, high: float, low: float
) -> tuple[list[Token], str]:
    """The tokens afterwards, and the branch taken."""
    mean, high, low = candidate.mean(length), np.float32(high), np.float32(low)
    if mean < low:
        return tokens, "candidate pruned"
    tier = HIGH if mean >= high else LOW
    tokens = [*tokens, candidate.at(tier)]
    victim = min((t for t in tokens if t.tier == tier), key=lambda t: (t.mean(length), t.position))
    name = ("high", "low")[tier]
    if victim.mean(length) >= (high, low)[tier]:
        return tokens, f"{name} added"
    tokens = [t for t in tokens if t is not victim]
    if victim.mean(length) < low:
        return tokens, f"{name} added, victim pruned"
    return [*tokens, victim.at(LOW)], "high added, victim demoted"


def test_every_branch_of_algorithm_one() -> None:
    rng = np.random.default_rng(1)
    count = 120
    high = rng.integers(0, 3 * LAYOUT.high.capacity + 1, count).tolist()
    low = rng.integers(0, 3 * LAYOUT.low.capacity + 1, count).tolist()
    high[:6], low[:6] = [0, 0, 0, LAYOUT.high.capacity, 5, 0], [0, 0, 0, LAYOUT.low.capacity, 0, 5]
    # some rows hold nothing below the thresholds
    rows = Rows(high, low, lambda row, tier, _: 9.0 if row % 3 == 0 else None, extra=2 * count)
    high_threshold = [1.5 / n for n in rows.length]
    low_threshold = [(0.2, 1.0)[row % 2] / n for row, n in enumerate(rows.length)]
    candidates, leaving = [], (rng.random(count) < 0.9).tolist()
    for row in range(count):
        mean = float(np.float32(rng.uniform(0.0, 3.0) / rows.length[row]))
        candidates.append(rows.candidate(mean, rows.length[row]))
    free_before = rows.pool.free_list.free
    run_step(rows, candidates, leaving, high_threshold, low_threshold)

    branches, expected, taken = Counter(), [], 0
    for row, tokens in enumerate(rows.tokens):
        if leaving[row]:
            after, branch = algorithm_one(
                tokens, candidates[row], rows.length[row], high_threshold[row], low_threshold[row]
            )
            branches[branch] += 1
        else:
            after = tokens
        for tier, layout in enumerate(TIERS):
            sizes = [sum(t.tier == tier for t in held) for held in (tokens, after)]
            taken += sizes[1] > sizes[0] and sizes[0] % layout.capacity == 0
        expected.append(after)
    assert set(branches) == {
        "candidate pruned",
        "high added",
        "high added, victim pruned",
        "high added, victim demoted",
        "low added",
        "low added, victim pruned",
    }
    rows.check(expected)
    assert taken > 3
    assert rows.pool.free_list.free == free_before - taken


@pytest.mark.parametrize("tier", [HIGH, LOW])
def test_ties_go_to_the_oldest(tier: int) -> None:
    """Many tokens share the smallest mean, to the last bit, in whatever slots and pages they are."""
    count = 3 * TIERS[tier].capacity
    counts = [[0] * 8, [0] * 8]
    counts[tier] = [count] * 8
    rows = Rows(*counts, lambda row, _, index: 2.0**-9 if (index * 7 + row) % 5 < 2 else 2.0**-6, extra=8)
    candidates = [rows.candidate(2.0**-5, n) for n in rows.length]
    thresholds = [2.0**-5 if tier == HIGH else 1.0] * 8, [2.0**-8] * 8
    run_step(rows, candidates, [True] * 8, *thresholds)
    expected = []
    for tokens, candidate, length in zip(rows.tokens, candidates, rows.length):
        tied = [t for t in tokens if t.mean(length) == np.float32(2.0**-9)]
        oldest = min(tied, key=lambda t: t.position)
        assert len(tied) > 5
        expected.append([t for t in tokens if t is not oldest] + [candidate.at(tier)])
    rows.check(expected)


def test_nothing_leaves() -> None:
    rows = Rows([3, 20], [9, 0], lambda *_: None, extra=4)
    candidates = [rows.candidate(1.0, n) for n in rows.length]
    free = rows.pool.free_list.ids().tolist()
    run_step(rows, candidates, [False, False], [0.0, 0.0], [0.0, 0.0])
    rows.check(rows.tokens)
    assert rows.pool.free_list.ids().tolist() == free


def test_equal_thresholds_never_use_the_low_tier() -> None:
    count = 40
    rows = Rows([10] * count, [0] * count, lambda *_: None, extra=2 * count)
    candidates = [rows.candidate(float(rows.rng.uniform(0, 2) / n), n) for n in rows.length]
    threshold = [1.0 / n for n in rows.length]
    run_step(rows, candidates, [True] * count, threshold, threshold)
    assert not rows.low_count.any()
    given = zip(rows.tokens, candidates, rows.length, threshold, threshold)
    rows.check([algorithm_one(*each)[0] for each in given])


class Rewrite:
    """A random rewrite of random rows, and the tokens that should remain."""

    def __init__(self, seed: int, extra: int = 200, max_pages: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        count = 25
        high = rng.integers(0, 4 * LAYOUT.high.capacity, count).tolist()
        low = rng.integers(0, 4 * LAYOUT.low.capacity, count).tolist()
        self.rows = rows = Rows(high, low, lambda *_: None, extra, max_pages)
        self.expected: list[list[Token]] = []
        keep, demoted, new = ([], []), [], ([], [])
        for row in range(count):
            share = (0.0, 1.0, 0.6)[int(rng.integers(3))]
            after = []
            for token in rows.tokens[row]:
                stays = bool(rng.random() < share)
                sinks = token.tier == HIGH and not stays and bool(rng.random() < 0.5)
                keep[token.tier].append(stays)
                if token.tier == HIGH:
                    demoted.append(sinks)
                after += [token] * stays + [token.at(LOW)] * sinks
            for tier in (HIGH, LOW):
                for i in range(int(rng.integers(0, 30))):
                    token = Token(tier, rows.draw().numpy(), rows.draw().numpy(), float(i), 100_000 + 100 * tier + i)
                    new[tier].append((row, token))
                    after.append(token.at(tier))
            self.expected.append(after)
        self.keep = tuple(torch.tensor(part, dtype=torch.bool) for part in keep)
        self.demoted = torch.tensor(demoted, dtype=torch.bool)
        self.new = tuple(_new_tokens(part) for part in new)

    def pages_needed(self) -> int:
        """Returns the number of pages that the expected tokens need."""
        counts = [(sum(t.tier == tier for t in tokens), tier) for tokens in self.expected for tier in (HIGH, LOW)]
        return sum(-(-count // TIERS[tier].capacity) for count, tier in counts)

    def run(self) -> None:
        rows = self.rows
        stored = tuple(stored_tokens(rows.layer(), tier) for tier in (HIGH, LOW))
        rewrite_rows(ops_for_rows(rows.layer()), rows.layer(), stored, self.keep, self.demoted, self.new)


def _new_tokens(tokens: list[tuple[int, Token]]) -> NewTokens:
    key, value = np.array([(t.key, t.value) for _, t in tokens]).reshape(-1, 2, DIM).swapaxes(0, 1)
    return NewTokens.of(
        torch.tensor([row for row, _ in tokens], dtype=torch.int64),
        DenseTokens(torch.tensor(key, dtype=DTYPE), torch.tensor(value, dtype=DTYPE)),
        torch.tensor([t.score for _, t in tokens], dtype=torch.float32),
        torch.tensor([t.position for _, t in tokens], dtype=torch.int64),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(100)
def test_rewriting_closes_holes_and_keeps_pages_straight(seed: int) -> None:
    rewrite = Rewrite(seed)
    rewrite.run()
    rewrite.rows.check(rewrite.expected)


def test_rewriting_gives_back_what_is_no_longer_needed() -> None:
    rewrite = Rewrite(0, extra=0)
    rewrite.keep = tuple(torch.zeros_like(part) for part in rewrite.keep)
    rewrite.demoted = torch.zeros_like(rewrite.demoted)
    rewrite.new = (_new_tokens([]), _new_tokens([]))
    rewrite.run()
    pool: PagePool = rewrite.rows.pool
    rewrite.rows.check([[] for _ in rewrite.expected])
    assert pool.free_list.free == pool.capacity - 1
    assert not rewrite.rows.table.any()


def test_pages_given_back_serve_the_same_rewrite() -> None:
    """The pool is full: what some rows give up is exactly what others, or other tiers, take."""
    rewrite = Rewrite(3, extra=0)
    have = rewrite.rows.pool.capacity - 1
    need = rewrite.pages_needed()
    rewrite.run()
    rewrite.rows.check(rewrite.expected)
    assert rewrite.rows.pool.capacity == 1 + max(have, need)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.slow
def test_without_room_nothing_changes(missing: int) -> None:
    """It fails before writing if a single page is missing for the result, and works with all of them."""
    rewrite = Rewrite(2, extra=0)
    need = rewrite.pages_needed()
    assert need > rewrite.rows.pool.capacity - 1
    rewrite = Rewrite(2, extra=0, max_pages=1 + need - missing)
    rows = rewrite.rows
    if not missing:
        rewrite.run()
        rows.check(rewrite.expected)
        return
    before = [t.clone() for t in (rows.pool.pages[: rows.pool.capacity], rows.table, rows.high_count, rows.low_count)]
    state = rows.pool.capacity, rows.pool.free_list.state.tolist()
    with pytest.raises(MemoryError, match="more pages"):
        rewrite.run()
    assert state == (rows.pool.capacity, rows.pool.free_list.state.tolist())
    after = (rows.pool.pages[: rows.pool.capacity], rows.table, rows.high_count, rows.low_count)
    torch.testing.assert_close(list(after), before, rtol=0, atol=0)
    rows.check(rows.tokens)
