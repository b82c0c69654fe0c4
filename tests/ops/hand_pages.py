"""Pages written and read byte by byte in numpy: quantiser, packing and segments from their definitions.

Shares nothing with the package but the offsets of a `TierLayout`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_diffkv.memory import HIGH, PageLayout, PagePool, TierLayout

LOW_BITS = {3: 2, 5: 4, 6: 4}


def quantise_row(row: np.ndarray, bits: int, groups: int) -> tuple[list[int], list[tuple[np.float16, np.float16]]]:
    """Codes of all elements of a float32 row and (scale, zero) of each group."""
    codes, metadata = [], []
    for part in np.split(row.astype(np.float32), groups):
        low, high = part.min(), part.max()
        zero = np.float16(low)
        scale = np.float16((high - low) / np.float32(2**bits - 1))
        metadata.append((scale, zero))
        for x in part:
            code = 0 if scale == 0 else np.rint((x - np.float32(zero)) / np.float32(scale))
            codes.append(int(min(max(code, 0), 2**bits - 1)))
    return codes, metadata


def decode_row(codes: list[int], metadata: list[tuple[np.float16, np.float16]]) -> np.ndarray:
    """float64 elements."""
    width = len(codes) // len(metadata)
    return np.array(
        [codes[i] * float(metadata[i // width][0]) + float(metadata[i // width][1]) for i in range(len(codes))]
    )


def pack_row(codes: list[int], bits: int) -> bytes:
    """Byte j holds, from its lowest bits up, the elements j, j + D/P, j + 2 D/P, ... with P = 8 / bits.

    Codes of 3, 5 and 6 bits: first a row of their low 2, 4 and 4 bits, then one of what is above.
    """
    if bits in LOW_BITS:
        low = LOW_BITS[bits]
        return pack_row([code % 2**low for code in codes], low) + pack_row([code >> low for code in codes], bits - low)
    planes = 8 // bits
    width = len(codes) // planes
    return bytes(sum(codes[j + plane * width] << (bits * plane) for plane in range(planes)) for j in range(width))


def unpack_row(data: bytes, bits: int) -> list[int]:
    if bits in LOW_BITS:
        low, start = LOW_BITS[bits], len(data) * LOW_BITS[bits] // bits
        pairs = zip(unpack_row(data[:start], low), unpack_row(data[start:], bits - low))
        return [below + (above << low) for below, above in pairs]
    width = len(data)
    return [(data[i % width] >> (bits * (i // width))) & (2**bits - 1) for i in range(width * (8 // bits))]


def _raw(row: np.ndarray, dtype: torch.dtype) -> bytes:
    return torch.from_numpy(np.ascontiguousarray(row)).to(dtype).view(torch.uint8).numpy().tobytes()


def _sides(tier: TierLayout) -> tuple[tuple[int, int, int, int, int, int], ...]:
    return (
        (tier.k_bits, tier.k_groups, tier.key_dim, tier.key_row, tier.key_offset, tier.key_metadata_offset),
        (tier.v_bits, tier.v_groups, tier.value_dim, tier.value_row, tier.value_offset, tier.value_metadata_offset),
    )


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
    """Quantises one token into a page, uint8 [page_bytes]."""
    for row, (bits, groups, _, row_bytes, offset, metadata_offset) in zip((key, value), _sides(tier)):
        if bits == 16:
            data = _raw(row, dtype)
        else:
            codes, metadata = quantise_row(row, bits, groups)
            data = pack_row(codes, bits)
            start = metadata_offset + slot * 4 * groups
            page[start : start + 4 * groups] = np.array(metadata, dtype="<f2").reshape(-1).view(np.uint8)
        assert len(data) == row_bytes
        page[offset + slot * row_bytes : offset + (slot + 1) * row_bytes] = np.frombuffer(data, dtype=np.uint8)
    page[tier.score_offset + 4 * slot :][:4] = np.array([score], dtype="<f4").view(np.uint8)
    page[tier.position_offset + 4 * slot :][:4] = np.array([position], dtype="<i4").view(np.uint8)


def read_token(
    page: np.ndarray, tier: TierLayout, slot: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, float, int]:
    """Key and value in float64, score and position of one token."""
    rows = []
    for bits, groups, _, row_bytes, offset, metadata_offset in _sides(tier):
        data = page[offset + slot * row_bytes : offset + (slot + 1) * row_bytes].tobytes()
        if bits == 16:
            rows.append(torch.frombuffer(bytearray(data), dtype=dtype).double().numpy())
        else:
            start = metadata_offset + slot * 4 * groups
            metadata = page[start : start + 4 * groups].view("<f2").reshape(groups, 2)
            rows.append(decode_row(unpack_row(data, bits), [tuple(pair) for pair in metadata]))
    score = float(page[tier.score_offset + 4 * slot :][:4].view("<f4")[0])
    position = int(page[tier.position_offset + 4 * slot :][:4].view("<i4")[0])
    return rows[0], rows[1], score, position


class HandStore:
    """Rows of both tiers on scattered pages, written by hand; everything nobody wrote is 0xFF.

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
        """Page and slot of a row's index-th token."""
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
        """All tokens of a row: (tier, key, value, score, position)."""
        return [(tier, *self.read(tier, row, i)) for tier in (0, 1) for i in range(int(self.counts[tier][row]))]

    def into_pool(self, extra: int = 0, max_pages: int | None = None) -> PagePool:
        """A pool that holds these pages, with `extra` free ones; `pages` becomes a view of it."""
        used = self.pages.shape[0] - 1
        pool = PagePool(self.layout.page_bytes, self.pages.device, max_pages)
        pool.ensure_free(used + extra)
        pool.free_list.take(torch.tensor([used]))
        pool.pages[: used + 1] = self.pages
        self.pages = pool.pages
        return pool
