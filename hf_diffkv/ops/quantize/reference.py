"""Asymmetric quantisation per token and group, in plain PyTorch (DiffKV, section 4).

zero = min and scale = (max - min) / (2^bits - 1) are rounded to fp16, or as in `pages/segments.py`. Codes are computed
with the rounded pair, so that they fit the metadata they are decoded with. A scale of 0 decodes to exactly the zero
point. Values are inset if their tier says so (`pages/inset.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...pages import TierLayout, fields
from ...pages.inset import FULL_RANGE, Inset
from ...pages.rows import check_contents, check_pages, compute_dtype
from ...pages.segments import Contents, group_metadata, scale_and_zero, segments


def quantize(
    x: Tensor,
    bits: int,
    groups: int,
    dtype: torch.dtype | None = None,
    *,
    metadata_bytes: int = 4,
    inset: Inset = FULL_RANGE,
) -> tuple[Tensor, Tensor | None]:
    """Quantises the last dimension.

    Args:
        x: floats, [..., dim].
        bits: bits of a code; 16 stores `dtype` without quantisation.
        groups: number of equal, contiguous groups of the last dimension.
        dtype: dtype stored at 16 bits, the model's; None uses that of `x`.
        metadata_bytes: bytes of a group's metadata, 4 or 2.
        inset: how codes are chosen (`pages/inset.py`).

    Returns:
        Packed codes, uint8 [..., dim * bits / 8] (at 16 bits the raw bytes), and the metadata: (scale, zero) as float16
        [..., groups, 2], or uint16 bits in int16 [..., groups] for 2 bytes; None at 16 bits.
    """
    if bits == 16:
        return x.to(dtype or x.dtype).contiguous().view(torch.uint8), None
    grouped = x.float().unflatten(-1, (groups, -1))
    # divisors are tensors, because PyTorch may divide by a number differently
    if inset.shrinkage != 1:
        grouped = grouped / torch.full_like(grouped[..., :1], inset.shrinkage)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    if inset.parts:
        inwards = (high - low) / torch.full_like(low, inset.parts)
        low, high = low + inwards, high - inwards
    levels = 2**bits - 1
    metadata = _metadata(low, high, bits, metadata_bytes)
    step, zero = _scale_and_zero(metadata, bits)
    codes = ((grouped - zero) / torch.where(step == 0, 1.0, step)).round_().clamp_(0, levels)
    codes = torch.where(step == 0, 0.0, codes).to(torch.uint8).flatten(-2)
    return pack(codes, bits), metadata


def dequantize(codes: Tensor, metadata: Tensor | None, bits: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Inverts `quantize`.

    Args:
        codes, metadata: results of `quantize`.
        bits: bits of a code.
        groups: number of groups.
        dtype: the model's dtype, in which 16-bit rows are stored.

    Returns:
        Dequantised elements, [..., dim] in float32, or in float64 if `dtype` is float64.
    """
    if bits == 16:
        return codes.contiguous().view(dtype).to(compute_dtype(dtype))
    grouped = unpack(codes, bits).float().unflatten(-1, (groups, -1))
    scale, zero = _scale_and_zero(metadata, bits)
    return (grouped * scale + zero).flatten(-2).to(compute_dtype(dtype))


