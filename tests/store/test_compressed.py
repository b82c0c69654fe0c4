"""The compressed cache, compared with the dense simulation step by step on ragged batches."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from dense_simulation import LayerSimulation, Rule
from given_stores import attend_prompt, attend_step, new_store
from simulated_storage import SimPrecision

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.heads.query_moments import QueryMoments
from hf_diffkv.native import library
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.compact import stored_tokens
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import HIGH, LOW
from hf_diffkv.pages.segments import segments
from hf_diffkv.store import begin_forward, check_integrity, read_tokens
from hf_diffkv.store.read import LayerTokens

LENGTHS = (1, 2, 63, 64, 65, 128, 192, 300)


class Pair:
    """One store with one layer and its simulation, given the same queries, keys and values."""

    tolerance = 1e-5
    # for attention outputs, if larger than `tolerance`
    output_tolerance = 1e-5
    score_tolerance = 1e-5
    # for keys and values
    token_tolerance = 1e-6

    def __init__(
        self,
        config: DiffKVConfig,
        batch: int,
        heads: int,
        group: int,
        dim: int,
        dtype=torch.float64,
        place: tuple[int, int] = (0, 1),
        rule: Rule | None = None,
        moments: QueryMoments | None = None,
    ) -> None:
        self.batch, self.heads, self.group, self.dim, self.dtype = batch, heads, group, dim, dtype
        # the layer's index in the model, and the model's layers
        index, layers = place
        self.store = new_store(
            config, 1, batch, heads, dim, dim, dtype, torch.device("cpu"), total_layers=layers, max_positions=4096
        )
        self.store.place_layer(0, index)
        self.store.moments = moments
        alpha_high = config.alpha_high[0] if isinstance(config.alpha_high, tuple) else config.alpha_high
        alpha_low = config.alpha_low[0] if isinstance(config.alpha_low, tuple) else config.alpha_low
        self.store.set_thresholds(0, alpha_high, alpha_low)
        if not config.selects and config.high == config.low:
            # only one precision exists
            alpha_high = alpha_low = 0.0
        self.simulation = LayerSimulation(
            batch,
            heads,
            dim,
            high=SimPrecision.of(self.store.high),
            low=SimPrecision.of(self.store.low),
            alpha_high=list(alpha_high) if isinstance(alpha_high, tuple) else alpha_high,
            alpha_low=list(alpha_low) if isinstance(alpha_low, tuple) else alpha_low,
            window=config.window,
            sinks=config.sinks,
            observation_window=self.store.observation_window or None,
            dtype=dtype,
            rotate=config.rotate,
            center=config.center,
            rule=rule,
            metadata_bits=config.metadata_bits,
            adaptive_rounding=config.adaptive_rounding,
            model_moment=None if moments is None else self.model_moment(index),
        )
        if config.metadata_bits == 16 and config.selects:
            self.simulation.round_sums = self.rounded_sums
        self.generator = torch.Generator().manual_seed(0)

    def model_moment(self, index: int) -> torch.Tensor:
        """A moment of R q whose factor the store rounds by."""
        factor = self.store.model_feedback.matrix[index].double().mT
        return factor @ factor.mT

    def draw(self, heads: int, tokens: int) -> torch.Tensor:
        shape = (self.batch, heads, tokens, self.dim)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def forward(self, tokens: int, valid: torch.Tensor | None = None, **options) -> None:
        self.begin(tokens, valid)
        self.attend(tokens, valid, **options)

    def begin(self, tokens: int, valid: torch.Tensor | None = None) -> None:
        begin_forward(self.store, tokens)
        self.store.padding.append(tokens, valid)

    def attend(self, tokens: int, valid: torch.Tensor | None = None, **options) -> None:
        query = 3 * self.draw(self.heads * self.group, tokens)
        key = self.draw(self.heads, tokens)
        value = self.draw(self.heads, tokens)
        scaling = self.dim**-0.5
        softmax = Softmax(scaling, options.get("softcap"), options.get("sinks"))
        if tokens == 1 and self.store.seen > 1:
            one = None if valid is None else valid[:, 0]
            output = attend_step(self.store, 0, query, key, value, softmax, one)
        else:
            output = attend_prompt(self.store, 0, query, key, value, softmax, valid, options.get("mask"))
        expected = self.simulation.forward(query, key, value, valid=valid, scaling=scaling, **options)
        # float32 rounding, or one step of the output's own dtype
        tolerance = max(self.tolerance, torch.finfo(self.dtype).eps)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=max(self.tolerance, self.output_tolerance))

    def rounded_sums(self, sums: torch.Tensor) -> torch.Tensor:
        """The simulation's sums as the store's pages hold them, rounded to one of the two nearest numbers."""
        rounded, index = sums.clone(), self.simulation._index
        for tier, layout in ((HIGH, self.store.layout.high), (LOW, self.store.layout.low)):
            tokens = stored_tokens(self.store.rows(0), tier)
            view = segments(self.store.pool.pages, layout)
            row = tokens.row // self.heads
            column = (index[row] == view.positions(tokens.page, tokens.slot)[:, None]).int().argmax(1)
            rounded[row, tokens.row % self.heads, column] = view.scores(tokens.page, tokens.slot)
        # the sums themselves add float32 numbers in another order
        assert ((rounded - sums).abs() <= sums * (2**-10 + 1e-5)).all()
        return rounded

    def compare_levels(self) -> None:
        assert torch.equal(read_tokens(self.store, 0).levels, self.simulation.levels())
        check_integrity(self.store)

    def compare(self) -> None:
        self.compare_levels()
        tokens = read_tokens(self.store, 0)
        keys, values, mask = self.simulation.stored()
        assert torch.equal(tokens.mask, mask)
        near = {"rtol": 1e-6, "atol": self.token_tolerance}
        torch.testing.assert_close(tokens.keys, keys.to(tokens.keys.dtype), **near)
        torch.testing.assert_close(tokens.values, values.to(tokens.values.dtype), **near)
        self.compare_sums(tokens)

    def compare_sums(self, tokens: LayerTokens) -> None:
        # a store that selects nothing keeps no sums
        sums = self.simulation.sums() * self.store.config.selects
        torch.testing.assert_close(tokens.score, sums, rtol=self.score_tolerance, atol=1e-6)

    def steps(self, count: int) -> None:
        """Runs `count` forwards of one token."""
        for _ in range(count):
            self.forward(1)

    def follow(self, *tokens: int, valid: torch.Tensor | None = None) -> None:
        """Runs forwards with these numbers of tokens and compares each; `valid` is for the first."""
        for count in tokens:
            self.forward(count, valid)
            self.compare()
            valid = None

    def assert_mixed(self, least: int, levels: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Checks that more than `least` tokens have each of these levels."""
        held = self.simulation.levels()
        counts = {level: int((held == level).sum()) for level in levels}
        assert min(counts.values()) > least, counts


