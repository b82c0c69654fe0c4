"""Storage of the dense simulation: rounding to few bits, and rotation by a Hadamard matrix with random signs.

Like `dense_simulation`, it shares no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SimPrecision:
    """Bits (1 to 8, or 16 for unquantised) and quantisation groups of keys and values."""

    k_bits: int
    v_bits: int
    k_groups: int = 1
    v_groups: int = 1

    @classmethod
    def of(cls, precision: Any) -> SimPrecision:
        return cls(precision.k_bits, precision.v_bits, precision.k_groups, precision.v_groups)


def quantise(x: Tensor, bits: int, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [..., groups, d / groups], scale and zero [..., groups, 1] (fp16) of the last dimension of x."""
    x = x.to(torch.float32).unflatten(-1, (groups, -1))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    top = 2**bits - 1
    zero = low.to(torch.float16)
    # A tensor divisor: dividing by a Python number may be turned into a multiplication by its reciprocal.
    scale = ((high - low) / torch.full_like(low, top)).to(torch.float16)
    if not (zero.isfinite().all() and scale.isfinite().all()):
        raise ValueError("values do not fit the fp16 scale and zero")
    step = scale.to(torch.float32)
    # torch.round rounds half to even. The clamp is needed: the rounded scale and zero may not quite cover [low, high].
    codes = torch.round((x - zero.to(torch.float32)) / torch.where(step == 0, 1.0, step)).clamp(0, top)
    return torch.where(step == 0, 0.0, codes), scale, zero


# by elements of a group: parts of a rotated value's range, one of which is left free at each end, and 1024 times the
# shrinkage, for 2, 3 and 4 bits
INSETS = {
    16: ((10.5, 941), (48, 1009)),
    32: ((7.5, 926), (24, 1000)),
    64: ((6, 919), (14, 992), (48, 1016)),
    96: ((5.5, 920), (12, 993), (32, 1015)),
    128: ((5, 909), (10, 989), (24, 1013)),
    192: ((4.5, 897), (9, 991), (20, 1014)),
    256: ((4.5, 910), (8, 989), (20, 1015)),
    512: ((4, 897), (7, 992), (16, 1017)),
}


def inset_of(bits: int, elements: int) -> tuple[float, float]:
    """Parts and shrinkage of the largest group of at most `elements`; (0, 1) if there are none."""
    sizes = [size for size in INSETS if size <= elements]
    if not sizes or not 2 <= bits < 2 + len(INSETS[sizes[-1]]):
        return 0.0, 1.0
    parts, shrinkage = INSETS[sizes[-1]][bits - 2]
    return float(parts), shrinkage / 1024


