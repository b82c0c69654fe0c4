"""The unified page: one size for every precision, six segments, token-major rows.

    [ keys | key metadata | values | value metadata | scores | positions ]

A code's bits are, from the lowest up, fields of 8, 4, 2 and 1 bits, those that its number of bits is the sum of: 6 bits
are a field of 4 and one of 2. A row is the packed first fields of all D elements, then the packed second ones, and so
on. Fields of b bits are packed in bit planes: with P = 8 / b, their byte j holds, from its lowest bits up, those of
elements j, j + D/P, j + 2 D/P, ... so that a kernel unpacks with shifts and never shuffles. That is all of packing;
`unpack` in ops/quantize/reference.py, ops/dequant.py and native/quantize.h read it. At 16 bits rows are elements of
the model's dtype, and metadata is absent. The rest is wide or narrow:

    metadata_bits          32                       16
    metadata of a group    fp16 scale, fp16 zero    uint16; at 8 bits as in wide pages
    score                  float32                  uint16
    position               int32                    uint16, or int32 where positions may be above 65,535

Pages of configurations that never choose between tokens (`DiffKVConfig.selects`) have no scores and no positions. All
tokens of a row are of one tier then, in the order of their positions and without gaps behind the sinks.

uint16 metadata of b-bit codes is 64 * s + z. The scale is the fp16 number whose bits are 32 * s: no sign, 5 bits of
exponent, 5 of mantissa. The zero point is -z * scale * (2^b - 1) * 65 / 4096, which float32 holds exactly: about z / 63
of the range that the codes cover, which always has 0 in it. A uint16 score s is the float32 number whose bits are
s * 2^13 + 81 * 2^23, and 0 where s is 0: 6 bits of exponent, 10 of mantissa, up to 2^18. How all of it is rounded is
said in `pages/segments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from ..precision import SUPPORTED_BITS, Precision

ROW_ALIGNMENT = 16
PAGE_ALIGNMENT = 64
TARGET_PAGE_BYTES = 6144
MIN_TOKENS = 16
# a page that is filled so well is not made larger: narrow tokens, of odd sizes, fill only large pages better, whose
# last one of each row is the emptier
GOOD_FILL = {32: 0.995, 16: 0.98}
# products with narrow zero points of more bits are not exact in float32; they take metadata of 32 bits in any case
MOST_NARROW_BITS = 6
NARROW_POSITIONS = 1 << 16


@cache
def fields(bits: int) -> tuple[int, ...]:
    """Bits of each field that codes of `bits` bits are stored in, from the lowest bits up; 16 is one."""
    return tuple(field for field in (16, 8, 4, 2, 1) if bits & field)


@dataclass(frozen=True)
class TierLayout:
    """How a page holds tokens of one precision. Offsets and sizes in bytes.

    Attributes:
        capacity: tokens per page.
        key_row, value_row: bytes of one token's codes.
        key_metadata, value_metadata: bytes of one group's metadata; 0 at 16 bits.
        score_bytes, position_bytes: of one token; both 0 where pages have neither.
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
    def payload_bits(self) -> int:
        """Bits of the codes alone, the figure the papers count."""
        return 8 * (self.key_row + self.value_row)