def left_padding(lengths: tuple[int, ...]) -> torch.Tensor:
    longest = max(lengths)
    return torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]


def test_every_step_of_a_ragged_batch_equals_the_simulation() -> None:
    pair = Pair(DiffKVConfig(alpha_high=1.0, alpha_low=0.5), len(LENGTHS), heads=2, group=2, dim=16)
    pair.follow(max(LENGTHS), *[1] * 150, valid=left_padding(LENGTHS))
    pair.assert_mixed(100)


@pytest.mark.parametrize(
    "dtype, prompts, steps",
    [
        (torch.float32, "reference", "exact"),
        (torch.bfloat16, "reference", "exact"),
        (torch.bfloat16, "flash", "exact"),
        (torch.bfloat16, "reference", "digits"),
    ],
    ids=str,
)
def test_low_precision_models(dtype: torch.dtype, prompts: str, steps: str) -> None:
    pair = Pair(
        DiffKVConfig.paper(alpha_high=1.0, alpha_low=0.5, window=16, sinks=4), 3, heads=2, group=3, dim=32, dtype=dtype
    )
    if prompts == "flash":
        # it rounds probabilities to bfloat16: by 2**-9 of an average of values, none of which exceeds 5
        pair.output_tolerance = 5 * 2**-9
        # its exponential is an approximation
        pair.score_tolerance = 2e-4
    with use_backend("reference") if prompts == "reference" else nullcontext():
        pair.forward(100, left_padding((100, 40, 7)))
    pair.compare()
    pair.output_tolerance = Pair.output_tolerance
    if steps == "digits":
        # integer products use 14 bits for queries and weights; no value exceeds 5
        pair.output_tolerance = 5 * 2**-13
        pair.score_tolerance = 2**-11
    with nullcontext() if steps == "digits" or library.library() is None else library.use_instructions("portable"):
        pair.steps(40)
    pair.compare()


