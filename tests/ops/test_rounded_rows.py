"""Tiles of one row's keys that are rounded in blocks of channels, against the reference that rounds one by one."""

import interpreted  # noqa: F401
import pytest
import torch
import triton
import triton.language as tl
from test_adaptive_rounding import assert_as_good, keys_and_queries, stored, tier_of

from hf_diffkv.ops.quantize.kernels import tier_dims
from hf_diffkv.ops.rounding import reference
from hf_diffkv.ops.rounding.kernels import round_row_tile
from hf_diffkv.ops.rounding.moments import feedback_of, second_moment

TOKENS = 32


@triton.jit
def round_kernel(key, feedback, rounded, count, TIER: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds one row's keys, float32 [count, key_dim]."""
    token = tl.arange(0, BLOCK)
    dim, exists = tier_dims(TIER, True)
    there = (token < count)[:, None, None] & exists
    place = token[:, None, None] * TIER.key_dim + dim
    x = tl.load(key + place, mask=there, other=0.0)
    x = round_row_tile(x, feedback, TIER.key_dim, TIER.k_bits, TIER.key_metadata)
    tl.store(rounded + place, x, mask=there)


def rounded_by_kernel(key, row, feedback, tier) -> torch.Tensor:
    rounded = torch.full(key.shape, torch.nan)
    for head in range(len(feedback)):
        mine, found = key[row == head].float(), torch.full((TOKENS, tier.key_dim), torch.nan)
        round_kernel[(1,)](mine, feedback[head].contiguous(), found, len(mine), tier, TOKENS)
        rounded[row == head] = found[: len(mine)]
    return rounded


@pytest.mark.parametrize("metadata_bits", [16, 32])
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 128])
@pytest.mark.parametrize("name", ["K6V5", "K5V4", "K4V3", "K3V2", "K2V2"])
def test_the_same_codes(name: str, dim: int, metadata_bits: int) -> None:
    tier = tier_of(name, dim, metadata_bits)
    key, row, query = keys_and_queries(dim, torch.bfloat16)
    rounded = rounded_by_kernel(key, row, feedback_of(second_moment(query, 3)), tier)
    assert_as_good(rounded, key, row, query, tier)


@pytest.mark.parametrize("dim", [64, 80])
def test_matrices_of_a_models_heads(dim: int) -> None:
    """These are bfloat16."""
    tier = tier_of("K5V4", dim)
    key, row, query = keys_and_queries(dim, torch.bfloat16)
    feedback = feedback_of(second_moment(query, 3)).bfloat16()
    found = stored(rounded_by_kernel(key, row, feedback, tier), tier)
    expected = stored(reference.round_keys(key, row, feedback.float(), tier), tier)
    assert (found != expected).any(1).float().mean() < 0.06
