"""Rotated and centred keys and values, against the dense simulation, which attends in the model's channels."""

from __future__ import annotations

import pytest
import torch
from chosen_ops import rotate
from given_stores import attend, begin, new_store, select_rows
from simulated_storage import rotation
from test_compressed import LENGTHS, Pair, left_padding
from test_shared import SharedPair
from torch import Tensor

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.native import library
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.rotation import FLOAT_ELEMENTS, rotation_matrix
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import fork_store, hide_tokens, read_tokens, settle
from hf_diffkv.store.forks import make_private

BOTH = {"rotate": True, "center": True}
NEITHER = {"rotate": False, "center": False}
EACH = [{**NEITHER, "rotate": True}, {**NEITHER, "center": True}, BOTH]
MIXED = {"alpha_high": 1.0, "alpha_low": 0.5}


def ids(value: object) -> str | None:
    return "+".join(name for name, given in value.items() if given is not False) if isinstance(value, dict) else None


class RotatedPair(Pair):
    """Keys have a mean far from zero, and a few channels are larger than the others."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.dtype != torch.float64:
            # sums of `dim` numbers, back in the model's channels
            self.token_tolerance = 5e-6

    def draw(self, heads: int, tokens: int) -> Tensor:
        drawn = super().draw(heads, tokens).double()
        if heads == self.heads:
            drawn = drawn + 2 * torch.sin(torch.arange(self.dim, dtype=torch.float64))
            drawn[..., 3] *= 4
        if self.dtype != torch.float64:
            # multiples of 1/16, so that rotating them by powers of two is exact in any order of summation
            drawn = (drawn * 16).round() / 16
        return drawn.to(self.dtype)

    def compare(self) -> None:
        super().compare()
        if self.store.config.center:
            assert_offsets(self)


def noted_draws(pair: Pair) -> list[Tensor]:
    """Records queries, keys and values in turn: everything that the pair is given from now on."""
    drawn, draw = [], pair.draw
    pair.draw = lambda heads, tokens: drawn.append(draw(heads, tokens)) or drawn[-1]
    return drawn


def held_offset(pair: Pair) -> Tensor:
    return pair.store.key_offset[0].double().clone()


def assert_offsets(pair: Pair) -> None:
    torch.testing.assert_close(held_offset(pair), pair.simulation._offset, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80, 96, 128])
def test_the_matrix_is_the_one_that_is_documented(dim: int) -> None:
    matrix = rotation_matrix(dim, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix, rotation(dim).T, rtol=0, atol=1e-15)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-14)


def test_the_matrix_is_what_it_was() -> None:
    """Saved caches depend on it, so these signs must never change."""
    matrix = rotation_matrix(16, torch.float32, torch.device("cpu"))
    assert (matrix[:, 0] * 4).tolist() == SIGNS
    assert (matrix[0] * 4).tolist() == [SIGNS[0]] * 16
    assert (matrix[1] * 4).tolist() == [SIGNS[1], -SIGNS[1]] * 8


SIGNS = [-1, 1, 1, -1, 1, 1, 1, -1, 1, -1, 1, 1, 1, -1, -1, 1]


def test_large_tensors_go_in_parts() -> None:
    x = torch.randn(1, 1, FLOAT_ELEMENTS // 8 + 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix, offset = rotation_matrix(8, torch.float32, x.device), torch.full((1, 1, 8), 0.5)
    expected = (x.double() @ rotation(8).T - 0.5).float()
    torch.testing.assert_close(rotate(x, matrix, offset).float(), expected, rtol=2**-8, atol=1e-6)
    assert rotate(x, None) is x


@pytest.mark.parametrize("fields", EACH, ids=ids)
@pytest.mark.slow
def test_every_step_of_a_ragged_batch(fields: dict) -> None:
    pair = RotatedPair(DiffKVConfig(**MIXED, **fields), len(LENGTHS), heads=2, group=2, dim=16)
    pair.follow(max(LENGTHS), *[1] * 150, valid=left_padding(LENGTHS))
    pair.assert_mixed(100)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.sampled(6)
def test_prompt_turn_and_steps_of_common_head_dims(dim: int) -> None:
    config = DiffKVConfig(Precision(8, 4, 1, 2), Precision(4, 2, 2, 4), **MIXED, **BOTH, window=8)
    pair = RotatedPair(config, 3, heads=2, group=3, dim=dim)
    pair.follow(5, *[1] * 20, 40, *[1] * 9, valid=left_padding((5, 2, 0)))


@pytest.mark.parametrize("fields", EACH, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", ["reference", "native"])
@pytest.mark.sampled(4)
def test_models_of_low_precision(steps: str, dtype: torch.dtype, fields: dict) -> None:
    """Tokens match to the last bit: one rounding when they enter, and another when their row is centred later."""
    pair = RotatedPair(DiffKVConfig(**MIXED, **fields, window=16), 3, heads=2, group=3, dim=16, dtype=dtype)
    if dtype == torch.bfloat16:
        # outputs of at most 16 are rounded before and after they are rotated back
        pair.output_tolerance, pair.score_tolerance = 16 * 2**-8, 1e-4
    with use_backend("reference"):
        pair.follow(100, valid=left_padding((100, 40, 7)))
        with use_backend(steps):
            native = steps == "native" and library.library() is not None
            pair.simulation.rounds_rotated = not native
            if native and dtype == torch.bfloat16:
                # integer products use 14 bits for queries and weights
                pair.score_tolerance = 2**-11
            pair.follow(*[1] * 20)
            pair.simulation.rounds_rotated = True
        pair.follow(30, valid=torch.rand(3, 30, generator=torch.Generator().manual_seed(0)) > 0.3)


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.sampled(6)
def test_rows_reach_the_end_of_their_window_at_different_steps(first: int) -> None:
    config = DiffKVConfig(**MIXED, **BOTH, window=12)
    pair = RotatedPair(config, 4, heads=2, group=2, dim=16)
    pair.forward(first, left_padding((first, 1, first, 0)) if first > 1 else None)
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([1.0, 0.8, 0.5, 0.3])[:, None]
    fixed = []
    for _ in range(60):
        pair.follow(1, valid=torch.rand(4, 1, generator=generator) < share)
        fixed.append(held_offset(pair).abs().amax((1, 2)).gt(0).sum().item())
    assert fixed[0] == 0 and fixed[-1] == 4 and len(set(fixed)) > 2, fixed


def test_a_row_stays_with_its_first_mean() -> None:
    """Turns whose keys have a different mean change neither the offset nor what is read."""
    pair = RotatedPair(DiffKVConfig(**MIXED, **BOTH, window=8), 2, heads=2, group=2, dim=16)
    pair.forward(6)
    assert not held_offset(pair).any()
    pair.forward(20, left_padding((20, 1)))
    before = held_offset(pair)
    assert before[0].abs().amax() > 1 and not before[1].any()
    draw = pair.draw
    pair.draw = lambda heads, tokens: draw(heads, tokens) - 5
    pair.follow(30, 1, 1, 1)
    assert torch.equal(held_offset(pair)[0], before[0])
    # the mean of all of the row's keys so far
    assert held_offset(pair)[1].abs().amax() > 1


@pytest.mark.parametrize("kind", [Pair, RotatedPair])
@pytest.mark.parametrize("window", [1, 3, 64])
def test_further_turns_and_chunks(window: int, kind: type[Pair]) -> None:
    pair = kind(DiffKVConfig(alpha_high=1.2, alpha_low=0.7, window=window), 4, heads=2, group=2, dim=16)
    pair.follow(90, valid=left_padding((90, 0, 13, 64)))
    for turn, tokens in enumerate((17, 2, 64, 130)):
        valid = torch.rand(4, tokens, generator=torch.Generator().manual_seed(turn)) > 0.3
        pair.follow(tokens, valid=valid)
        for _ in range(5):
            pair.follow(1, valid=torch.tensor([[True], [True], [turn % 2 == 0], [False]]))
    pair.assert_mixed(20, (0, 1, 2))


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}], ids=ids)
def test_softcap_and_sinks_keep_a_layer_from_being_centred(options: dict) -> None:
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}
    pair = RotatedPair(DiffKVConfig(**MIXED, **BOTH, window=4), 2, heads=2, group=2, dim=16)
    pair.forward(3, left_padding((3, 2)), **options)
    for tokens in (*[1] * 12, 30, *[1] * 5):
        pair.forward(tokens, **options)
        pair.compare()
    assert not held_offset(pair).any()


def test_one_layer_with_a_softcap_among_others() -> None:
    store = new_store(
        DiffKVConfig(alpha_high=1.0, **BOTH, window=4, sinks=0), 3, 1, 2, 16, 16, torch.float32, torch.device("cpu")
    )
    query, key = torch.ones(1, 4, 1, 16), torch.ones(1, 2, 1, 16)
    for _ in range(6):
        begin(store, 1)
        for layer in range(3):
            attend(store, layer, (query, key, key), Softmax(0.25, 5.0 if layer == 1 else None))
    settle(store)
    assert store.key_offset.abs().amax((1, 2, 3)).gt(0).tolist() == [True, False, True]


def test_keys_and_values_of_different_dims() -> None:
    store = new_store(DiffKVConfig(**MIXED, **BOTH, window=4), 1, 1, 2, 16, 24, torch.float64, torch.device("cpu"))
    store.set_thresholds(0, 0.0, 0.0)
    exact = new_store(DiffKVConfig.lossless(window=4), 1, 1, 2, 16, 24, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tokens in (12, 1, 1, 6):
        states = [
            torch.randn(1, heads, tokens, dim, generator=generator, dtype=torch.float64)
            for heads, dim in ((4, 16), (2, 16), (2, 24))
        ]
        outputs = []
        for each in (store, exact):
            begin(each, tokens)
            outputs.append(attend(each, 0, states, Softmax(0.25)))
        assert outputs[0].shape == (1, 4, tokens, 24)
        # 4-bit values with a range of about 5
        torch.testing.assert_close(*outputs, rtol=0, atol=0.4)
    mine, theirs = read_tokens(store, 0), read_tokens(exact, 0)
    assert (mine.keys - theirs.keys).norm() / theirs.keys.norm() < 0.02
    assert (mine.values - theirs.values).norm() / theirs.values.norm() < 0.15


def test_sixteen_bits_lose_nothing() -> None:
    full = Precision(16, 16)
    for fields in EACH:
        config = DiffKVConfig(full, full, alpha_high=0.0, window=4, **fields)
        pair = RotatedPair(config, 2, heads=2, group=2, dim=16)
        drawn = noted_draws(pair)
        for tokens in (3, 1, 1, 1, 1, 9, 1, 1):
            pair.forward(tokens)
        stored = read_tokens(pair.store, 0)
        torch.testing.assert_close(stored.keys, torch.cat(drawn[1::3], dim=2), rtol=0, atol=1e-12)
        torch.testing.assert_close(stored.values, torch.cat(drawn[2::3], dim=2), rtol=0, atol=1e-12)


def test_chosen_repeated_and_forked_requests_keep_their_offsets() -> None:
    pair = RotatedPair(DiffKVConfig(**MIXED, **BOTH, window=8), 3, heads=2, group=2, dim=16)
    pair.forward(30, left_padding((30, 4, 11)))
    before = read_tokens(pair.store, 0)
    fork = fork_store(pair.store)
    make_private(fork)
    fork.key_offset.zero_()
    index = torch.tensor([2, 0, 0, 1])
    select_rows(pair.store, index)
    after = read_tokens(pair.store, 0)
    for name in ("keys", "values", "levels"):
        assert torch.equal(getattr(after, name), getattr(before, name)[index])


@pytest.mark.parametrize("forwards", [(1,) * 14, (12, 1), (3, 12)], ids=str)
def test_hidden_tokens(forwards: tuple[int, ...]) -> None:
    """A row with nothing left outside the window is centred anew when tokens leave it again."""
    pair = RotatedPair(DiffKVConfig(**MIXED, **BOTH, window=8), 2, heads=2, group=2, dim=16)
    pair.forward(30)
    offsets = held_offset(pair)
    shown = torch.rand(2, 30, generator=torch.Generator().manual_seed(0)) > 0.4
    shown[1, :24] = False
    hide_tokens(pair.store, shown)
    pair.simulation.hide(shown)
    pair.compare()
    pair.follow(*forwards)
    assert torch.equal(held_offset(pair)[0], offsets[0])
    assert not torch.equal(held_offset(pair)[1], offsets[1])


class RotatedSharedPair(RotatedPair, SharedPair):
    """A layer that is also read by other layers."""


@pytest.mark.parametrize("newest", [1, 5, 1000])
def test_layers_that_share_keys_and_values(newest: int) -> None:
    pair = RotatedSharedPair(DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=8, **BOTH))
    pair.forward(6, left_padding((6, 3, 1, 2)), newest)
    for tokens in (*[1] * 9, 60, *[1] * 5, 12):
        pair.forward(tokens, None, newest)
        pair.compare()


def test_tokens_taken_back() -> None:
    """Recorded tokens are attended to in the model's channels until they are stored. Rejected keys enter no mean."""
    pair = RotatedSharedPair(DiffKVConfig(alpha_high=1.6, alpha_low=0.9, window=8, **BOTH))
    pair.forward(5, left_padding((5, 3, 1, 2)))
    settle(pair.store)
    pair.store.recording = True
    for tokens, rejected in ((6, 4), (1, 0), (4, 3), (9, 2), (1, 0), (1, 0), (6, 6), (3, 1)):
        pair.forward_recorded(tokens, rejected)
        pair.compare()


