"""Pages written and read byte by byte in numpy: quantiser, packing and segments, implemented from their definitions.

It shares nothing with the package except the offsets of a `TierLayout`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from hf_diffkv.pages import HIGH, LayerRows, PageLayout, PagePool, TierLayout
from tools.kernels.rows import given_rows

# for a group: fp16 scale and zero point, or one 16-bit number
Metadata = Union[tuple[np.float16, np.float16], int]


def narrow_metadata(low: np.float32, high: np.float32, bits: int) -> int:
    """64 * scale + zero point of a group, in exact fractions except for the format's rounding to float32."""
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    half = np.float16((high - low) / np.float32(2**bits - 1)).view(np.uint16)
    # to a 5-bit mantissa, with ties to even
    scale = min(int(np.rint(half / 32)), 31 * 32 - 1)
    covered = np.float32(narrow_scale(scale) * (2**bits - 1))
    if covered == 0:
        return scale << 6
    zero = np.rint((covered - (low + high)) * np.float32(31.5) / covered)
    return scale << 6 | int(min(max(zero, 0), 63))


def narrow_scale(code: int) -> Fraction:
    """5 bits of exponent, 5 of mantissa; the smallest exponent lacks the leading 1."""
    exponent, mantissa = divmod(code, 32)
    return Fraction(mantissa + 32 * (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 15 - 5)


def scale_and_zero(metadata: Metadata, bits: int) -> tuple[float, float]:
    if not isinstance(metadata, int):
        return float(metadata[0]), float(metadata[1])
    scale, zero = narrow_scale(metadata >> 6), metadata & 63
    return float(scale), float(-zero * scale * (2**bits - 1) * Fraction(65, 4096))


def narrow_score(score: float) -> int:
    """The nearest number with 6 bits of exponent and 10 of mantissa, ties to even; numbers are not negative."""
    if score < 2.0**-46:
        return 0
    exponent = math.floor(math.log2(score))
    return min(1024 * (exponent + 46) + round((Fraction(score) / Fraction(2) ** exponent - 1) * 1024), 0xFFFF)


def score_of(code: int) -> float:
    return 0.0 if code == 0 else (1 + code % 1024 / 1024) * 2.0 ** (code // 1024 - 46)


def noise_of(index: int, length: int, tier: int) -> int:
    """The 13 random bits added to the sum of a row's index-th token in a tier."""
    mixed = (index * 0x9E3779B1 + (2 * length + tier) * 0xB504F333) % 2**32
    return (mixed ^ mixed >> 15) * 0x93CD3A2D % 2**32 >> 19


def grown_score(total: float, index: int, length: int, tier: int, slack: float = 0.01) -> tuple[float, float]:
    """Smallest and largest narrow score that a sum may become; `slack` is its tolerance in last places."""
    if total == 0:
        return 0.0, 0.0
    exponent = math.floor(math.log2(total))
    place = 1024 * (exponent + 46) + (total / 2.0**exponent - 1) * 1024 + noise_of(index, length, tier) / 8192
    return tuple(score_of(min(max(math.floor(place + side), 0), 0xFFFF)) for side in (-slack, slack))


def quantise_row(
    row: np.ndarray, bits: int, groups: int, narrow: bool = False, inset: tuple[float, float] = (0.0, 1.0)
) -> tuple[list[int], list[Metadata]]:
    """Codes of all elements of a float32 row and the metadata of each group."""
    codes, metadata = [], []
    for part in np.split(row.astype(np.float32), groups):
        part = part / np.float32(inset[1])
        low, high = part.min(), part.max()
        if inset[0]:
            end = np.float32(high - low) / np.float32(inset[0])
            low, high = low + end, high - end
        if narrow:
            metadata.append(narrow_metadata(low, high, bits))
        else:
            metadata.append((np.float16((high - low) / np.float32(2**bits - 1)), np.float16(low)))
        scale, zero = map(np.float32, scale_and_zero(metadata[-1], bits))
        for x in part:
            code = 0 if scale == 0 else np.rint((x - zero) / scale)
            codes.append(int(min(max(code, 0), 2**bits - 1)))
    return codes, metadata


def decode_row(codes: list[int], metadata: list[Metadata], bits: int = 0) -> np.ndarray:
    """Elements in float64; narrow metadata needs the bits."""
    width = len(codes) // len(metadata)
    pairs = [scale_and_zero(part, bits) for part in metadata]
    return np.array([code * pairs[i // width][0] + pairs[i // width][1] for i, code in enumerate(codes)])


def lowest_field(bits: int) -> int:
    """Number of bits of a code that are packed first: the largest power of two."""
    return 1 << bits.bit_length() - 1


def pack_row(codes: list[int], bits: int) -> bytes:
    """Byte j holds, starting at its lowest bits, the elements j, j + D/P, j + 2 D/P, ... with P = 8 / bits.

    If P is not a whole number, a row of their low 2 or 4 bits comes first, then a row of the bits above.
    """
    low = lowest_field(bits)
    if low < bits:
        return pack_row([code % 2**low for code in codes], low) + pack_row([code >> low for code in codes], bits - low)
    planes = 8 // bits
    width = len(codes) // planes
    return bytes(sum(codes[j + plane * width] << (bits * plane) for plane in range(planes)) for j in range(width))


def unpack_row(data: bytes, bits: int) -> list[int]:
    low = lowest_field(bits)
    if low < bits:
        start = len(data) * low // bits
        pairs = zip(unpack_row(data[:start], low), unpack_row(data[start:], bits - low))
        return [below + (above << low) for below, above in pairs]
    width = len(data)
    return [(data[i % width] >> (bits * (i // width))) & (2**bits - 1) for i in range(width * (8 // bits))]


def _raw(row: np.ndarray, dtype: torch.dtype) -> bytes:
    return torch.from_numpy(np.ascontiguousarray(row)).to(dtype).view(torch.uint8).numpy().tobytes()


def _sides(tier: TierLayout) -> tuple[tuple[int, int, int, int, int, bool], ...]:
    """Bits, groups, bytes per row, offsets of rows and metadata, and whether the metadata is narrow."""
    key = (tier.k_bits, tier.k_groups, tier.key_row, tier.key_offset, tier.key_metadata_offset, tier.key_metadata == 2)
    return key, (
        *(tier.v_bits, tier.v_groups, tier.value_row, tier.value_offset, tier.value_metadata_offset),
        tier.value_metadata == 2,
    )


def read_metadata(page: np.ndarray, offset: int, slot: int, groups: int, narrow: bool) -> list[Metadata]:
    size = (2 if narrow else 4) * groups
    data = page[offset + slot * size : offset + (slot + 1) * size]
    return data.view("<u2").tolist() if narrow else [tuple(pair) for pair in data.view("<f2").reshape(groups, 2)]


def write_token(
    page: np.ndarray,
    tier: TierLayout,
    slot: int,
    key: np.ndarray,
    value: np.ndarray,
    score: float,
    position: int,
    dtype: torch.dtype,
) -> None:
    """Quantises one token into a page, uint8 [page_bytes]. Pages without scores have wide metadata here."""
    for is_value, (row, side) in enumerate(zip((key, value), _sides(tier))):
        bits, groups, row_bytes, offset, metadata_offset, narrow = side
        if bits == 16:
            data = _raw(row, dtype)
        else:
            codes, metadata = quantise_row(row, bits, groups, narrow, tier.value_inset if is_value else (0.0, 1.0))
            data = pack_row(codes, bits)
            size = (2 if narrow else 4) * groups
            words = np.array(metadata, dtype="<u2" if narrow else "<f2").reshape(-1).view(np.uint8)
            page[metadata_offset + slot * size : metadata_offset + (slot + 1) * size] = words
        assert len(data) == row_bytes
        page[offset + slot * row_bytes : offset + (slot + 1) * row_bytes] = np.frombuffer(data, dtype=np.uint8)
    if tier.score_bytes == 0:
        return
    if tier.score_bytes == 2:
        data = np.array([narrow_score(float(np.float32(score)))], dtype="<u2")
    else:
        data = np.array([score], dtype="<f4")
    page[tier.score_offset + tier.score_bytes * slot :][: tier.score_bytes] = data.view(np.uint8)
    data = np.array([position], dtype=f"<u{tier.position_bytes}")
    page[tier.position_offset + tier.position_bytes * slot :][: tier.position_bytes] = data.view(np.uint8)


def read_token(
    page: np.ndarray, tier: TierLayout, slot: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, float, int]:
    """Key and value in float64, and score and position, of one token; 0 where pages have none."""
    rows = []
    for bits, groups, row_bytes, offset, metadata_offset, narrow in _sides(tier):
        data = page[offset + slot * row_bytes : offset + (slot + 1) * row_bytes].tobytes()
        if bits == 16:
            rows.append(torch.frombuffer(bytearray(data), dtype=dtype).double().numpy())
        else:
            metadata = read_metadata(page, metadata_offset, slot, groups, narrow)
            rows.append(decode_row(unpack_row(data, bits), metadata, bits))
    if tier.score_bytes == 0:
        return rows[0], rows[1], 0.0, 0
    data = page[tier.score_offset + tier.score_bytes * slot :][: tier.score_bytes]
    score = score_of(int(data.view("<u2")[0])) if tier.score_bytes == 2 else float(data.view("<f4")[0])
    data = page[tier.position_offset + tier.position_bytes * slot :][: tier.position_bytes]
    position = int(data.view(f"<u{tier.position_bytes}")[0])
    return rows[0], rows[1], score, position


class HandStore:
    """Rows of both tiers on scattered pages, written by hand; everything not written is 0xFF.

    Attributes:
        pages: uint8 [pages, page_bytes], page 0 is the null page.
        table: int32 [rows, width]. counts: int32 [rows] of each tier.
    """

    def __init__(self, layout: PageLayout, high: list[int], low: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        self.layout, self.tiers, self.dtype = layout, (layout.high, layout.low), dtype
        self.counts = (torch.tensor(high, dtype=torch.int32), torch.tensor(low, dtype=torch.int32))
        used = [[-(-count // tier.capacity) for count in counts] for tier, counts in zip(self.tiers, (high, low))]
        total = sum(map(sum, used))
        width = max(a + b for a, b in zip(*used)) + 1
        self.pages = torch.full((total + 1, layout.page_bytes), 0xFF, dtype=torch.uint8)
        ids = (np.random.default_rng(seed).permutation(total) + 1).tolist()
        self.table = torch.zeros(len(high), width, dtype=torch.int32)
        for tier, pages in enumerate(used):
            for row, count in enumerate(pages):
                for page in range(count):
                    self.table[row, page if tier == HIGH else width - 1 - page] = ids.pop()

    def place(self, tier: int, row: int, index: int) -> tuple[int, int]:
        """Page and slot of the index-th token of a row."""
        page, slot = divmod(index, self.tiers[tier].capacity)
        return int(self.table[row, page if tier == HIGH else self.table.shape[1] - 1 - page]), slot

    def write(self, tier: int, row: int, index: int, key: Tensor, value: Tensor, score: float, position: int) -> None:
        page, slot = self.place(tier, row, index)
        key, value = key.double().numpy(), value.double().numpy()
        write_token(self.pages[page].numpy(), self.tiers[tier], slot, key, value, score, position, self.dtype)

    def read(self, tier: int, row: int, index: int) -> tuple[np.ndarray, np.ndarray, float, int]:
        page, slot = self.place(tier, row, index)
        return read_token(self.pages[page].numpy(), self.tiers[tier], slot, self.dtype)

    def read_row(self, row: int) -> list[tuple[int, np.ndarray, np.ndarray, float, int]]:
        """Returns all tokens of a row: (tier, key, value, score, position)."""
        return [(tier, *self.read(tier, row, i)) for tier in (0, 1) for i in range(int(self.counts[tier][row]))]

    def rows(self, heads: int, window_key: Tensor, window_value: Tensor, **given: Any) -> LayerRows:
        """Returns the rows in the form that ops take, with these windows and `given` fields; other tensors are zero."""
        counts = {name: count.view(-1, heads) for name, count in zip(("high_count", "low_count"), self.counts)}
        held = {"pages": self.pages, "page_table": self.table.view(-1, heads, self.table.shape[1]), **counts}
        return given_rows(self.layout, window_key, window_value, **(held | given))

    def into_pool(self, extra: int = 0, max_pages: int | None = None) -> PagePool:
        """Moves the pages into a pool with `extra` free ones and returns it; `pages` becomes a view of it."""
        used = self.pages.shape[0] - 1
        pool = PagePool(self.layout.page_bytes, self.pages.device, max_pages)
        pool.ensure_free(used + extra)
        pool.free_list.take(torch.tensor([used]))
        pool.pages[: used + 1] = self.pages
        self.pages = pool.pages
        return pool