@pytest.mark.parametrize("observation_window", [1, 16, 1000])
def test_observation_window(observation_window: int) -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=8, observation_window=observation_window)
    pair = Pair(config, 3, heads=2, group=2, dim=16)
    pair.follow(80, valid=left_padding((80, 3, 30)))
    pair.follow(20, *[1] * 10, valid=torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) > 0.2)


@pytest.mark.parametrize(
    "high, low",
    [
        (Precision(8, 8), Precision(4, 4)),
        (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4)),
        (Precision(16, 16), Precision(8, 1)),
        (Precision(16, 8), Precision(2, 4, 4, 1)),
        (Precision(4, 8), Precision(1, 1, 2, 2)),
        (Precision(6, 4), Precision(5, 3)),
        (Precision(5, 6, 1, 2), Precision(3, 2, 4, 1)),
    ],
    ids=lambda precision: precision.name,
)
@pytest.mark.sampled(4)
def test_precisions_and_groups(high: Precision, low: Precision) -> None:
    pair = Pair(DiffKVConfig(high, low, alpha_high=1.1, alpha_low=0.6, window=4), 2, heads=2, group=2, dim=32)
    pair.follow(70, *[1] * 30, valid=left_padding((70, 33)))


@pytest.mark.parametrize(
    "high, low",
    [
        (Precision(8, 4), Precision(4, 2)),
        (Precision(6, 4), Precision(5, 3)),
        (Precision(4, 16, 2), Precision(1, 4, 2, 4)),
    ],
    ids=lambda precision: precision.name,
)
@pytest.mark.sampled(6)
def test_narrow_pages(high: Precision, low: Precision) -> None:
    """Runs a prompt, steps and further turns, whose gains are also rounded at random."""
    config = DiffKVConfig(high, low, alpha_high=1.0, alpha_low=0.5, window=8, metadata_bits=16)
    pair = Pair(config, 3, heads=2, group=2, dim=32)
    assert pair.store.layout.high.position_bytes == 2
    pair.follow(90, *[1] * 40, 20, *[1] * 20, valid=left_padding((90, 40, 7)))
    pair.assert_mixed(20, (0, 1, 2))


@pytest.mark.parametrize(
    "alpha_high, alpha_low",
    [(0.0, 0.0), (0.8, 0.8), (1e9, 0.0), (1e9, 1e9), (((0.5, 2.0),), ((0.1, 2.0),))],
)
def test_thresholds(alpha_high, alpha_low) -> None:
    pair = Pair(DiffKVConfig(alpha_high=alpha_high, alpha_low=alpha_low, window=4), 2, heads=2, group=2, dim=16)
    pair.follow(70, *[1] * 30, valid=left_padding((70, 33)))


def test_softcap_and_sinks() -> None:
    pair = Pair(DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=4), 2, heads=2, group=2, dim=16)
    options = {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)}
    pair.forward(50, left_padding((50, 20)), **options)
    for _ in range(10):
        pair.forward(1, **options)
    pair.forward(9, **options)
    pair.compare()


@pytest.mark.parametrize("high, low", [("K8V4", "K4V2"), ("K6V4", "K5V3")])
def test_page_boundaries(high: str, low: str) -> None:
    high, low = (Precision(int(name[1]), int(name[3])) for name in (high, low))
    config = DiffKVConfig(high, low, alpha_high=1.0, alpha_low=0.6, window=1)
    capacity = new_store(config, 1, 1, 1, 16, 16, torch.float32, torch.device("cpu")).layout.high.capacity
    lengths = tuple(capacity + extra for extra in (0, 1, 2)) + tuple(2 * capacity + extra for extra in (0, 1, 2))
    pair = Pair(config, len(lengths), heads=1, group=1, dim=16)
    pair.follow(max(lengths), *[1] * (capacity + 3), valid=left_padding(lengths))
