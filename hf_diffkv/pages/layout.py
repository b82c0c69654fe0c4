"""The unified page: one size for every precision, six segments, token-major rows.

    [ keys | key metadata | values | value metadata | scores | positions ]

A code is split, from its lowest bit up, into fields of 8, 4, 2 and 1 bits whose widths add up to its number of bits: a
6-bit code has a field of 4 bits and one of 2. A row holds the packed first fields of all D elements, then the packed
second fields, and so on. Fields of b bits are packed in bit planes: with P = 8 / b, byte j holds, from its lowest bits
up, the fields of elements j, j + D/P, j + 2 D/P, ..., so that a kernel unpacks with shifts only, without shuffles.
`unpack` in ops/quantize/reference.py, ops/dequant.py and native/quantize.h read this packing. At 16 bits, a row holds
elements of the model's dtype and has no metadata. The other segments are wide or narrow:

    metadata_bits          32                       16
    metadata of a group    fp16 scale, fp16 zero    uint16; at 8 bits as in wide pages
    score                  float32                  uint16
    position               int32                    uint16, or int32 where positions may be above 65,535

Configurations without token selection (`DiffKVConfig.selects`) have pages without scores and positions. All tokens of a
row are then in one tier, stored in order of position, without gaps after the sinks.

uint16 metadata of b-bit codes is 64 * s + z. The scale is the fp16 number with the bits 32 * s: no sign, 5 bits of
exponent, 5 of mantissa. The zero point is -z * scale * (2^b - 1) * 65 / 4096, which is exact in float32. It lies about
z / 63 into the range that the codes cover, which always contains 0. A uint16 score s is the float32 number with the
bits s * 2^13 + 81 * 2^23, or 0 if s is 0: 6 bits of exponent, 10 of mantissa, up to 2^18. The rounding of both is
described in `pages/segments.py`.

Rotated values of few bits in narrow pages are inset (`pages/inset.py`): their codes are chosen differently but read
the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from ..precision import SUPPORTED_BITS, Precision
from .inset import FULL_RANGE, Inset, inset_of

ROW_ALIGNMENT = 16
PAGE_ALIGNMENT = 64
TARGET_PAGE_BYTES = 6144
MIN_TOKENS = 16
# the search for a page size stops at this fill: narrow tokens have odd sizes and would fill larger pages better, but
# the partly filled last page of each row would then waste more
GOOD_FILL = {32: 0.995, 16: 0.98}
# products with narrow zero points of wider codes are not exact in float32, so those codes always have 32-bit metadata
MOST_NARROW_BITS = 6
NARROW_POSITIONS = 1 << 16
# arguments for the presets' pages: narrow, without scores and positions, holding rotated values
UNIFORM_NUMBERS = {"metadata_bits": 16, "position_bytes": 0, "rotated": True}


@cache
def fields(bits: int) -> tuple[int, ...]:
    """Returns the widths of the fields that codes of `bits` bits are split into, lowest bits first; 16 is one field."""
    return tuple(field for field in (16, 8, 4, 2, 1) if bits & field)


@dataclass(frozen=True)
class TierLayout:
    """Layout of a page that holds tokens of one precision. Offsets and sizes are in bytes.

    Attributes:
        k_bits, v_bits: bits of a key and a value element.
        k_groups, v_groups: quantisation groups of a key and of a value.
        key_dim, value_dim: elements of a key and of a value.
        capacity: tokens per page.
        key_row, value_row: bytes of one token's codes.
        key_metadata, value_metadata: bytes of one group's metadata; 0 at 16 bits.
        value_inset: how values are quantised (`pages/inset.py`).
        score_bytes, position_bytes: bytes of one token's score and position; both 0 if pages have neither.
        page_bytes: bytes of a page.
        token_bytes: bytes of one token in all segments.
        *_offset: start of each segment within the page.
    """

    k_bits: int
    v_bits: int
    k_groups: int
    v_groups: int
    key_dim: int
    value_dim: int
    capacity: int
    key_row: int
    value_row: int
    key_metadata: int
    value_metadata: int
    value_inset: Inset
    score_bytes: int
    position_bytes: int
    token_bytes: int
    key_offset: int
    key_metadata_offset: int
    value_offset: int
    value_metadata_offset: int
    score_offset: int
    position_offset: int
    page_bytes: int

    @property
    def value_parts(self) -> float:
        """`Inset.parts` of values."""
        return self.value_inset.parts

    @property
    def value_shrinkage(self) -> float:
        """`Inset.shrinkage` of values."""
        return self.value_inset.shrinkage

    @property
    def payload_bits(self) -> int:
        """Bits of one token's codes only, as papers count them."""
        return 8 * (self.key_row + self.value_row)