def test_recorded_tokens_are_read_as_they_came() -> None:
    pair = RotatedSharedPair(DiffKVConfig(**MIXED, **BOTH, window=8))
    pair.forward(30)
    pair.store.recording = True
    new = pair.draw_all(5)
    pair.attend(new, new.queries)
    tokens = read_tokens(pair.store, 0)
    assert torch.equal(tokens.keys[:, :, 30:], new.key) and torch.equal(tokens.values[:, :, 30:], new.value)
    expected, _, _ = pair.simulation.stored()
    torch.testing.assert_close(tokens.keys[:, :, :30], expected, rtol=1e-6, atol=1e-6)


def test_memory_counts_offsets() -> None:
    shape = (2, 3, 2, 16, 16, torch.bfloat16, torch.device("cpu"))
    plain, rotated, both = (
        new_store(DiffKVConfig(alpha_high=1.0, **fields), *shape) for fields in (NEITHER, EACH[0], BOTH)
    )
    assert both.bytes - plain.bytes == 2 * 3 * 2 * 16 * 4
    assert rotated.bytes == plain.bytes


@pytest.mark.parametrize("steps", [0, 3])
def test_what_a_rotation_makes_too_large_is_refused(steps: int) -> None:
    """Half-precision metadata holds up to 65504, and rotation may make an element sqrt(dim) times as large."""
    pair = RotatedPair(DiffKVConfig(**MIXED, **BOTH, window=8), 1, heads=1, group=1, dim=16, dtype=torch.float32)
    pair.steps(steps)
    row = rotation(16)[0].float() * 4
    draw = pair.draw
    # 4 * 5000 = 20000 in one channel after rotation
    pair.draw = lambda heads, tokens: draw(heads, tokens) + 5000 * row
    with pytest.raises(ValueError, match="beyond 16376"):
        if steps:
            begin(pair.store, 1)
            attend(pair.store, 0, (pair.draw(1, 1), pair.draw(1, 1), draw(1, 1)), Softmax(0.25))
            pair.store.look()
        else:
            pair.forward(20)
    assert not pair.store.high_count.any()


