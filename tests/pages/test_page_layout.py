"""The page format: six segments that do not overlap, are aligned, and hold as many tokens as fit."""

from __future__ import annotations

import itertools

import pytest

from hf_diffkv.config import Precision
from hf_diffkv.pages import PageLayout, TierLayout
from hf_diffkv.pages.inset import FULL_RANGE, inset_of
from hf_diffkv.precision import SUPPORTED_BITS

HIGH, LOW = Precision(8, 4), Precision(4, 2)


def token_segments(
    precision: Precision,
    key_dim: int,
    value_dim: int,
    element_bytes: int,
    metadata_bits: int = 32,
    position_bytes: int = 4,
) -> list[int]:
    """Bytes of one token in each segment, by definition: codes, scale and zero per group, score, position."""

    def codes(bits: int, dim: int) -> int:
        return dim * (8 * element_bytes if bits == 16 else bits) // 8

    def metadata(bits: int, groups: int) -> int:
        return 0 if bits == 16 else (metadata_bits // 8 if bits <= 6 else 4) * groups

    return [
        codes(precision.k_bits, key_dim),
        metadata(precision.k_bits, precision.k_groups),
        codes(precision.v_bits, value_dim),
        metadata(precision.v_bits, precision.v_groups),
        metadata_bits // 8,
        position_bytes,
    ]


def check_tier(
    tier: TierLayout, precision: Precision, key_dim: int, value_dim: int, element_bytes: int, **numbers: int
) -> None:
    sizes = token_segments(precision, key_dim, value_dim, element_bytes, **numbers)
    assert (tier.key_metadata * tier.k_groups, tier.value_metadata * tier.v_groups) == (sizes[1], sizes[3])
    assert (tier.score_bytes, tier.position_bytes) == tuple(sizes[4:])
    assert (tier.key_row, tier.value_row) == (sizes[0], sizes[2])
    assert tier.token_bytes == sum(sizes)
    assert tier.payload_bits == 8 * (sizes[0] + sizes[2])
    assert (tier.key_dim, tier.value_dim) == (key_dim, value_dim)
    starts = [
        tier.key_offset,
        tier.key_metadata_offset,
        tier.value_offset,
        tier.value_metadata_offset,
        tier.score_offset,
        tier.position_offset,
    ]
    ends = [start + tier.capacity * size for start, size in zip(starts, sizes)]
    assert starts[0] == 0
    for end, following in zip(ends, [*starts[1:], tier.page_bytes]):
        assert end <= following
    assert all(start % 16 == 0 for start in starts)
    assert tier.capacity == most_tokens(sizes, tier.page_bytes)


def most_tokens(sizes: list[int], page_bytes: int) -> int:
    """The most tokens whose segments, each rounded up to 16 bytes, fit; counted up one by one."""
    count = 0
    while sum(-(-size * (count + 1) // 16) * 16 for size in sizes) <= page_bytes:
        count += 1
    return count


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("k_bits, v_bits", list(itertools.product(SUPPORTED_BITS, SUPPORTED_BITS)))
def test_segments_of_every_precision(head_dim: int, k_bits: int, v_bits: int) -> None:
    precision = Precision(k_bits, v_bits)
    layout = PageLayout.build(precision, Precision(1, 1), head_dim, head_dim, 2)
    assert layout.page_bytes == layout.high.page_bytes == layout.low.page_bytes
    assert layout.page_bytes % 64 == 0
    check_tier(layout.high, precision, head_dim, head_dim, 2)
    check_tier(layout.low, Precision(1, 1), head_dim, head_dim, 2)


@pytest.mark.parametrize("element_bytes", [2, 4, 8])
@pytest.mark.parametrize(
    "high, low, key_dim, value_dim",
    [
        (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4), 128, 128),
        (Precision(16, 8, 1, 4), Precision(2, 4, 16, 1), 192, 128),
        (Precision(16, 16), Precision(16, 16), 64, 256),
        (Precision(4, 8, 8, 8), Precision(1, 1), 8, 32),
    ],
)
def test_groups_element_sizes_and_unequal_dims(
    high: Precision, low: Precision, key_dim: int, value_dim: int, element_bytes: int
) -> None:
    layout = PageLayout.build(high, low, key_dim, value_dim, element_bytes)
    check_tier(layout.high, high, key_dim, value_dim, element_bytes)
    check_tier(layout.low, low, key_dim, value_dim, element_bytes)


@pytest.mark.parametrize(
    "head_dim, high_token, low_token",
    [(64, 112, 64), (80, 136, 76), (96, 160, 88), (128, 208, 112), (256, 400, 208)],
)
def test_token_sizes_and_fill(head_dim: int, high_token: int, low_token: int) -> None:
    layout = PageLayout.build(HIGH, LOW, head_dim, head_dim, 2)
    assert (layout.high.token_bytes, layout.low.token_bytes) == (high_token, low_token)
    for tier in (layout.high, layout.low):
        assert tier.capacity >= 16
        assert tier.capacity * tier.token_bytes >= 0.97 * layout.page_bytes


@pytest.mark.parametrize("head_dim, page_bytes, high, low", [(64, 1792, 16, 28), (128, 5824, 28, 52)])
def test_sizes_without_waste(head_dim: int, page_bytes: int, high: int, low: int) -> None:
    """At these head sizes both tiers fill the page to the last byte."""
    layout = PageLayout.build(HIGH, LOW, head_dim, head_dim, 2)
    assert (layout.page_bytes, layout.high.capacity, layout.low.capacity) == (page_bytes, high, low)
    assert high * layout.high.token_bytes == low * layout.low.token_bytes == page_bytes


@pytest.mark.parametrize("numbers", [{"metadata_bits": 16, "position_bytes": 2}, {"metadata_bits": 16}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "high, low",
    [(HIGH, LOW), (Precision(6, 4), Precision(5, 3)), (Precision(16, 4, 1, 2), Precision(1, 8, 4, 2))],
    ids=lambda precision: precision.name,
)
def test_narrow_pages(high: Precision, low: Precision, head_dim: int, numbers: dict[str, int]) -> None:
    layout = PageLayout.build(high, low, head_dim, head_dim, 2, **numbers)
    check_tier(layout.high, high, head_dim, head_dim, 2, **numbers)
    check_tier(layout.low, low, head_dim, head_dim, 2, **numbers)


@pytest.mark.parametrize(
    "precision, head_dim, token_bytes",
    [
        (Precision(4, 2), 64, 56),
        (Precision(5, 3), 64, 72),
        (Precision(6, 4), 64, 88),
        (Precision(4, 2), 128, 104),
        (Precision(5, 3), 128, 136),
        (Precision(6, 4), 128, 168),
        (Precision(8, 4), 128, 202),
        (Precision(8, 8), 128, 268),
        (Precision(16, 16), 128, 516),
    ],
    ids=str,
)
def test_narrow_token_sizes(precision: Precision, head_dim: int, token_bytes: int) -> None:
    layout = PageLayout.build(precision, precision, head_dim, head_dim, 2, metadata_bits=16, position_bytes=2)
    assert layout.high.token_bytes == token_bytes


@pytest.mark.parametrize("metadata_bits, position_bytes", [(8, 4), (32, 2), (16, 8)])
def test_pages_that_are_not_there(metadata_bits: int, position_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"metadata_bits={metadata_bits}, position_bytes={position_bytes}"):
        PageLayout.build(HIGH, LOW, 64, 64, 2, metadata_bits=metadata_bits, position_bytes=position_bytes)


@pytest.mark.parametrize("limit", [256, 300, 1000, 4096, 20000])
def test_page_bytes_is_an_upper_limit(limit: int) -> None:
    layout = PageLayout.build(HIGH, LOW, 128, 128, 2, page_bytes=limit)
    assert layout.page_bytes <= limit
    assert layout.page_bytes % 64 == 0
    check_tier(layout.high, HIGH, 128, 128, 2)
    check_tier(layout.low, LOW, 128, 128, 2)


def test_the_smallest_page_holds_one_token() -> None:
    assert PageLayout.build(HIGH, LOW, 128, 128, 2, page_bytes=256).high.capacity == 1
    with pytest.raises(ValueError, match="page_bytes=255"):
        PageLayout.build(HIGH, LOW, 128, 128, 2, page_bytes=255)


def test_large_heads_still_get_sixteen_tokens_a_page() -> None:
    layout = PageLayout.build(Precision(16, 16), LOW, 512, 512, 4)
    assert layout.high.capacity >= 16


@pytest.mark.parametrize("metadata_bits", [16, 32])
@pytest.mark.parametrize("dim", [80, 96, 128, 192, 256, 320, 512])
def test_every_precision_has_a_page_by_default(dim: int, metadata_bits: int) -> None:
    for k_bits, v_bits in itertools.product(SUPPORTED_BITS, SUPPORTED_BITS):
        precision = Precision(k_bits, v_bits)
        layout = PageLayout.build(precision, precision, dim, dim, 2, metadata_bits=metadata_bits)
        assert layout.high.capacity >= 16


@pytest.mark.parametrize(
    "high, low, key_dim, value_dim, message",
    [
        (Precision(8, 4, 3, 1), LOW, 128, 128, r"high\.k_groups=3 does not divide head_dim=128"),
        (Precision(8, 4, 1, 5), LOW, 128, 128, r"high\.v_groups=5 does not divide head_dim=128"),
        (HIGH, Precision(4, 2, 1, 3), 96, 128, r"low\.v_groups=3 does not divide head_dim=128"),
        (HIGH, Precision(1, 1), 100, 100, r"low\.k_bits=1 needs a head_dim divisible by 8; this model has 100"),
        (HIGH, Precision(4, 2), 100, 98, r"low\.v_bits=2 needs a head_dim divisible by 4; this model has 98"),
        (HIGH, Precision(3, 2), 100, 100, r"low\.k_bits=3 needs .* by 8; .* has 100\. Use one of \(2, 4, 6, 8, 16\)"),
        (HIGH, Precision(4, 3), 100, 98, r"low\.v_bits=3 needs .* by 8; .* has 98\. Use one of \(4, 8, 16\)"),
        (Precision(6, 5), LOW, 100, 100, r"high\.v_bits=5 needs a head_dim divisible by 8; this model has 100"),
        (Precision(6, 4), LOW, 98, 128, r"high\.k_bits=6 needs a head_dim divisible by 4; this model has 98"),
    ],
)
def test_what_does_not_divide_the_head(
    high: Precision, low: Precision, key_dim: int, value_dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PageLayout.build(high, low, key_dim, value_dim, 2)


@pytest.mark.parametrize("dim", [80, 128, 256])
def test_tokens_that_are_larger_than_usual_pages(dim: int) -> None:
    """The page grows to hold some of them, whatever the alignment makes of their size."""
    for bits in SUPPORTED_BITS:
        high = Precision(16, bits)
        layout = PageLayout.build(high, LOW, dim, 64, 4)
        check_tier(layout.high, high, dim, 64, 4)
        assert layout.high.capacity >= 16


@pytest.mark.parametrize(
    "high, low, numbers, inset",
    [
        ("K4V2", "K3V2", {"position_bytes": 0}, (True, True)),
        ("K6V5", "K3V4", {"position_bytes": 0}, (False, True)),
        # the low tier takes tokens of the high one
        ("K4V2", "K3V2", {"position_bytes": 2}, (True, False)),
        ("K8V4", "K4V2", {"position_bytes": 4}, (True, True)),
        ("K4V2", "K4V2", {"position_bytes": 2}, (True, True)),
        ("K8V4", "K4V2", {"metadata_bits": 32}, (False, False)),
        ("K8V4", "K4V2", {"position_bytes": 4, "rotated": False}, (False, False)),
        ("K2V8", "K2V1", {"position_bytes": 0}, (False, False)),
    ],
)
def test_where_values_are_inset(high: str, low: str, numbers: dict, inset: tuple[bool, bool]) -> None:
    """Rotated narrow values of 2 to 4 bits are, but not where values of as many bits are demoted to them."""
    numbers = {"metadata_bits": 16, "rotated": True, **numbers}
    layout = PageLayout.build(Precision.parse(high), Precision.parse(low), 64, 64, 2, **numbers)
    assert tuple(tier.value_inset != FULL_RANGE for tier in (layout.high, layout.low)) == inset
    for tier in (layout.high, layout.low):
        assert tier.value_inset in (FULL_RANGE, inset_of(tier.v_bits, 64))


def test_insets_of_groups() -> None:
    layout = PageLayout.build(
        Precision(8, 2, 1, 2), Precision(4, 3), 64, 128, 2, metadata_bits=16, position_bytes=0, rotated=True
    )
    assert (layout.high.value_inset, layout.low.value_inset) == (inset_of(2, 64), inset_of(3, 128))


def test_precision_is_refused_by_itself() -> None:
    for bits in (*(set(range(-1, 33)) - set(SUPPORTED_BITS)), True, "8"):
        with pytest.raises(ValueError) as caught:
            Precision(bits, 4)
        assert "k_bits" in str(caught.value) and str(SUPPORTED_BITS) in str(caught.value)
