"""Keys rounded for their forward's queries, against the dense simulation, which solves anew for each channel."""

from __future__ import annotations

import pytest
import torch
from chosen_ops import feedback_of, second_moment
from simulated_storage import adapted_round_trip
from test_compressed import Pair, left_padding
from test_rotated import noted_draws
from test_shared import SharedPair
from torch import Tensor

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.native import library
from hf_diffkv.native.library import use_instructions
from hf_diffkv.ops.quantize.reference import dequantize, quantize
from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.ops.rounding import native, reference
from hf_diffkv.pages import PageLayout, TierLayout
from hf_diffkv.store import read_tokens

CHANNELS = torch.logspace(0.5, -0.5, 16, dtype=torch.float64)
UNIFORM = {"alpha_high": 0.0, "alpha_low": 0.0, "metadata_bits": 16}
TWO_LEVELS = {"alpha_high": 1.0, "alpha_low": 0.3}
K4V3, K5V4 = Precision.parse("K4V3g2/1"), Precision(5, 4)
CASES = {
    "uniform": {"high": K4V3, "low": K4V3, **UNIFORM},
    "uniform plain": {"high": K5V4, "low": K5V4, **UNIFORM, "rotate": False, "center": False},
    "two levels": {"high": Precision(5, 4), "low": Precision(3, 2, 2, 1), **TWO_LEVELS},
    "two levels narrow": {"high": Precision(8, 4), "low": Precision(4, 2), **TWO_LEVELS, "metadata_bits": 16},
}


class Directed:
    """Queries and keys that are larger in some channels than in others; keys have a mean."""

    def draw(self, heads: int, tokens: int) -> Tensor:
        drawn = super().draw(heads, tokens).double() * CHANNELS
        return (drawn + torch.arange(16) / 8 if heads == self.heads else drawn).to(self.dtype)


class DirectedPair(Directed, Pair):
    token_tolerance = 1e-5


class DirectedShared(Directed, SharedPair):
    token_tolerance = 1e-5


@pytest.mark.parametrize("case", CASES)
def test_prompts_turns_and_steps(case: str) -> None:
    """A prompt, steps, a turn with few new tokens, a turn that moves the window, more steps."""
    config = DiffKVConfig(window=8, sinks=2, adaptive_rounding=True, **CASES[case])
    pair = DirectedPair(config, 3, heads=2, group=2, dim=16)
    pair.follow(50, *[1] * 4, 3, 30, *[1] * 10, valid=left_padding((50, 30, 0)))


def test_a_layer_that_others_read_rounds_for_all_their_queries() -> None:
    config = DiffKVConfig(window=8, adaptive_rounding=True, **CASES["uniform"])
    pair = DirectedShared(config, 2)
    pair.forward(40, left_padding((40, 25)))
    pair.compare()
    for tokens, newest in ((1, 1), (20, 20), (1, 1), (20, 6)):
        pair.forward(tokens, newest=newest)
        pair.compare()


def test_only_keys_of_few_bits_that_a_prompt_stores_change() -> None:
    """Checks that the option does not change values, 8-bit keys, or tokens that leave the window during generation."""
    found = []
    for adaptive in (False, True):
        for high in (Precision(8, 4), Precision(4, 4)):
            config = DiffKVConfig(high, high, window=8, sinks=0, adaptive_rounding=adaptive, **UNIFORM)
            pair = DirectedPair(config, 1, heads=2, group=2, dim=16)
            pair.forward(40)
            pair.steps(12)
            found.append(read_tokens(pair.store, 0))
    plain_eight, plain_four, eight, four = found
    assert torch.equal(plain_eight.keys, eight.keys)
    assert torch.equal(plain_four.values, four.values)
    stored, generated = slice(0, 32), slice(32, 44)
    assert torch.equal(plain_four.keys[:, :, generated], four.keys[:, :, generated])
    assert (plain_four.keys[:, :, stored] != four.keys[:, :, stored]).float().mean() > 0.05


def test_logits_of_the_prompts_queries_change_less() -> None:
    errors = {}
    for adaptive in (False, True):
        config = DiffKVConfig(Precision(4, 4), Precision(4, 4), window=8, adaptive_rounding=adaptive, **UNIFORM)
        pair = DirectedPair(config, 2, heads=2, group=2, dim=16)
        drawn = noted_draws(pair)
        pair.forward(300)
        query, key, _ = drawn
        wrong = read_tokens(pair.store, 0).keys.double() - key
        errors[adaptive] = float((query.unflatten(1, (2, 2)) @ wrong[:, :, None].mT).square().mean())
    assert errors[True] < 0.8 * errors[False]


def tier_of(name: str, dim: int, metadata_bits: int = 16) -> TierLayout:
    precision = Precision.parse(name)
    numbers = {"metadata_bits": metadata_bits}
    return PageLayout.build(precision, precision, dim, dim, 2, page_bytes=4096, **numbers).high


