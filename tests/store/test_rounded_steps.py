"""Generated tokens rounded for a model's queries, against the dense simulation and known keys."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from given_stores import attend, begin, new_store, select_rows
from native_code import SETS
from simulated_storage import adapted_round_trip, round_trip
from test_adaptive_rounding import CASES, DirectedPair
from test_compressed import left_padding
from torch import Tensor

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.heads.query_moments import QueryMoments, moment_of
from hf_diffkv.native.library import use_instructions
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.rounding import ModelFeedback
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import fork_store, read_tokens, settle
from hf_diffkv.store.state import Store

# the best available instruction set, and the portable form
BACKENDS = ["reference", pytest.param("kernels", marks=pytest.mark.slow), *SETS[:1], *SETS[1:][-1:]]


def moments_of(layers: int, heads: int, dim: int) -> list[Tensor]:
    """Returns moments of queries with correlated channels, different in every layer and head."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(layers, heads, dim, dim, generator=generator, dtype=torch.float64)
    query = mixed * torch.logspace(0.5, -0.5, dim, dtype=torch.float64)
    return list(query @ query.mT / dim)


def query_moments(layers: int, heads: int) -> QueryMoments:
    return QueryMoments.of("llama", "0" * 16, "1" * 16, moments_of(layers, heads, 16))


def backend(name: str) -> AbstractContextManager:
    """The backend for steps; if kernels are to compact, which is slow in the interpreter, the reference runs the rest
    of a step."""
    return use_backend("reference") if name in ("reference", "kernels") else use_instructions(name)


def compact_by(name: str, store: Store) -> None:
    """Runs the compaction that is due, within `backend`."""
    if name == "kernels":
        pytest.importorskip("triton")
    with use_backend("kernels") if name == "kernels" else nullcontext():
        settle(store)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_the_simulation(case: str) -> None:
    """Runs a prompt, steps, a turn and more steps, on the second layer of three."""
    fields = {"window": 8, "sinks": 2, "adaptive_rounding": True}
    config, options = DiffKVConfig(**fields, **CASES[case]), {"place": (1, 3), "moments": query_moments(3, 2)}
    pair = DirectedPair(config, 2, heads=2, group=2, dim=16, **options)
    pair.follow(20, *[1] * 10, 9, *[1] * 4, valid=left_padding((20, 0)))