def scale_and_zero_of(low: Tensor, high: Tensor, bits: int, metadata_bytes: int) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point with which groups are quantised, float32 [..., 1] each.

    Args:
        low, high: smallest and largest element of each group, float32 [..., 1].
        bits: bits of a code.
        metadata_bytes: bytes of a group's metadata, 4 or 2.
    """
    return _scale_and_zero(_metadata(low, high, bits, metadata_bytes), bits)


def _metadata(low: Tensor, high: Tensor, bits: int, metadata_bytes: int) -> Tensor:
    """Returns the metadata of groups, in the form of `quantize`; `low` and `high` are [..., 1]."""
    if metadata_bytes == 2:
        return group_metadata(low, high, bits)[..., 0]
    return torch.cat([((high - low) / (2**bits - 1)).half(), low.half()], dim=-1)


def _scale_and_zero(metadata: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the scale and zero point, float32 [..., 1] each."""
    if metadata.dtype == torch.int16:
        return scale_and_zero(metadata[..., None], bits)
    return metadata.float().split(1, dim=-1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes, uint8 [..., dim], into rows, uint8 [..., dim * bits / 8] (`pages/layout.py`)."""
    rows, below = [], 0
    for field in fields(bits):
        rows.append(_pack_field(codes >> below & (2**field - 1), field))
        below += field
    return torch.cat(rows, dim=-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpacks rows, uint8 [..., dim * bits / 8], into codes, uint8 [..., dim]."""
    dim, below = packed.shape[-1] * 8 // bits, 0
    codes = torch.zeros(*packed.shape[:-1], dim, dtype=torch.uint8, device=packed.device)
    for field in fields(bits):
        row = packed[..., dim * below // 8 : dim * (below + field) // 8]
        codes |= _unpack_field(row, field) << below
        below += field
    return codes


def _pack_field(codes: Tensor, bits: int) -> Tensor:
    planes = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = planes[0].clone()
    for index, plane in enumerate(planes[1:], start=1):
        packed |= plane << (bits * index)
    return packed


def _unpack_field(packed: Tensor, bits: int) -> Tensor:
    return torch.cat([packed >> (bits * plane) & (2**bits - 1) for plane in range(8 // bits)], dim=-1)


def store_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, contents: Contents, dtype: torch.dtype
) -> None:
    """Quantises tokens and writes them to their slots.

    Args:
        pages: memory of the pages, uint8 [pages, page_bytes], written in place.
        tier: layout of the tokens' tier.
        page, slot: place of each token, int64 [n]; distinct except on the null page.
        contents: contents of the n tokens.
        dtype: the model's dtype, used for 16-bit rows.
    """
    check_contents(pages, tier, page, contents.key, contents.value)
    view = segments(pages, tier)
    view.key[page, slot], key_metadata = quantize(
        contents.key, tier.k_bits, tier.k_groups, dtype, metadata_bytes=tier.key_metadata
    )
    view.value[page, slot], value_metadata = quantize(
        contents.value,
        tier.v_bits,
        tier.v_groups,
        dtype,
        metadata_bytes=tier.value_metadata,
        inset=tier.value_inset,
    )
    if key_metadata is not None:
        view.key_metadata[page, slot] = key_metadata
    if value_metadata is not None:
        view.value_metadata[page, slot] = value_metadata
    view.write_scores(page, slot, contents.score)
    view.write_positions(page, slot, contents.position)


def load_tokens(
    pages: Tensor, tier: TierLayout, page: Tensor, slot: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Reads tokens back: keys [n, key_dim] and values [n, value_dim], in the dtype of `dequantize`."""
    check_pages(pages, tier)
    view = segments(pages, tier)
    k_metadata = None if view.key_metadata is None else view.key_metadata[page, slot]
    v_metadata = None if view.value_metadata is None else view.value_metadata[page, slot]
    key = dequantize(view.key[page, slot], k_metadata, tier.k_bits, tier.k_groups, dtype)
    value = dequantize(view.value[page, slot], v_metadata, tier.v_bits, tier.v_groups, dtype)
    return key, value


def move_tokens(
    pages: Tensor, tier: TierLayout, from_page: Tensor, from_slot: Tensor, to_page: Tensor, to_slot: Tensor
) -> None:
    """Copies stored tokens without requantising them; all are read before any is written.

    Args:
        pages: memory of the pages, uint8 [pages, page_bytes], written in place.
        tier: layout of the tokens' tier.
        from_page, from_slot: sources, int64 [n] each.
        to_page, to_slot: targets, int64 [n] each, all distinct. Other implementations require that no target is also
            a source.
    """
    check_pages(pages, tier)
    view = segments(pages, tier)
    parts = (view.key, view.value, view.key_metadata, view.value_metadata, view.score, view.position)
    parts = [part for part in parts if part is not None]
    moved = [part[from_page, from_slot] for part in parts]
    for part, data in zip(parts, moved):
        part[to_page, to_slot] = data
