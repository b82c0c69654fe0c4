"""The quantiser and its packing, compared byte for byte with a hand-written numpy version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hand_pages import decode_row, pack_row, quantise_row, read_token, unpack_row, write_token

from hf_diffkv.config import Precision
from hf_diffkv.ops.quantize.reference import dequantize, load_tokens, move_tokens, quantize, store_tokens
from hf_diffkv.pages import PageLayout
from hf_diffkv.pages.segments import Contents
from hf_diffkv.precision import CODE_BITS


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Draws rows with very different ranges and offsets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    spread = torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator)).clamp(max=300)
    return x * spread + 10 * torch.randn(*shape[:-1], 1, generator=generator)


@pytest.mark.parametrize("groups", [1, 2, 3, 12])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_codes_and_metadata(bits: int, groups: int) -> None:
    x = draw(200, 96)
    packed, metadata = quantize(x, bits, groups)
    assert packed.shape == (200, 96 * bits // 8) and packed.dtype == torch.uint8
    assert metadata.shape == (200, groups, 2) and metadata.dtype == torch.float16
    for row in range(200):
        codes, expected = quantise_row(x[row].numpy(), bits, groups)
        assert metadata[row].tolist() == [[float(scale), float(zero)] for scale, zero in expected]
        assert packed[row].numpy().tobytes() == pack_row(codes, bits)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_decoding(bits: int, groups: int) -> None:
    x = draw(50, 64)
    packed, metadata = quantize(x, bits, groups)
    decoded = dequantize(packed, metadata, bits, groups, torch.float32)
    assert decoded.dtype == torch.float32
    for row in range(50):
        expected = decode_row(unpack_row(packed[row].numpy().tobytes(), bits), metadata[row].numpy())
        np.testing.assert_allclose(decoded[row].numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_the_error_is_half_a_step(bits: int) -> None:
    """Rounding the scale and the zero point to fp16 may add to this."""
    x = draw(300, 128)
    decoded = dequantize(*quantize(x, bits, 1), bits, 1, torch.float32)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    rounding = (torch.maximum(low.abs(), high.abs()) + (high - low)) * 2**-10
    assert ((decoded - x).abs() <= 0.5 * step + rounding).all()


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([[0.0, 0.5, 1.5, 2.5, 3.5, 15.0, 14.5, 13.5]])
    packed, _ = quantize(x, 4, 1)
    assert unpack_row(packed[0].numpy().tobytes(), 4) == [0, 0, 2, 2, 4, 15, 14, 14]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sixteen_bits_are_the_models_own_bytes(dtype: torch.dtype) -> None:
    x = draw(20, 24).to(dtype)
    packed, metadata = quantize(x, 16, 1)
    assert metadata is None
    assert packed.shape == (20, 24 * dtype.itemsize)
    assert packed.numpy().tobytes() == x.view(torch.uint8).numpy().tobytes()
    decoded = dequantize(packed, None, 16, 1, dtype)
    assert torch.equal(decoded.to(dtype), x)


@pytest.mark.parametrize("value", [0.0, -3.7, 1000.1, 2e-9])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_constant_rows_decode_to_the_zero_point(bits: int, value: float) -> None:
    x = torch.full((3, 32), value)
    packed, metadata = quantize(x, bits, 2)
    assert (packed == 0).all()
    decoded = dequantize(packed, metadata, bits, 2, torch.float32)
    assert torch.equal(decoded, x.half().float())


@pytest.mark.parametrize("bits", CODE_BITS)
def test_a_range_too_small_for_a_scale(bits: int) -> None:
    """The scale underflows to zero: all elements become the zero point, and none becomes NaN."""
    x = torch.tensor([[0.125, 0.125 + 1.5e-8] * 8])
    assert x[0, 0] != x[0, 1]
    packed, metadata = quantize(x, bits, 1)
    assert metadata[0, 0].tolist() == [0.0, 0.125]
    assert (dequantize(packed, metadata, bits, 1, torch.float32) == 0.125).all()


NUMBERS = [{}, {"metadata_bits": 16, "position_bytes": 2}, {"metadata_bits": 16}]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "precision, key_dim, value_dim, dtype",
    [
        (Precision(8, 4), 128, 128, torch.bfloat16),
        (Precision(4, 2, 2, 4), 64, 64, torch.float16),
        (Precision(2, 8), 80, 96, torch.float32),
        (Precision(6, 4), 128, 64, torch.bfloat16),
        (Precision(5, 3, 2, 5), 80, 80, torch.float16),
        (Precision(3, 6, 3, 1), 24, 96, torch.float32),
        (Precision(1, 16), 32, 16, torch.bfloat16),
        (Precision(16, 1, 1, 3), 24, 24, torch.float64),
        (Precision(16, 16), 16, 40, torch.float16),
    ],
    ids=str,
)
def test_stored_tokens_byte_for_byte(
    precision: Precision, key_dim: int, value_dim: int, dtype: torch.dtype, numbers: dict
) -> None:
    sizes = (key_dim, value_dim, dtype.itemsize)
    tier = PageLayout.build(precision, precision, *sizes, page_bytes=4096, **numbers).high
    count = 2 * tier.capacity
    place = torch.randperm(3 * tier.capacity, generator=torch.Generator().manual_seed(1))[:count]
    page, slot = 1 + place // tier.capacity, place % tier.capacity
    key, value = draw(count, key_dim).to(dtype), draw(count, value_dim, seed=1).to(dtype)
    score, position = (
        draw(count, seed=2).abs(),
        torch.randint(0, 1 << (30 if tier.position_bytes == 4 else 16), (count,)),
    )
    pages = torch.full((5, tier.page_bytes), 0xFF, dtype=torch.uint8)
    expected = pages.clone()
    store_tokens(pages, tier, page, slot, Contents(key, value, score, position), dtype)
    for i in range(count):
        write_token(
            expected[int(page[i])].numpy(),
            tier,
            int(slot[i]),
            key[i].double().numpy(),
            value[i].double().numpy(),
            float(score[i]),
            int(position[i]),
            dtype,
        )
    assert torch.equal(pages, expected)

    keys, values = load_tokens(pages, tier, page, slot, dtype)
    for i in range(count):
        read_key, read_value, _, _ = read_token(expected[int(page[i])].numpy(), tier, int(slot[i]), dtype)
        np.testing.assert_allclose(keys[i].numpy(), read_key, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(values[i].numpy(), read_value, rtol=1e-6, atol=1e-5)


def size_of_metadata(bits: int, numbers: dict) -> int:
    return 0 if bits == 16 else 2 if numbers and bits <= 6 else 4


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "precision", [Precision(8, 4), Precision(4, 2, 2, 4), Precision(16, 1), Precision(5, 3)], ids=str
)
def test_moved_tokens_keep_every_byte(precision: Precision, numbers: dict) -> None:
    """Decoding and quantising again would change codes; moving must not, even if places overlap."""
    tier = PageLayout.build(precision, precision, 32, 32, 2, page_bytes=2048, **numbers).high
    capacity = tier.capacity
    pages = torch.randint(0, 256, (4, tier.page_bytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    before = pages.clone()
    source, target = [(1, 0), (1, 1), (2, capacity - 1), (3, 2)], [(1, 1), (3, 0), (1, 0), (2, 3)]

    def split(places: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.tensor(part) for part in zip(*places))

    move_tokens(pages, tier, *split(source), *split(target))
    expected = before.clone()
    for (from_page, from_slot), (to_page, to_slot) in zip(source, target):
        for offset, size in (
            (tier.key_offset, tier.key_row),
            (tier.value_offset, tier.value_row),
            (tier.key_metadata_offset, size_of_metadata(precision.k_bits, numbers) * precision.k_groups),
            (tier.value_metadata_offset, size_of_metadata(precision.v_bits, numbers) * precision.v_groups),
            (tier.score_offset, 2 if numbers else 4),
            (tier.position_offset, numbers.get("position_bytes", 4)),
        ):
            data = before[from_page, offset + from_slot * size : offset + (from_slot + 1) * size]
            expected[to_page, offset + to_slot * size : offset + (to_slot + 1) * size] = data
    assert torch.equal(pages, expected)
    assert not torch.equal(pages, before)