def quantise_narrow(
    x: Tensor, bits: int, groups: int = 1, inset: tuple[float, float] = (0.0, 1.0)
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises in float32 with scales of 5 bits of mantissa and zero points of 6 bits; the range includes 0.

    inset: x is divided by the second number. The first is the number of parts of the range, one of which lies between
    each of its ends and the outermost code; 0 for codes at the ends.
    """
    x = x.to(torch.float32).unflatten(-1, (groups, -1))
    x = x / torch.full_like(x, inset[1])
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if inset[0]:
        part = (high - low) / torch.full_like(low, inset[0])
        low, high = low + part, high - part
    low, high = low.clamp(max=0), high.clamp(min=0)
    top = 2**bits - 1
    half = ((high - low) / torch.full_like(low, top)).to(torch.float16).to(torch.float64)
    unit = 2.0 ** (half.clamp(min=2.0**-14).log2().floor() - 5)
    scale = ((half / unit).round() * unit).clamp(max=63.0 * 2**10)
    covered = (scale * top).to(torch.float32)
    shift = ((covered - (low + high)) * 31.5 / torch.where(covered == 0, 1.0, covered)).round().clamp(0, 63)
    zero = (-shift * scale * top * 65 / 4096).to(torch.float32)
    step = scale.to(torch.float32)
    codes = torch.round((x - zero) / torch.where(step == 0, 1.0, step)).clamp(0, top)
    return torch.where(step == 0, 0.0, codes), step, torch.where(step == 0, 0.0, zero)


def nearest_score(score: Tensor) -> Tensor:
    """float32 sums above 2^-46 and below 2^18 with 10 bits of mantissa, halves to even; 0 stays."""
    unit = 2.0 ** (score.double().clamp(min=2.0**-46).log2().floor() - 10)
    return ((score.double() / unit).round() * unit).to(torch.float32)


def decode(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 values of what `quantise` returned, groups joined again."""
    return (codes * scale.to(torch.float32) + zero.to(torch.float32)).flatten(-2)


def round_trip(
    x: Tensor,
    bits: int,
    groups: int,
    dtype: torch.dtype,
    narrow: bool = False,
    inset: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Returns x after storing it, in its own dtype; 16 bits stand for `dtype`, the model's."""
    if bits == 16:
        return x.to(dtype).to(x.dtype)
    if narrow and bits <= 6:
        return decode(*quantise_narrow(x, bits, groups, inset)).to(x.dtype)
    return decode(*quantise(x, bits, groups)).to(x.dtype)


def inner_cells(x: Tensor, bits: tuple[int, int], groups: tuple[int, int]) -> Tensor:
    """Decoded rows clamped to the middles of the outermost cells that they will have with one or two bits fewer.

    bits, groups: before and after; other combinations leave x as it is.
    """
    merged = 2 ** (bits[0] - bits[1]) if 0 < bits[0] - bits[1] < 3 and groups[0] == groups[1] else 1
    if merged == 1:
        return x
    found = []
    for part in x.chunk(groups[0], -1):
        low, steps = part.min(-1, keepdim=True)[0], 2 ** bits[0] - 1
        step = ((part.max(-1, keepdim=True)[0] - low) / steps).clamp(min=1e-12)
        code = (part - low) / step
        found.append(low + step * code.clamp((merged - 1) / 2, steps - (merged - 1) / 2))
    return torch.cat(found, -1)


def merged_cells(x: Tensor, bits: tuple[int, int], groups: int, inset: tuple[float, float]) -> Tensor:
    """Decoded rows to quantise again with an inset, so that each new code stands for a whole number of old ones.

    The decoded result then has the same product with x as x itself. Codes of as many bits stay as they are.
    """
    merged, top = 2 ** (bits[0] - bits[1]), 2 ** bits[1] - 1
    rows = []
    for row in x.double():
        parts = row.chunk(groups)
        codes, decoded = [], []
        for part in parts:
            step = float(part.max() - part.min()) / (2 ** bits[0] - 1)
            before = ((part - part.min()) / (step or 1.0)).round()
            codes.append(before.div(merged, rounding_mode="floor"))
            decoded.append(part.min() + step * (codes[-1] * merged + (merged - 1) / 2))
        product = float((torch.cat(decoded) * row).sum())
        scale = float(row.square().sum()) / product if product else 1.0
        for index, (part, code) in enumerate(zip(parts, codes)):
            step = float(part.max() - part.min()) / (2 ** bits[0] - 1) * merged
            # the grid is all of the range but two of the inset's parts
            end = step * top / (1 - 2 / inset[0]) / inset[0]
            decoded[index] = scale * (decoded[index] + end * (1.0 * (code == top) - 1.0 * (code == 0)))
        rows.append(torch.cat(decoded) * inset[1])
    return torch.stack(rows).to(x.dtype) if rows else x


def adapted_round_trip(
    x: Tensor, moment: Tensor, bits: int, groups: int, narrow: bool = False, damping: float = 0.1
) -> Tensor:
    """Returns keys x [n, d] after storing them, rounded for queries with the sum `moment` [d, d] of q q^T.

    From the last channel to the first, each takes the code nearest to where the mean of (q . e)^2 would be least if the
    channels before it need not be rounded. A group's least and largest element keep the codes they have by themselves.

    Args:
        damping: share of the moment's mean diagonal that is added to it.
    """
    codes, scale, zero = (quantise_narrow if narrow and bits <= 6 else quantise)(x, bits, groups)
    parts = x.to(torch.float32).unflatten(-1, (groups, -1))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    is_low, is_high = parts == low, parts == high
    first, last = (
        torch.where(end, codes, -1).amax(-1, keepdim=True).expand_as(parts).flatten(-2).double()
        for end in (is_low, is_high)
    )
    scale, zero = (part.double().expand_as(parts).flatten(-2) for part in (scale, zero))
    step = torch.where(scale == 0, 1.0, scale)
    given, is_low, is_high = parts.flatten(-2).double(), is_low.flatten(-2), is_high.flatten(-2)
    square = moment.double() + damping * moment.diagonal().double().mean() * torch.eye(x.shape[1], dtype=torch.float64)
    kept, error = torch.zeros_like(given), torch.zeros_like(given)
    for channel in range(x.shape[1] - 1, -1, -1):
        free, fixed = slice(0, channel + 1), slice(channel + 1, None)
        best = -error[:, fixed] @ torch.linalg.solve(square[free, free], square[free, fixed])[channel]
        code = ((given[:, channel] + best - zero[:, channel]) / step[:, channel]).round()
        code = code.clamp(first[:, channel], last[:, channel])
        code = torch.where(is_low[:, channel], first[:, channel], code)
        code = torch.where(is_high[:, channel] & ~is_low[:, channel], last[:, channel], code)
        kept[:, channel] = zero[:, channel] + code * scale[:, channel]
        error[:, channel] = kept[:, channel] - given[:, channel]
    return kept.to(x.dtype)


def hadamard(size: int) -> list[list[int]]:
    """Sylvester's matrix of a power of two: [[H, H], [H, -H]]."""
    if size == 1:
        return [[1]]
    half = hadamard(size // 2)
    return [row + row for row in half] + [row + [-x for x in row] for row in half]


def random_signs(count: int) -> list[int]:
    """+1 where the top bit of Knuth's MMIX generator is set, seeded with 1."""
    signs, state = [], 1
    for _ in range(count):
        state = (6364136223846793005 * state + 1442695040888963407) & 0xFFFF_FFFF_FFFF_FFFF
        signs.append(1 if state >= 1 << 63 else -1)
    return signs


def rotation(dim: int) -> Tensor:
    """float64 [dim, dim], R of R x: signs first, then Hadamard in blocks of the largest power of two in `dim`."""
    size = 1
    while dim % (2 * size) == 0:
        size *= 2
    block, signs = hadamard(size), random_signs(dim)
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for out in range(dim):
        for channel in range(dim):
            if out // size == channel // size:
                matrix[out, channel] = block[out % size][channel % size] * signs[channel] / size**0.5
    return matrix
