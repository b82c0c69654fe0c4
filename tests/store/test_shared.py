"""A layer that later layers also read, against the dense simulation: their query heads count as one group."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_compressed import Pair, left_padding
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import (
    PromptAttention,
    RecordedAttention,
    StepAttention,
    begin_forward,
    commit_together,
    read_tokens,
    settle,
)

LENGTHS = (90, 33, 1, 64)
CONFIG = DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=8)
OPTIONS = {"scaling": 0.25}


@dataclass
class Drawn:
    """New tokens, and a query for each of the layers that attend to them."""

    queries: list[Tensor]
    key: Tensor
    value: Tensor
    valid: Tensor | None

    def part(self, start: int, stop: int) -> Drawn:
        """The tokens [start, stop)."""
        parts = [tensor[:, :, start:stop] for tensor in (*self.queries, self.key, self.value)]
        return Drawn(parts[:-2], *parts[-2:], None if self.valid is None else self.valid[:, start:stop])

    def newest(self, count: int, tokens: int) -> list[Tensor]:
        """The first layer's whole query, and the others' for the newest `count` of the last `tokens` tokens."""
        first, *others = self.queries
        return [first, *(query[:, :, query.shape[2] - min(count, tokens) :] for query in others)]


class SharedPair(Pair):
    """A store with one layer, which `readers` further layers read, and its simulation."""

    readers = 2

    def __init__(
        self, config: DiffKVConfig, batch: int = len(LENGTHS), dtype: torch.dtype = torch.float64, dim: int = 16
    ) -> None:
        super().__init__(config, batch, heads=2, group=2, dim=dim, dtype=dtype)

    def draw_all(self, tokens: int, valid: Tensor | None = None) -> Drawn:
        queries = [3 * self.draw(self.heads * self.group, tokens) for _ in range(1 + self.readers)]
        return Drawn(queries, self.draw(self.heads, tokens), self.draw(self.heads, tokens), valid)

    def forward(self, tokens: int, valid: Tensor | None = None, newest: int = 1000, mask: Tensor | None = None) -> None:
        """Runs a forward in which readers have the queries of the `newest` tokens."""
        new = self.draw_all(tokens, valid)
        self.attend(new, new.newest(newest, tokens), mask)
        self.simulate(new, new.newest(newest, tokens))

    def forward_recorded(self, tokens: int, rejected: int) -> None:
        """Runs a forward while the store records; the last `rejected` tokens are taken back."""
        new = self.draw_all(tokens)
        self.attend(new, new.queries)
        commit_together([self.store], rejected, lambda store: None)
        if rejected < tokens:
            kept = new.part(0, tokens - rejected)
            self.simulate(kept, kept.queries, outputs=False)

    def attend(self, new: Drawn, queries: list[Tensor], mask: Tensor | None = None) -> None:
        store, tokens = self.store, new.key.shape[2]
        first = store.seen == 0
        begin_forward(store, tokens)
        store.padding.append(tokens, new.valid)
        inputs = (store, 0, new.key, new.value)
        if store.recording:
            shared = RecordedAttention(*inputs, new.valid, mask, self.readers)
        elif tokens == 1 and not first:
            shared = StepAttention(*inputs, None if new.valid is None else new.valid[:, 0])
        else:
            shared = PromptAttention(*inputs, new.valid, mask)
        self.outputs = [shared.attend(query, Softmax(**OPTIONS), query is queries[-1]) for query in queries]

    def simulate(self, new: Drawn, queries: list[Tensor], outputs: bool = True) -> None:
        self.simulation.begin(new.key, new.value, new.valid)
        expected = [self.simulation.read(query, **OPTIONS) for query in queries]
        self.simulation.finish()
        if outputs:
            torch.testing.assert_close(self.outputs, expected, rtol=self.tolerance, atol=self.tolerance)


@pytest.mark.parametrize("newest", [1, 5, 1000])
@pytest.mark.parametrize("observed", [None, 3, 24])
@pytest.mark.sampled(6)
def test_prompt_steps_and_turns(newest: int, observed: int | None) -> None:
    pair = SharedPair(DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=8, observation_window=observed))
    pair.forward(90, left_padding(LENGTHS), newest)
    pair.compare()
    pair.follow(*[1] * 20)
    pair.follow(1, valid=torch.tensor([[True], [False], [True], [False]]))
    turn = torch.tensor([[True] * 12, [False] * 12, [True] * 3 + [False] * 9, [False] * 5 + [True] * 7])
    pair.forward(12, turn, newest)
    pair.compare()
    pair.forward(7, None, newest)
    pair.follow(*[1] * 9)
    pair.assert_mixed(30)


@pytest.mark.parametrize("newest", [4, 1000])
def test_tokens_taken_back(newest: int) -> None:
    """Between two crops is one forward of the remaining tokens, whose newest queries the readers had."""
    pair = SharedPair(DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=8))
    pair.forward(90, left_padding(LENGTHS))
    settle(pair.store)
    pair.store.recording = True
    # the last: more tokens rejected than readers had queries for
    for forwards, rejected in (((6,), 2), ((4,), 3), ((1,), 0), ((5, 3), 1), ((1, 1, 1), 2), ((3, 6), 1), ((9,), 5)):
        drawn = pair.draw_all(sum(forwards))
        start = 0
        for tokens in forwards:
            part = drawn.part(start, start + tokens)
            pair.attend(part, part.newest(newest, tokens))
            start += tokens
        commit_together([pair.store], rejected, lambda store: None)
        kept = drawn.part(0, start - rejected)
        # readers' queries count from their last gap
        there = 0
        for tokens in forwards:
            there = there + tokens if tokens <= newest else newest
        queries = kept.newest(max(there - rejected, 0), start - rejected)
        pair.simulate(kept, [query for query in queries if query.shape[2]], outputs=False)
        pair.compare()


def test_many_recorded_tokens_are_stored_before_the_crop() -> None:
    pair = SharedPair(CONFIG)
    pair.forward(90, left_padding(LENGTHS))
    pair.store.recording = True
    new = pair.draw_all(530)
    pair.attend(new, new.queries)
    surplus, rest = new.part(0, 274), new.part(274, 523)
    pair.simulate(surplus, surplus.queries, outputs=False)
    commit_together([pair.store], 7, lambda store: None)
    pair.simulate(rest, rest.queries, outputs=False)
    pair.compare()


def test_the_newest_queries_under_a_mask() -> None:
    """Tokens that the newest one does not see receive nothing from it."""
    pair = SharedPair(DiffKVConfig(alpha_high=0.0, alpha_low=0.0, window=8))
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    mask[..., 10:, :10] = False
    new = pair.draw_all(20)
    pair.attend(new, new.newest(3, 20), mask.expand(pair.batch, -1, -1, -1))
    alone = SharedPair(DiffKVConfig(alpha_high=0.0, alpha_low=0.0, window=8))
    second = new.part(10, 20)
    alone.attend(second, second.newest(3, 10))
    torch.testing.assert_close(pair.outputs[0][:, :, 10:], alone.outputs[0])
    torch.testing.assert_close(pair.outputs[1:], alone.outputs[1:])


@pytest.mark.slow
def test_kernels() -> None:
    """The Triton kernels of a generated token, in their interpreter."""
    pytest.importorskip("triton")
    pair = SharedPair(CONFIG, batch=2, dtype=torch.float32, dim=32)
    pair.tolerance = 2e-3
    pair.forward(60, left_padding((60, 20)))
    with use_backend("kernels"):
        for valid in (None, torch.tensor([[True], [False]]), None):
            pair.forward(1, valid)
        pair.compare_levels()
    torch.testing.assert_close(read_tokens(pair.store, 0).score, pair.simulation.sums(), rtol=2e-3, atol=1e-4)
    pair.assert_mixed(5)