class Steps:
    """A store of layers that receive keys one at a time, without a prompt."""

    batch, heads, dim = 2, 2, 16

    def __init__(self, config: DiffKVConfig, moments: QueryMoments | None, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.dtype = dtype
        heads = (self.heads, self.dim, self.dim, dtype, torch.device("cpu"))
        self.store = new_store(config, 2, self.batch, *heads, total_layers=3)
        for layer, index in enumerate((2, 0)):
            self.store.place_layer(layer, index)
            self.store.set_thresholds(layer, config.alpha_high, config.alpha_low)
        self.store.moments = moments
        self.keys: list[list[Tensor]] = [[], []]

    def draw(self, heads: int) -> Tensor:
        shape = (self.batch, heads, 1, self.dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def feed(self, tokens: int, name: str = "reference") -> None:
        for _ in range(tokens):
            begin(self.store, 1)
            for layer in range(2):
                states = [self.draw(heads) for heads in (4, self.heads, self.heads)]
                self.keys[layer].append(states[1])
                attend(self.store, layer, states, Softmax(1.0))
            compact_by(name, self.store)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [batch, heads, tokens, dim] as received and as held, for tokens that left the window."""
        count = len(self.keys[0]) - self.store.config.window
        held = read_tokens(self.store, layer).keys[:, :, :count]
        return torch.cat(self.keys[layer], dim=2)[:, :, :count].float(), held.float()


PLAIN = {"window": 4, "sinks": 0, "rotate": False, "center": False, "adaptive_rounding": True}
K4V3, K5V4, K3V3 = Precision(4, 3), Precision(5, 4), Precision(3, 3, 2, 1)
# by head, the precision of all its tokens
STORES = {
    "one tier": ({"high": K4V3, "low": K4V3, "alpha_high": 0.0, "metadata_bits": 16}, (K4V3, K4V3)),
    "two tiers": ({"high": K5V4, "low": K3V3, "alpha_high": (0.0, math.inf), "metadata_bits": 32}, (K5V4, K3V3)),
    "one of them exact": ({"high": Precision(8, 4), "low": K3V3, "alpha_high": (0.0, math.inf)}, (None, K3V3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", STORES)
def test_every_backend_rounds_each_head_by_its_own_factor(case: str, name: str, dtype: torch.dtype) -> None:
    fields, precisions = STORES[case]
    moments = query_moments(3, 2)
    feedback = moments.feedback(2, 16, False, torch.device("cpu")).double()
    steps = Steps(DiffKVConfig(**PLAIN, **fields), moments, dtype)
    with backend(name):
        steps.feed(12, name)
    narrow = fields.get("metadata_bits") == 16
    for layer, index in enumerate((2, 0)):
        given, held = steps.stored(layer)
        for head, precision in enumerate(precisions):
            key, found = given[:, head].flatten(0, 1), held[:, head].flatten(0, 1)
            if precision is None:
                torch.testing.assert_close(found, round_trip(key, 8, 1, dtype), rtol=1e-6, atol=1e-6)
                continue
            factor = feedback[index, head].mT
            format_of = (precision.k_bits, precision.k_groups, narrow)
            expected = adapted_round_trip(key, factor @ factor.mT, *format_of, damping=0.0)
            near = torch.isclose(found, expected, rtol=1e-5, atol=1e-5).all(-1)
            # float32 may decide differently close to a tie
            assert near.float().mean() > 0.9, (layer, head, near)
            plain = round_trip(key, *format_of[:2], dtype, narrow)
            assert (expected != plain).any(-1).float().mean() > 0.5


@pytest.mark.parametrize("name", BACKENDS)
def test_victims_are_rounded_again_when_they_fall(name: str) -> None:
    """Two levels in float32; the store matches the simulation except close to ties."""
    fields = {"window": 6, "sinks": 0, "adaptive_rounding": True, "alpha_high": 1.0, "alpha_low": 0.3}
    config = DiffKVConfig(K5V4, Precision(3, 2), **fields)
    pair = DirectedPair(config, 2, heads=2, group=2, dim=16, dtype=torch.float32, moments=query_moments(1, 2))
    pair.tolerance = 0.05
    with use_backend("reference"):
        pair.forward(30)
    with backend(name):
        for _ in range(12):
            pair.forward(1)
            compact_by(name, pair.store)
    pair.compare_levels()
    held = read_tokens(pair.store, 0).keys
    same = torch.isclose(held, pair.simulation.stored()[0].float(), rtol=1e-4, atol=1e-4).all(-1)
    assert same.float().mean() > 0.93
    pair.assert_mixed(3, (1, 2))


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_changes_without_moments_or_without_the_option(name: str) -> None:
    fields = STORES["two tiers"][0]

    def keys(moments: QueryMoments | None, **more: bool) -> list[Tensor]:
        steps = Steps(DiffKVConfig(**{**PLAIN, **fields, **more}), moments)
        with backend(name):
            steps.feed(8, name)
        return [steps.stored(layer)[1] for layer in range(2)]

    moments = query_moments(3, 2)
    plain = keys(None, adaptive_rounding=False)
    for same in (keys(None), keys(moments, adaptive_rounding=False)):
        assert all(map(torch.equal, plain, same))
    assert not any(map(torch.equal, plain, keys(moments)))


def rounded_keys(store: Store) -> Tensor:
    return torch.stack([read_tokens(store, layer).keys for layer in range(2)])


def test_forks_and_moved_rows_go_on_alike() -> None:
    """Checks that rows, forks and their copies find the model's moments, which are not part of their rows."""
    steps = Steps(DiffKVConfig(**PLAIN, **STORES["two tiers"][0]), query_moments(3, 2))
    steps.feed(12)
    twin = fork_store(steps.store)
    before = steps.store.bytes_outside_pool()
    steps.store.moments = None
    assert steps.store.bytes_outside_pool() == before
    steps.store.moments = twin.moments
    select_rows(steps.store, torch.tensor([1, 1]))
    state = steps.generator.get_state()
    steps.feed(8)
    moved = rounded_keys(steps.store)
    steps.generator.set_state(state)
    steps.store = twin
    steps.feed(8)
    torch.testing.assert_close(moved[:, 1], rounded_keys(twin)[:, 1])
    # the request was the same before, but the tokens since then are another's
    assert torch.equal(moved[:, 0, :, :8], moved[:, 1, :, :8])


def test_a_rank_takes_the_factors_of_its_heads() -> None:
    moments = query_moments(2, 4)
    fields = {"high": K4V3, "low": K4V3, "alpha_high": 0.0, "adaptive_rounding": True}
    store = new_store(DiffKVConfig(**fields), 2, 3, 2, 16, 16, torch.float32, torch.device("cpu"), first_head=2)
    store.moments = moments
    feedback = store.model_feedback
    assert feedback.of_rows(12).tolist() == [2, 3] * 3 + [6, 7] * 3
    assert feedback.matrix.data_ptr() == moments.feedback(4, 16, True, torch.device("cpu")).data_ptr()


def test_the_file_gives_the_moments_back(tmp_path: Path) -> None:
    exact = moments_of(2, 3, 16)
    # one direction that nearly all queries share
    exact[0][0] += 500 * torch.ones(16, 16)
    moments = QueryMoments.of("llama", "00ff", "11", exact)
    moments.save(tmp_path / "moments.safetensors")
    loaded = QueryMoments.load(tmp_path / "moments.safetensors")
    assert loaded is QueryMoments.load(tmp_path / "moments.safetensors")
    assert (loaded.model_type, loaded.model_digest, loaded.documents_digest) == ("llama", "00ff", "11")
    assert loaded.shapes == ((3, 16), (3, 16))
    assert (tmp_path / "moments.safetensors").stat().st_size < 2 * 3 * 136 * 2 + 500
    for triangle, moment in zip(loaded.triangles, exact):
        scale = moment.diagonal(dim1=1, dim2=2).sqrt()
        near = (moment_of(triangle) - moment) / scale[:, :, None] / scale[:, None]
        assert near.abs().max() < 2**-7


def test_the_factor_is_that_of_the_damped_moment() -> None:
    """Solves again, channel by channel, for what the later channels contribute."""
    (moment,) = moments_of(1, 1, 12)
    found = QueryMoments.of("llama", "00ff", "11", [moment]).feedback(1, 12, False, torch.device("cpu"))[0, 0].double()
    damped = moment[0] + 0.1 * moment[0].diagonal().mean() * torch.eye(12, dtype=torch.float64)
    for channel in range(12):
        free = slice(0, channel + 1)
        expected = torch.linalg.solve(damped[free, free], damped[free, channel + 1 :])[channel]
        torch.testing.assert_close(found[channel, channel + 1 :], expected, rtol=2**-6, atol=2**-6)
    assert torch.equal(found.tril(), torch.eye(12, dtype=torch.float64))


def test_heads_without_queries_are_rounded_to_the_nearest() -> None:
    moments = QueryMoments.of("llama", "00ff", "11", [torch.zeros(2, 8, 8)])
    assert torch.equal(moments.feedback(2, 8, False, torch.device("cpu")).float(), torch.eye(8).expand(1, 2, 8, 8))


def test_layers_of_several_shapes() -> None:
    moments = QueryMoments.of("gemma4_text", "00ff", "11", [moments_of(1, 2, 8)[0], moments_of(1, 1, 16)[0]])
    wide = moments.feedback(1, 16, False, torch.device("cpu"))
    assert wide.shape == (2, 1, 16, 16) and torch.equal(wide[0, 0].float(), torch.eye(16))
    assert not torch.equal(wide[1, 0].float(), torch.eye(16))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    moments = query_moments(2, 3)
    with pytest.raises(ValueError, match="are for 2 layers, but 5 layers of this model are compressed; measure"):
        moments.check_layers(5)
    with pytest.raises(ValueError, match="are for 3 KV heads of 16 in layer 1, but that layer has 3 of 32"):
        moments.check_layer(1, 3, 32)
    with pytest.raises(ValueError, match="matrix must be contiguous bfloat16"):
        ModelFeedback(torch.zeros(1, 2, 8, 8), torch.zeros(1), torch.zeros(2))
    for triangles in ((), (torch.zeros(2, 7).bfloat16(),), (torch.full((2, 6), math.nan).bfloat16(),)):
        with pytest.raises(ValueError, match="there are no layers|must be finite bfloat16"):
            QueryMoments("llama", "00ff", "11", triangles)
    path = tmp_path / "moments.safetensors"
    path.write_text("{}")
    with pytest.raises(ValueError, match="moments.safetensors does not hold the moments of a model's queries"):
        QueryMoments.load(path)