class PageFields(Protocol):
    """Fields of a configuration (`DiffKVConfig`) that determine the page layout."""

    @property
    def high(self) -> Precision: ...
    @property
    def low(self) -> Precision: ...
    @property
    def metadata_bits(self) -> int: ...
    @property
    def page_bytes(self) -> int | None: ...
    @property
    def rotate(self) -> bool: ...
    @property
    def selects(self) -> bool: ...


@dataclass(frozen=True)
class PageLayout:
    """The page format of one pool: both tiers in one page size."""

    high: TierLayout
    low: TierLayout
    page_bytes: int

    @cached_property
    def selects(self) -> bool:
        """Whether pages hold the scores and positions that token selection needs."""
        return self.high.score_bytes > 0

    @property
    def one_tier(self) -> bool:
        """Whether all tokens of all rows are high: there is no token selection and only one precision."""
        return not self.selects and self.high == self.low

    @classmethod
    @cache
    def build(
        cls,
        high: Precision,
        low: Precision,
        key_dim: int,
        value_dim: int,
        element_bytes: int,
        page_bytes: int | None = None,
        *,
        metadata_bits: int = 32,
        position_bytes: int = 4,
        others: tuple[Precision, ...] = (),
        rotated: bool = False,
    ) -> PageLayout:
        """Builds the layout with the page size that both tiers fill best.

        Args:
            high, low: precision of each tier.
            others: precisions that pages of this size hold at other times.
            key_dim, value_dim: elements of one head's key and value.
            element_bytes: bytes of one element of the model's dtype; used at 16 bits.
            page_bytes: upper limit on the page size; None takes `TARGET_PAGE_BYTES`.
            metadata_bits: 32 for wide pages, 16 for narrow ones.
            position_bytes: bytes of a position: 4, or 2 in narrow pages if all positions are below `NARROW_POSITIONS`;
                0 for pages without scores and positions.
            rotated: whether values are rotated.

        Raises:
            ValueError: bits or groups do not divide the head, or a page is too small for one token.
        """
        if (metadata_bits, position_bytes) not in ((32, 4), (32, 0), (16, 4), (16, 2), (16, 0)):
            raise ValueError(f"there are no pages with metadata_bits={metadata_bits}, position_bytes={position_bytes}.")
        for name, precision in (("high", high), ("low", low), *(("until_full", other) for other in others)):
            _check_divides(name, precision, key_dim, value_dim)
        number_bytes = metadata_bits // 8
        sizes = {
            precision: (
                row_bytes(precision.k_bits, key_dim, element_bytes),
                metadata_bytes(precision.k_bits, number_bytes) * precision.k_groups,
                row_bytes(precision.v_bits, value_dim, element_bytes),
                metadata_bytes(precision.v_bits, number_bytes) * precision.v_groups,
                number_bytes if position_bytes else 0,
                position_bytes,
            )
            for precision in (high, low, *others)
        }
        tokens = 1 if page_bytes is not None else MIN_TOKENS
        widest = max((high, *others), key=lambda each: _starts(sizes[each], tokens)[-1])
        smallest = _starts(sizes[widest], tokens)[-1]
        largest = max(TARGET_PAGE_BYTES, _round_up(smallest, PAGE_ALIGNMENT)) if page_bytes is None else page_bytes
        limit = largest // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        if smallest > limit:
            raise ValueError(
                f"page_bytes={page_bytes} cannot hold one {widest.name} token of {smallest} bytes; raise page_bytes."
            )
        best, best_fill = 0, -1.0
        for size in range(_round_up(smallest, PAGE_ALIGNMENT), limit + 1, PAGE_ALIGNMENT):
            fill = min(_capacity(each, size) * sum(each) / size for each in sizes.values())
            if fill > best_fill:
                best, best_fill = size, fill
            if fill >= GOOD_FILL[metadata_bits]:
                break
        demoted = high if position_bytes and high != low else None
        return cls(
            high=_tier(high, sizes[high], key_dim, value_dim, best, rotated),
            low=_tier(low, sizes[low], key_dim, value_dim, best, rotated, demoted),
            page_bytes=best,
        )

    @classmethod
    def of(
        cls, config: PageFields, key_dim: int, value_dim: int, element_bytes: int, max_positions: int | None
    ) -> PageLayout:
        """Builds the layout for a configuration.

        Args:
            max_positions: upper bound on a request's tokens; None if unknown. Other arguments are as in `build`.
        """
        return cls.of_pairs(config, (config.high, config.low), key_dim, value_dim, element_bytes, max_positions)[0]

    @classmethod
    def of_pairs(
        cls,
        config: PageFields,
        precisions: Sequence[Precision],
        key_dim: int,
        value_dim: int,
        element_bytes: int,
        max_positions: int | None,
    ) -> tuple[PageLayout, ...]:
        """Builds the layouts of pages that hold two neighbours of `precisions` at a time, all of one size.

        Args:
            precisions: at least two precisions, in order.
            max_positions: upper bound on a request's tokens; None if unknown. Other arguments are as in `build`.
        """
        few = max_positions is not None and max_positions <= NARROW_POSITIONS
        position_bytes = 2 if few and config.metadata_bits == 16 else 4
        return tuple(
            cls.build(
                *(high, low, key_dim, value_dim, element_bytes, config.page_bytes),
                metadata_bits=config.metadata_bits,
                position_bytes=position_bytes if config.selects else 0,
                others=tuple(each for each in dict.fromkeys(precisions) if each not in (high, low)),
                rotated=config.rotate,
            )
            for high, low in zip(precisions, precisions[1:])
        )