def test_the_largest_keys_that_are_taken() -> None:
    """Just inside the limit, on both sides of zero, so that centring doubles them."""
    low = Precision(1, 1)
    config = DiffKVConfig(low, low, alpha_high=0.0, window=8, sinks=0, rotate=False, center=True)
    pair = RotatedPair(config, 1, heads=1, group=1, dim=16)
    largest = 16376 * torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)
    for step in range(12):
        key = (largest if step else -largest).view(1, 1, 1, 16)
        pair.draw = lambda heads, tokens, key=key: key
        pair.forward(1)
        pair.compare()
    assert (read_tokens(pair.store, 0).levels == 2).sum() == 4


@pytest.mark.parametrize("dim", [16, 80, 96, 256, 512, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled(3)
def test_rotation_by_a_kernel(dim: int, dtype: torch.dtype) -> None:
    """Rotates a non-contiguous tensor there and back, with and without an offset."""
    pytest.importorskip("triton")
    matrix = rotation_matrix(dim, torch.float32, torch.device("cpu"))
    tensor = torch.randn(2, 21, 3, dim, generator=torch.Generator().manual_seed(0)).to(dtype).transpose(1, 2)
    offset = torch.randn(2, 3, dim, generator=torch.Generator().manual_seed(1))
    near = {"rtol": torch.finfo(dtype).eps, "atol": 4e-6}
    for turned, taken in ((matrix, offset), (matrix, None), (matrix.mT, None)):
        with use_backend("kernels"):
            found = rotate(tensor, turned, taken)
        expected = tensor.double() @ turned.double() - (0 if taken is None else taken[:, :, None].double())
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, **near)
