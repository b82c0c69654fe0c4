"""Packs codes of every precision into bytes and back, as defined in pages/layout.py, in every implementation."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from native_code import SETS
from test_quantize_kernel import make_tokens, poisoned, tier_of

from hf_diffkv.config import Precision
from hf_diffkv.native.library import library, use_instructions
from hf_diffkv.ops.quantize import launch, native, reference
from hf_diffkv.precision import CODE_BITS

IMPLEMENTATIONS = {"reference": reference, "kernels": launch, **dict.fromkeys(SETS, native)}


def bit_place(element: int, bit: int, bits: int, dim: int) -> tuple[int, int]:
    """Byte of a packed row, and bit within it, that hold one bit of an element's code."""
    start = 0
    for field in (8, 4, 2, 1):
        if not bits & field:
            continue
        row = dim * field // 8
        if bit < field:
            return start + element % row, field * (element // row) + bit
        start, bit = start + row, bit - field
    raise AssertionError("no such bit")


def packed_by_hand(codes: np.ndarray, bits: int) -> np.ndarray:
    rows = np.zeros((len(codes), codes.shape[1] * bits // 8), np.uint8)
    for element in range(codes.shape[1]):
        for bit in range(bits):
            byte, place = bit_place(element, bit, bits, codes.shape[1])
            rows[:, byte] |= (codes[:, element] >> bit & 1) << place
    return rows


def unpacked_by_hand(rows: np.ndarray, bits: int, dim: int) -> np.ndarray:
    codes = np.zeros((len(rows), dim), np.uint8)
    for element in range(dim):
        for bit in range(bits):
            byte, place = bit_place(element, bit, bits, dim)
            codes[:, element] |= (rows[:, byte] >> place & 1) << bit
    return codes


@pytest.mark.parametrize("dim", [8, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.sampled(6)
def test_codes_become_bytes_and_bytes_codes(name: str, bits: int, dim: int) -> None:
    implementation, tier = IMPLEMENTATIONS[name], tier_of(Precision(bits, bits), dim, dim)
    page, slot, contents = make_tokens(tier, 9, torch.float32)
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (2, len(page), dim)).astype(np.uint8)
    # the smallest and the largest code make scale 1 and zero point 0
    codes[..., 0], codes[..., -1] = 0, 2**bits - 1
    pages = poisoned(tier)
    # keys, then values
    rows = [
        pages[:, offset : offset + tier.capacity * size].unflatten(1, (tier.capacity, size))
        for offset, size in ((tier.key_offset, tier.key_row), (tier.value_offset, tier.value_row))
    ]
    key, value = torch.from_numpy(codes).float()
    contents = contents._replace(key=key, value=value)
    with use_instructions(name) if name in SETS else nullcontext():
        implementation.store_tokens(pages, tier, page, slot, contents, torch.float32)
        for stored, given in zip(rows, codes):
            assert np.array_equal(stored[page, slot].numpy(), packed_by_hand(given, bits))
        for side in rows:
            side[page, slot] = torch.from_numpy(rng.integers(0, 256, side[page, slot].shape).astype(np.uint8))
        read = implementation.load_tokens(pages, tier, page, slot, torch.float32)
        for stored, got in zip(rows, read):
            assert np.array_equal(got.numpy(), unpacked_by_hand(stored[page, slot].numpy(), bits, dim))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_every_bit_has_a_place_of_its_own(bits: int) -> None:
    for dim in (8, 80):
        places = {bit_place(element, bit, bits, dim) for element in range(dim) for bit in range(bits)}
        assert places == {(byte, bit) for byte in range(dim * bits // 8) for bit in range(8)}


@pytest.mark.skipif(not SETS, reason="the native library is not built: make native")
def test_native_code_has_the_same_precisions() -> None:
    assert library().diffkv_code_bits() == sum(1 << bits for bits in CODE_BITS)