def keys_and_queries(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [n, dim] and their rows, and queries [1, 3, 70, dim] with correlated channels."""
    generator = torch.Generator().manual_seed(dim)
    mixed = torch.randn(dim, dim, generator=generator) * torch.logspace(1, -1, dim)
    query = torch.randn(1, 3, 70, dim, generator=generator) @ mixed
    row = torch.arange(3).repeat_interleave(torch.tensor([21, 1, 16]))
    key = torch.randn(row.numel(), dim, generator=generator) + torch.linspace(-1, 1, dim)
    key[3], key[4], key[5, 0] = 0.25, 0.0, 100.0
    return key.to(dtype), row, query


def stored(key: Tensor, tier: TierLayout) -> Tensor:
    codes, metadata = quantize(key, tier.k_bits, tier.k_groups, metadata_bytes=tier.key_metadata)
    return dequantize(codes, metadata, tier.k_bits, tier.k_groups, torch.float32)


FORMATS = [("K5V4", 64, 16), ("K4V3g2/1", 64, 16), ("K4V4", 128, 32), ("K6V4", 80, 16), ("K2V2g4/1", 24, 32)]


@pytest.mark.parametrize("name, dim, metadata_bits", FORMATS)
def test_what_is_quantised_decodes_to_the_best_codes(name: str, dim: int, metadata_bits: int) -> None:
    """Compares with a solution for each channel and key in float64; no choice is close to a tie."""
    tier = tier_of(name, dim, metadata_bits)
    key, row, query = keys_and_queries(dim, torch.float64)
    moment = second_moment(query.double(), 3)
    rounded = reference.round_keys(key, row, feedback_of(moment), tier)
    for each in range(3):
        expected = adapted_round_trip(key[row == each], moment[each], tier.k_bits, tier.k_groups, metadata_bits == 16)
        torch.testing.assert_close(stored(rounded[row == each], tier).double(), expected, rtol=1e-6, atol=1e-6)


def assert_as_good(rounded: Tensor, key: Tensor, row: Tensor, query: Tensor, tier: TierLayout) -> None:
    """Compares codes with the reference, except for codes within float32's rounding of a tie."""
    moment = second_moment(query, 3)
    expected = stored(reference.round_keys(key, row, feedback_of(moment), tier), tier)
    found = stored(rounded, tier)
    assert rounded.dtype == torch.float32
    different = (found != expected).any(1)
    assert different.float().mean() < 0.06, different.nonzero()[:, 0]
    error, least = ((part - key.float())[:, None] @ moment[row] for part in (found, expected))
    error, least = (part[:, 0] * (decoded - key.float()) for part, decoded in ((error, found), (least, expected)))
    torch.testing.assert_close(error.sum(), least.sum(), rtol=0.02, atol=0)


@pytest.mark.skipif(library.library() is None, reason="the native library is not built: make native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name, dim, metadata_bits", FORMATS)
def test_native_code_finds_the_same_codes(name: str, dim: int, metadata_bits: int, dtype: torch.dtype) -> None:
    tier = tier_of(name, dim, metadata_bits)
    key, row, query = keys_and_queries(dim, dtype)
    wide = torch.cat([key, key], dim=1)[:, :dim]
    for instructions in library.INSTRUCTIONS:
        if not library.library().diffkv_select(instructions.encode()):
            continue
        with use_instructions(instructions):
            rounded = native.round_keys(wide, row, feedback_of(second_moment(query, 3)), tier)
        assert_as_good(rounded, key, row, query, tier)
    library.library().diffkv_select(None)


@pytest.mark.parametrize("name, dim, metadata_bits", FORMATS)
def test_the_kernel_finds_the_same_codes(name: str, dim: int, metadata_bits: int) -> None:
    launch = pytest.importorskip("hf_diffkv.ops.rounding.launch")
    tier = tier_of(name, dim, metadata_bits)
    key, row, query = keys_and_queries(dim, torch.float16)
    rounded = launch.round_keys(key, row, feedback_of(second_moment(query, 3)), tier)
    assert_as_good(rounded, key, row, query, tier)


@pytest.mark.parametrize(
    "dim, tokens, dtype", [(16, 9, torch.float32), (24, 150, torch.float32), (64, 700, torch.bfloat16)]
)
def test_the_kernel_sums_as_the_reference_does(dim: int, tokens: int, dtype: torch.dtype) -> None:
    launch = pytest.importorskip("hf_diffkv.ops.rounding.launch")
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, tokens, 6, dim, generator=generator).to(dtype).transpose(1, 2)
    valid = torch.rand(2, tokens, generator=generator) < 0.7
    for shown in (None, valid):
        given = query.double() if shown is None else query.double() * shown[:, None, :, None]
        rows = given.unflatten(1, (2, 3)).flatten(0, 1).flatten(1, 2)
        found = launch.second_moment(query, 2, shown)
        torch.testing.assert_close(found.double(), rows.mT @ rows, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(second_moment(query, 2, shown), found, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dim", [16, 24, 64])
def test_the_kernel_factors_as_the_reference_does(dim: int) -> None:
    launch = pytest.importorskip("hf_diffkv.ops.rounding.launch")
    moment = second_moment(keys_and_queries(dim, torch.float32)[2], 3)
    moment[1] = 0
    matrix = rotation_matrix(dim, torch.float32, moment.device)
    for turned in (None, matrix):
        expected = feedback_of(moment.double(), None if turned is None else turned.double())
        torch.testing.assert_close(launch.feedback_of(moment, turned).double(), expected, rtol=1e-4, atol=1e-4)


def test_without_queries_each_element_is_rounded_for_itself() -> None:
    tier = tier_of("K5V4", 64)
    key, row, query = keys_and_queries(64, torch.float32)
    feedback = feedback_of(second_moment(query, 3, torch.zeros(1, 70, dtype=torch.bool)))
    assert torch.equal(feedback, torch.eye(64).expand(3, 64, 64))
    assert torch.equal(stored(reference.round_keys(key, row, feedback, tier), tier), stored(key, tier))


def test_native_code_refuses_what_does_not_belong_together() -> None:
    if library.library() is None:
        pytest.skip("the native library is not built: make native")
    tier, feedback = tier_of("K5V4", 64), torch.eye(64).expand(3, 64, 64)
    key = torch.zeros(2, 64)
    for row in (torch.tensor([0, 3]), torch.tensor([-1, 0])):
        with pytest.raises(library.CorruptMemoryError):
            native.round_keys(key, row, feedback, tier)
    with pytest.raises(ValueError, match="must be"):
        native.round_keys(key[:, :32], torch.tensor([0, 1]), feedback, tier)
