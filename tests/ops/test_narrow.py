"""16-bit metadata and scores against exact fractions, and the effect of random rounding on sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_pages import narrow_score, noise_of, pack_row, quantise_row, scale_and_zero, score_of
from test_quantize_reference import draw

from hf_diffkv.ops.quantize.reference import dequantize, quantize
from hf_diffkv.pages import segments
from hf_diffkv.pages.inset import FULL_RANGE, Inset, inset_of
from hf_diffkv.pages.layout import MOST_NARROW_BITS
from hf_diffkv.precision import CODE_BITS

BITS = [bits for bits in CODE_BITS if bits <= MOST_NARROW_BITS]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bits", BITS)
def test_codes_and_metadata(bits: int, groups: int) -> None:
    x = draw(200, 48)
    x[:4] = torch.stack([torch.zeros(48), torch.full((48,), 3.25), torch.full((48,), -7.0), torch.arange(48.0) * 1e-7])
    packed, metadata = quantize(x, bits, groups, metadata_bytes=2)
    assert metadata.shape == (200, groups) and metadata.dtype == torch.int16
    for row in range(200):
        codes, expected = quantise_row(x[row].numpy(), bits, groups, narrow=True)
        assert [word & 0xFFFF for word in metadata[row].tolist()] == expected
        assert packed[row].numpy().tobytes() == pack_row(codes, bits)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_that_are_inset(bits: int, groups: int) -> None:
    x = draw(200, 192)
    x[:3] = torch.stack([torch.zeros(192), torch.full((192,), 3.25), torch.full((192,), -7.0)])
    inset = Inset(11.0, 15 / 16)
    packed, metadata = quantize(x, bits, groups, metadata_bytes=2, inset=inset)
    for row in range(200):
        codes, expected = quantise_row(x[row].numpy(), bits, groups, narrow=True, inset=inset)
        assert [word & 0xFFFF for word in metadata[row].tolist()] == expected
        assert packed[row].numpy().tobytes() == pack_row(codes, bits)


@pytest.mark.parametrize(
    "elements, bits, less",
    [
        *((64, 2, 0.68), (64, 3, 0.89), (64, 4, 0.98), (80, 2, 0.66), (96, 2, 0.63), (96, 3, 0.86), (96, 4, 0.97)),
        *((128, 2, 0.59), (128, 3, 0.82), (128, 4, 0.95), (192, 2, 0.55)),
        *((256, 2, 0.52), (256, 3, 0.75), (256, 4, 0.9)),
        *((32, 2, 0.79), (32, 3, 0.95), (16, 2, 0.89), (16, 3, 0.99), (512, 3, 0.67)),
    ],
)
def test_inset_codes_lose_less_and_shrink_nothing(elements: int, bits: int, less: float) -> None:
    """`less` is the mean square error relative to that of end-to-end codes."""
    x = torch.randn(4000, elements, generator=torch.Generator().manual_seed(0))
    packed = [quantize(x, bits, 1, metadata_bytes=2, inset=inset) for inset in (FULL_RANGE, inset_of(bits, elements))]
    decoded = [dequantize(*each, bits, 1, torch.float32) for each in packed]
    errors = [float((each - x).square().mean()) for each in decoded]
    assert errors[1] < less * errors[0]
    # other group sizes use the inset of smaller ones
    near = 0.015 if elements == 80 else 0.003
    assert abs(float((decoded[1] * x).mean() / x.square().mean()) - 1) < near


@pytest.mark.parametrize("bits, elements", [(1, 128), (5, 128), (8, 64), (16, 64), (4, 32), (2, 8)])
def test_other_values_take_their_full_range(bits: int, elements: int) -> None:
    assert inset_of(bits, elements) == FULL_RANGE


@pytest.mark.parametrize("bits", BITS)
def test_every_scale_and_zero_point(bits: int) -> None:
    """Zero points are also exact in float32."""
    words = torch.arange(992 * 64).to(torch.int16)
    scale, zero = segments.scale_and_zero(words, bits)
    exact = [scale_and_zero(word, bits) for word in range(0, 992 * 64, 31)]
    assert torch.stack([scale, zero], dim=1)[::31].double().tolist() == [list(pair) for pair in exact]


@pytest.mark.parametrize("bits, most", [(2, 1.013), (3, 1.013), (4, 1.013), (5, 1.02), (6, 1.06)])
def test_the_error_is_nearly_that_of_wide_metadata(bits: int, most: float) -> None:
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    errors = []
    for size in (4, 2):
        decoded = dequantize(*quantize(x, bits, 1, metadata_bytes=size), bits, 1, torch.float32)
        errors.append(float((decoded - x).square().mean()))
    assert errors[1] <= most * errors[0]


@pytest.mark.parametrize("bits", BITS)
def test_large_ranges_stay_finite(bits: int) -> None:
    x = torch.tensor([[-32752.0, 32752.0], [0.0, 32752.0], [-32752.0, 0.0]]).repeat(1, 4)
    decoded = dequantize(*quantize(x, bits, 1, metadata_bytes=2), bits, 1, torch.float32)
    assert ((decoded - x).abs() <= 32752 * 2 * (1 / 32 + 1 / 63)).all()


def test_scores_round_to_the_nearest() -> None:
    scores = torch.cat(
        [
            torch.tensor([0.0, 1.0, 2.0**-46, 2.0**-47, 2.0**-45, 3e5, 1 + 2**-11, 1 + 3 * 2**-11, 2 - 2**-12, 1e-38]),
            torch.rand(500, generator=torch.Generator().manual_seed(0)).double().mul(50).sub(30).exp2().float(),
        ]
    )
    stored = segments.stored_score(scores)
    assert [code & 0xFFFF for code in stored.tolist()] == [narrow_score(score) for score in scores.tolist()]
    assert segments.score_of(stored).tolist() == [score_of(code & 0xFFFF) for code in stored.tolist()]


def test_all_scores_stay_as_they_are_without_growth() -> None:
    stored = torch.arange(1 << 16).to(torch.int16)
    scores = segments.score_of(stored)
    assert torch.equal(segments.stored_score(scores), stored)
    for noise in (0, 8191):
        assert torch.equal(segments.stored_score(scores, torch.tensor(noise, dtype=torch.int32)), stored)


def test_the_hash() -> None:
    index, length = torch.arange(300), torch.tensor([[1], [77], [65536], [2**31 + 5]])
    for tier in (0, 1):
        noise = segments.score_noise(index, length, tier)
        assert noise.tolist() == [[noise_of(i, n, tier) for i in range(300)] for n in length[:, 0].tolist()]
    assert segments.score_noise(torch.tensor([0, 5, 4095]), torch.tensor([1, 300, 65536]), 1).tolist() == KNOWN


# fixed values that saved caches and other backends rely on
KNOWN = [216, 2254, 508]


@pytest.mark.parametrize("gain", [1e-2, 1e-3, 1e-4, 1e-5])
@pytest.mark.sampled(100)
def test_sums_of_many_small_gains_are_right_on_average(gain: float) -> None:
    """Adds gains to 4,096 tokens over 2,000 steps. Rounding to nearest would lose all smaller gains."""
    tokens, steps = torch.arange(4096), 2000
    stored = segments.stored_score(1 + torch.rand(4096, generator=torch.Generator().manual_seed(0)))
    start = segments.score_of(stored).double()
    nearest = stored
    for step in range(steps):
        noise = segments.score_noise(tokens, torch.tensor(500 + step), tier=0)
        stored = segments.stored_score(segments.score_of(stored) + gain, noise)
        nearest = segments.stored_score(segments.score_of(nearest) + gain)
    error = segments.score_of(stored).double() - start - steps * gain
    # float32 additions have a bias of their own, at most half their last place and usually far less
    own = steps * 2.0**-24 * np.mean((start + steps * gain).tolist()) / 10
    assert abs(float(error.mean())) < 4 * float(error.std()) / math.sqrt(4096) + own
    # each step's variance is at most gain * the last place
    assert float(error.std()) < math.sqrt(steps * gain * float((start + steps * gain).max()) * 2**-10)
    if gain <= 1e-4:
        assert torch.equal(segments.score_of(nearest).double(), start)


def test_the_same_steps_give_the_same_sums() -> None:
    gains = torch.rand(50, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    runs = []
    for _ in range(2):
        stored = segments.stored_score(torch.ones(64))
        for step, gain in enumerate(gains):
            noise = segments.score_noise(torch.arange(64), torch.tensor(step), 1)
            stored = segments.stored_score(segments.score_of(stored) + gain, noise)
        runs.append(stored)
    assert torch.equal(*runs)