def _starts(sizes: tuple[int, ...], count: int) -> list[int]:
    """Returns the start of each segment for `count` tokens, then the end.

    Args:
        sizes: bytes of one token in each segment.
        count: number of tokens.
    """
    starts = [0]
    for size in sizes:
        starts.append(_round_up(starts[-1] + size * count, ROW_ALIGNMENT))
    return starts


def _capacity(sizes: tuple[int, ...], page_bytes: int) -> int:
    """Returns the number of tokens that fit in a page."""
    count = page_bytes // sum(sizes)
    while _starts(sizes, count)[-1] > page_bytes:
        count -= 1
    return count


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_bytes(bits: int, dim: int, element_bytes: int) -> int:
    """Returns the bytes of one token's codes."""
    return dim * element_bytes if bits == 16 else dim * bits // 8


def metadata_bytes(bits: int, number_bytes: int) -> int:
    """Returns the bytes of one group's metadata; `number_bytes` is 2 in narrow pages, 4 in wide ones."""
    if bits == 16:
        return 0
    return number_bytes if bits <= MOST_NARROW_BITS else 4


def _per_byte(bits: int) -> int:
    """Returns the number of codes that share a byte of the narrowest field."""
    return max(1, 8 // min(fields(bits)))


def _tier(
    precision: Precision,
    sizes: tuple[int, ...],
    key_dim: int,
    value_dim: int,
    page_bytes: int,
    rotated: bool,
    demoted: Precision | None = None,
) -> TierLayout:
    capacity = _capacity(sizes, page_bytes)
    key_row, key_metadata, value_row, value_metadata, score_bytes, position_bytes = sizes
    # values demoted to the same number of bits must stay as they are
    is_inset = rotated and (demoted is None or demoted.v_bits > precision.v_bits)
    is_inset &= value_metadata == 2 * precision.v_groups
    places = ("key", "key_metadata", "value", "value_metadata", "score", "position")
    return TierLayout(
        k_bits=precision.k_bits,
        v_bits=precision.v_bits,
        k_groups=precision.k_groups,
        v_groups=precision.v_groups,
        key_dim=key_dim,
        value_dim=value_dim,
        capacity=capacity,
        key_row=key_row,
        value_row=value_row,
        key_metadata=key_metadata // precision.k_groups,
        value_metadata=value_metadata // precision.v_groups,
        value_inset=inset_of(precision.v_bits, value_dim // precision.v_groups) if is_inset else FULL_RANGE,
        score_bytes=score_bytes,
        position_bytes=position_bytes,
        token_bytes=sum(sizes),
        page_bytes=page_bytes,
        **{f"{place}_offset": start for place, start in zip(places, _starts(sizes, capacity))},
    )


def fits(precision: Precision, key_dim: int, value_dim: int) -> bool:
    """Returns whether rows of codes of a head's keys and values are whole bytes."""
    return key_dim % _per_byte(precision.k_bits) == 0 == value_dim % _per_byte(precision.v_bits)


def _check_divides(name: str, precision: Precision, key_dim: int, value_dim: int) -> None:
    for part, bits, groups, dim in (
        ("k", precision.k_bits, precision.k_groups, key_dim),
        ("v", precision.v_bits, precision.v_groups, value_dim),
    ):
        if dim % _per_byte(bits):
            fitting = tuple(choice for choice in SUPPORTED_BITS if dim % _per_byte(choice) == 0)
            raise ValueError(
                f"{name}.{part}_bits={bits} needs a head_dim divisible by {_per_byte(bits)}; this model has {dim}. "
                f"Use one of {fitting}."
            )
        if bits < 16 and dim % groups:
            raise ValueError(
                f"{name}.{part}_groups={groups} does not divide head_dim={dim}; choose a divisor of {dim}."
            )


def uniform_token_bytes(precision: Precision, key_dim: int, value_dim: int, element_bytes: int) -> int:
    """Returns the bytes of one head's token in pages whose tokens all have one precision."""
    sizes = (key_dim, value_dim, element_bytes)
    return PageLayout.build(precision, precision, *sizes, **UNIFORM_NUMBERS).high.token_bytes
