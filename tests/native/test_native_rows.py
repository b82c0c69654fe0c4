"""Many random rows a call: pages written, read, attended to, appended to and compacted by native code.

A seed draws the shape of pages, precisions, groups, dtype and instruction set, and `ROWS` rows with numbers of tokens,
windows, sinks and padding of their own; DIFFKV_FUZZ_SEEDS says how many seeds. What is written must be the reference's
byte for byte; outputs and scores are compared with a softmax in float64 over what pages and windows hold.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from native_code import SETS, needs_native
from test_compact_kernel import State, run_reference
from torch import Tensor

from hf_diffkv.native.library import use_instructions
from hf_diffkv.ops.append import native as append_native
from hf_diffkv.ops.append import reference as append_reference
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.compact import native as compact_native
from hf_diffkv.ops.decode_attention import native as attention_native
from hf_diffkv.ops.quantize import native as quantize_native
from hf_diffkv.ops.quantize import reference as quantize_reference
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import HIGH, LayerRows, PageLayout, TierLayout
from hf_diffkv.pages.segments import Contents, segments
from hf_diffkv.precision import SUPPORTED_BITS, Precision
from tools.kernels.rows import given_rows

pytestmark = needs_native
ROWS = 256
SEEDS = int(os.environ.get("DIFFKV_FUZZ_SEEDS", "6"))
# of what is summed up, magnitude by magnitude: where values cancel, the output is smaller than its terms
OUTPUT = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2e-3}
# of an element of the output that is too small to be a normal number
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2**-25}
# of a probability, beside its share of OUTPUT; narrow sums have 10 bits of mantissa
SCORE = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}
NARROW_SCORE = 2**-9
APPENDED = ("window_key", "window_value", "window_score", "length")


@dataclass
class Stored:
    """Tokens of one tier: where they stand, row after row, and what was written."""

    tier: TierLayout
    row: Tensor
    page: Tensor
    slot: Tensor


class Rows:
    """`ROWS` rows of random length at random places, written by native code and by the reference."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.choose(*OUTPUT)
        self.instructions = self.choose(*SETS)
        self.threads = self.choose(1, 1, 3)
        self.dims = self.choose(8, 16, 24, 40, 64, 64, 80, 96, 128, 128), self.choose(8, 16, 40, 64, 64, 96, 128, 128)
        numbers = self.choose((32, 4), (32, 0), (16, 4), (16, 2), (16, 0))
        self.layout = PageLayout.build(
            *(self.precision(), self.precision()),
            *self.dims,
            self.dtype.itemsize,
            metadata_bits=numbers[0],
            position_bytes=numbers[1],
        )
        self.heads, self.group = self.choose(1, 2, 4), self.choose(1, 2, 3, 4, 5, 7, 8)
        self.batch = ROWS // self.heads
        tiers = (self.layout.high, self.layout.low)
        counts = [self.counts(tier.capacity) for tier in tiers]
        pages = [-(-count // tier.capacity) for count, tier in zip(counts, tiers)]
        width, total = int((pages[0] + pages[1]).max()) + 1, int((pages[0] + pages[1]).sum())
        ids = self.random.permutation(total) + 1
        table = np.zeros((ROWS, width), dtype=np.int32)
        for row in range(ROWS):
            here, ids = ids[: pages[0][row] + pages[1][row]], ids[pages[0][row] + pages[1][row] :]
            table[row, : pages[0][row]] = here[: pages[0][row]]
            table[row, width - pages[1][row] :] = here[pages[0][row] :]
        self.table = torch.from_numpy(table)
        self.count = [torch.from_numpy(count.astype(np.int32)) for count in counts]
        self.pages = torch.full((total + 1, self.layout.page_bytes), 0xFF, dtype=torch.uint8)
        self.stored = [self.places(tier, counts[index], index) for index, tier in enumerate(tiers)]
        self.fill_windows(counts[0] + counts[1])

    def choose(self, *options: Any) -> Any:
        return options[self.random.integers(len(options))]

    def precision(self) -> Precision:
        bits = (int(self.choose(*SUPPORTED_BITS)) for _ in range(2))
        return Precision(*bits, self.choose(1, 1, 2, 4), self.choose(1, 1, 2, 4))

    def counts(self, capacity: int) -> np.ndarray:
        """None, few, as many as fill pages, one more or one less."""
        few = self.random.integers(0, 12, ROWS)
        full = self.random.integers(0, 3, ROWS) * capacity + self.random.integers(-1, 2, ROWS)
        return np.where(self.random.random(ROWS) < 0.5, few, full.clip(0))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def places(self, tier: TierLayout, counts: np.ndarray, index: int) -> Stored:
        row = np.repeat(np.arange(ROWS), counts)
        token = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
        number = token // tier.capacity
        column = number if index == HIGH else self.table.shape[1] - 1 - number
        page = self.table[torch.from_numpy(row), torch.from_numpy(column)].long()
        return Stored(tier, torch.from_numpy(row), page, torch.from_numpy(token % tier.capacity))

    def fill_windows(self, stored: np.ndarray) -> None:
        self.sink_slots = self.choose(0, 0, 1, 4)
        slots = self.sink_slots + self.choose(1, 2, 5, 9)
        ring = slots - self.sink_slots
        self.sink_end = torch.from_numpy(self.random.integers(0, self.sink_slots + 1, self.batch))
        most = torch.from_numpy(stored.reshape(self.batch, self.heads).max(1))
        self.start = self.sink_end + most + torch.from_numpy(self.random.integers(0, 9, self.batch))
        self.length = self.start + torch.from_numpy(self.random.integers(1, ring + 1, self.batch))
        shape = (self.batch, self.heads, slots)
        self.window_key, self.window_value = (self.normal(*shape, dim).to(self.dtype) for dim in self.dims)
        self.window_score = torch.rand(shape, generator=self.generator)
        self.shown = torch.zeros(self.batch, slots, dtype=torch.bool)
        for request in range(self.batch):
            self.shown[request, : int(self.sink_end[request])] = True
            for token in range(int(self.start[request]), int(self.length[request])):
                self.shown[request, self.sink_slots + token % ring] = True
        hidden = ~self.shown[:, None].expand(shape)
        self.window_key[hidden], self.window_value[hidden] = torch.nan, torch.nan
        newest = self.sink_slots + (self.length - 1) % ring
        self.newest = torch.zeros(self.batch, slots, dtype=torch.bool).scatter(1, newest[:, None], True)

    def write(self) -> None:
        """Random tokens, byte for byte as the reference writes them."""
        expected = self.pages.clone()
        for stored in self.stored:
            tokens = len(stored.row)
            key, value = (self.normal(tokens, dim).to(self.dtype) for dim in self.dims)
            score = torch.rand(tokens, generator=self.generator)
            position = torch.randint(0, 5000, (tokens,), generator=self.generator)
            what = (stored.page, stored.slot, Contents(key, value, score, position), self.dtype)
            quantize_native.store_tokens(self.pages, stored.tier, *what)
            with use_backend("reference"):
                quantize_reference.store_tokens(expected, stored.tier, *what)
        assert torch.equal(self.pages, expected)

    def layer(self, **given: Tensor) -> LayerRows:
        """Returns the rows as ops take them, with `given` in place of some tensors."""
        shape = (self.batch, self.heads)
        held = {"pages": self.pages, "page_table": self.table.view(*shape, -1), "window_score": self.window_score}
        held |= {"high_count": self.count[0].view(shape), "low_count": self.count[1].view(shape)}
        held |= {"window_start": self.start, "length": self.length, "sink_end": self.sink_end}
        held |= {"window_key": self.window_key, "window_value": self.window_value, **given}
        return given_rows(self.layout, sink_slots=self.sink_slots, **held)

    def held(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Keys and values float64 [rows, tokens, dim] and the mask of tokens; columns of the stored ones."""
        slots = self.shown.shape[1]
        width = int((self.count[0] + self.count[1]).max()) + slots
        keys, values = (torch.zeros(ROWS, width, dim, dtype=torch.float64) for dim in self.dims)
        mask = torch.zeros(ROWS, width, dtype=torch.bool)
        mask[:, :slots] = self.shown.repeat_interleave(self.heads, 0)
        for all_of, window in ((keys, self.window_key), (values, self.window_value)):
            rows = window.reshape(ROWS, slots, -1).double()
            all_of[:, :slots] = torch.where(mask[:, :slots, None], rows, 0.0)
        columns, before = [], torch.full((ROWS,), slots)
        for stored, count in zip(self.stored, self.count):
            first = (count.cumsum(0) - count).long()
            column = before[stored.row] + torch.arange(len(stored.row)) - first[stored.row]
            read = quantize_reference.load_tokens(self.pages, stored.tier, stored.page, stored.slot, self.dtype)
            for all_of, part in zip((keys, values), read):
                all_of[stored.row, column] = part.double()
            mask[stored.row, column] = True
            columns.append(column)
            before = before + count
        return keys, values, mask, columns


def scores_of(rows: Rows) -> list[Tensor]:
    return [segments(rows.pages, each.tier).scores(each.page, each.slot).double() for each in rows.stored]


def check_attention(rows: Rows) -> None:
    keys, values, mask, columns = rows.held()
    softcap, sinks = rows.choose(None, None, 5.0), rows.choose(None, rows.normal(rows.heads * rows.group))
    valid = rows.choose(None, torch.rand(rows.batch, generator=rows.generator) < 0.8)
    query = (3 * rows.normal(rows.batch, rows.heads * rows.group, rows.dims[0])).to(rows.dtype)
    scaling = rows.dims[0] ** -0.5
    before, window_before = scores_of(rows), rows.window_score.clone()
    output = attention_native.decode_attention(query, rows.layer(), Softmax(scaling, softcap, sinks), valid=valid)
    logits = query.double().view(ROWS, rows.group, -1) @ keys.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        more = sinks.double().view(1, rows.heads, rows.group).expand(rows.batch, -1, -1).reshape(ROWS, rows.group, 1)
        logits = torch.cat([logits, more], -1)
    weights = logits.softmax(-1)[..., : mask.shape[1]]
    if valid is not None:
        weights = weights * valid.repeat_interleave(rows.heads)[:, None, None]
    expected = weights @ values
    error = (output.double().view_as(expected) - expected).norm(dim=-1)
    smallest = SMALLEST[rows.dtype] * rows.dims[1] ** 0.5
    assert (error <= OUTPUT[rows.dtype] * (weights @ values.abs()).norm(dim=-1) + smallest).all()
    received = weights.amax(1)
    slots = rows.shown.shape[1]
    if not rows.layout.selects:
        assert torch.equal(rows.window_score, window_before)
        return
    accuracy = SCORE[rows.dtype] + OUTPUT[rows.dtype] * received
    gained = received[:, :slots].masked_fill(rows.newest.repeat_interleave(rows.heads, 0), 0.0)
    got = (rows.window_score - window_before).view(ROWS, slots)
    assert ((got - gained).abs() <= accuracy[:, :slots])[mask[:, :slots]].all()
    narrow = NARROW_SCORE if rows.layout.high.score_bytes == 2 else 2e-7
    for stored, column, old, new in zip(rows.stored, columns, before, scores_of(rows)):
        total = old + received[stored.row, column]
        assert ((new - total).abs() <= accuracy[stored.row, column] + narrow * total).all()


def check_append(rows: Rows) -> None:
    key, value = (rows.normal(rows.batch, rows.heads, dim).to(rows.dtype) for dim in rows.dims)
    valid = rows.choose(None, torch.rand(rows.batch, generator=rows.generator) < 0.8)
    mine, theirs = ({name: getattr(rows, name).clone() for name in APPENDED} for _ in range(2))
    for op, tensors in ((append_native, mine), (append_reference, theirs)):
        op.append_token(rows.layer(**tensors), key, value, limit=1e4, valid=valid)
    for name in APPENDED:
        assert torch.equal(mine[name].nan_to_num(-7.0), theirs[name].nan_to_num(-7.0)), name


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_rows_are_written_read_and_attended_to(seed: int) -> None:
    rows = Rows(seed)
    torch.set_num_threads(rows.threads)
    try:
        with use_instructions(rows.instructions):
            rows.write()
            check_attention(rows)
            check_append(rows)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_rows_are_compacted(seed: int) -> None:
    random = np.random.default_rng(seed)
    bits, dims = random.choice(SUPPORTED_BITS, 4).tolist(), random.choice([8, 16, 40, 64], 2).tolist()
    numbers = [(32, 4), (16, 4), (16, 2)][random.integers(3)]
    layout = PageLayout.build(
        Precision(*bits[:2]), Precision(*bits[2:]), *dims, 2, 2048, metadata_bits=numbers[0], position_bytes=numbers[1]
    )
    high, low = sorted(random.uniform(0, 2, 2), reverse=True)
    state = State(layout, *random.integers(0, 40, (2, ROWS // 4)).tolist(), seed=seed, spare=200)
    expected = state.clone()
    with use_instructions(SETS[random.integers(len(SETS))]):
        for _ in range(4):
            candidates, limits = state.candidates(), state.thresholds(high=float(high), low=float(low))
            flag = torch.zeros(1, dtype=torch.int32)
            state.compact(compact_native, candidates, limits, flag=flag)
            with use_backend("reference"):
                run_reference(expected, candidates, limits)
            assert not flag
            for name in ("high_count", "low_count", "table"):
                assert torch.equal(getattr(state, name), getattr(expected, name)), name
            assert torch.equal(state.free_list.ring, expected.free_list.ring)
            assert torch.equal(state.pages[1:], expected.pages[1:])