class PageFields(Protocol):
    """What a configuration (`DiffKVConfig`) says of pages."""

    @property
    def high(self) -> Precision: ...
    @property
    def low(self) -> Precision: ...
    @property
    def metadata_bits(self) -> int: ...
    @property
    def page_bytes(self) -> int | None: ...
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
        """Whether pages hold what tokens are chosen by, scores and positions."""
        return self.high.score_bytes > 0

    @property
    def one_tier(self) -> bool:
        """Whether all tokens of all rows are high, as none is chosen and there is one precision."""
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
    ) -> PageLayout:
        """Chooses the page size that both tiers fill best.

        Args:
            key_dim, value_dim: elements of one head's key and value.
            element_bytes: size of one element of the model's dtype (used at 16 bits).
            page_bytes: an upper limit on the size; None means `TARGET_PAGE_BYTES`.
            metadata_bits: 32 for wide pages, 16 for narrow ones.
            position_bytes: 4, or 2 in narrow pages if all positions are below `NARROW_POSITIONS`; 0 for pages that
                have neither scores nor positions.

        Raises:
            ValueError: bits or groups that do not divide the head, or a page too small for one token.
        """
        if (metadata_bits, position_bytes) not in ((32, 4), (32, 0), (16, 4), (16, 2), (16, 0)):
            raise ValueError(f"there are no pages with metadata_bits={metadata_bits}, position_bytes={position_bytes}.")
        for name, precision in (("high", high), ("low", low)):
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
            for precision in (high, low)
        }
        smallest = _starts(sizes[high], 1 if page_bytes is not None else MIN_TOKENS)[-1]
        largest = max(TARGET_PAGE_BYTES, _round_up(smallest, PAGE_ALIGNMENT)) if page_bytes is None else page_bytes
        limit = largest // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        if smallest > limit:
            raise ValueError(
                f"page_bytes={page_bytes} cannot hold one {high.name} token of {smallest} bytes; raise page_bytes."
            )
        best, best_fill = 0, -1.0
        for size in range(_round_up(smallest, PAGE_ALIGNMENT), limit + 1, PAGE_ALIGNMENT):
            fill = min(_capacity(each, size) * sum(each) / size for each in sizes.values())
            if fill > best_fill:
                best, best_fill = size, fill
            if fill >= GOOD_FILL[metadata_bits]:
                break
        return cls(
            high=_tier(high, sizes[high], key_dim, value_dim, best),
            low=_tier(low, sizes[low], key_dim, value_dim, best),
            page_bytes=best,
        )

    @classmethod
    def of(
        cls, config: PageFields, key_dim: int, value_dim: int, element_bytes: int, max_positions: int | None
    ) -> PageLayout:
        """The format that a configuration asks for.

        Args:
            max_positions: no request has more tokens; None where that is not known. Others as in `build`.
        """
        few = max_positions is not None and max_positions <= NARROW_POSITIONS
        position_bytes = 2 if few and config.metadata_bits == 16 else 4
        return cls.build(
            *(config.high, config.low, key_dim, value_dim, element_bytes, config.page_bytes),
            metadata_bits=config.metadata_bits,
            position_bytes=position_bytes if config.selects else 0,
        )


def _starts(sizes: tuple[int, ...], count: int) -> list[int]:
    """Start of each segment for `count` tokens, then the end; `sizes` are bytes of a token in each of them."""
    starts = [0]
    for size in sizes:
        starts.append(_round_up(starts[-1] + size * count, ROW_ALIGNMENT))
    return starts


def _capacity(sizes: tuple[int, ...], page_bytes: int) -> int:
    """Tokens that fit into a page."""
    count = page_bytes // sum(sizes)
    while _starts(sizes, count)[-1] > page_bytes:
        count -= 1
    return count


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_bytes(bits: int, dim: int, element_bytes: int) -> int:
    """Of one token's codes."""
    return dim * element_bytes if bits == 16 else dim * bits // 8


def metadata_bytes(bits: int, number_bytes: int) -> int:
    """Of one group, where narrow pages have `number_bytes` of 2."""
    if bits == 16:
        return 0
    return number_bytes if bits <= MOST_NARROW_BITS else 4


def _per_byte(bits: int) -> int:
    """Codes that share a byte of the field with the fewest bits."""
    return max(1, 8 // min(fields(bits)))


def _tier(precision: Precision, sizes: tuple[int, ...], key_dim: int, value_dim: int, page_bytes: int) -> TierLayout:
    capacity = _capacity(sizes, page_bytes)
    key_row, key_metadata, value_row, value_metadata, score_bytes, position_bytes = sizes
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
        score_bytes=score_bytes,
        position_bytes=position_bytes,
        token_bytes=sum(sizes),
        page_bytes=page_bytes,
        **{f"{place}_offset": start for place, start in zip(places, _starts(sizes, capacity))},
    )


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
