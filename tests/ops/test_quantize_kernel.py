import interpreted  # noqa: F401
import pytest
import torch
from chosen_ops import store_tokens
from decode_cases import NARROW

from hf_diffkv.config import Precision
from hf_diffkv.ops.backend import BACKENDS, use_backend
from hf_diffkv.ops.quantize import launch, reference
from hf_diffkv.pages import PageLayout
from hf_diffkv.pages.segments import Contents, segments
from hf_diffkv.precision import CODE_BITS, SUPPORTED_BITS

PAGES = 7


def tier_of(precision, key_dim, value_dim, element_bytes=2, **numbers):
    return PageLayout.build(precision, precision, key_dim, value_dim, element_bytes, page_bytes=4096, **numbers).high


def make_tokens(tier, count, dtype):
    generator = torch.Generator().manual_seed(0)
    count = min(count, (PAGES - 1) * tier.capacity)
    key = torch.randn(count, tier.key_dim, generator=generator).mul(5).to(dtype)
    value = torch.randn(count, tier.value_dim, generator=generator).to(dtype)
    places = torch.randperm((PAGES - 1) * tier.capacity, generator=generator)[:count]
    page, slot = 1 + places // tier.capacity, places % tier.capacity
    score = torch.rand(count, generator=generator)
    position = torch.randint(0, 1 << (20 if tier.position_bytes == 4 else 16), (count,), generator=generator)
    return page, slot, Contents(key, value, score, position)


def random_moves(tier):
    """Pages of random bytes, the pages and slots from which tokens move, and their destinations."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (PAGES, tier.page_bytes), generator=generator, dtype=torch.uint8)
    places = torch.randperm(PAGES * tier.capacity, generator=generator)
    count = min(places.numel() // 2, 2 * launch.copy_block(tier) + 1)
    return pages, [
        part for place in places[: 2 * count].view(2, -1) for part in (place // tier.capacity, place % tier.capacity)
    ]


def poisoned(tier):
    return torch.full((PAGES, tier.page_bytes), 0xFF, dtype=torch.uint8)


def assert_stored_alike(tier, tokens, dtype, op=launch):
    pages, expected = poisoned(tier), poisoned(tier)
    op.store_tokens(pages, tier, *tokens, dtype)
    reference.store_tokens(expected, tier, *tokens, dtype)
    assert torch.equal(pages[1:], expected[1:])
    assert (pages[0] == 0xFF).all()
    return pages


def assert_read_alike(pages, tier, tokens, dtype, op=launch):
    read, expected = (each.load_tokens(pages, tier, *tokens[:2], dtype) for each in (op, reference))
    for got, want in zip(read, expected):
        assert got.dtype == torch.float32 and torch.equal(got, want)


def assert_moved_alike(pages, tier, tokens, op=launch):
    """Moves the first half of the tokens to the places of the others."""
    page, slot = (places[: len(places) // 2 * 2].view(2, -1) for places in tokens[:2])
    moves = page[0], slot[0], page[1], slot[1]
    expected = pages.clone()
    op.move_tokens(pages, tier, *moves)
    reference.move_tokens(expected, tier, *moves)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("numbers", NARROW, ids=str)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.sampled(6)
def test_narrow_pages_are_byte_identical_to_the_reference(bits, numbers):
    for precision, dims in ((Precision(bits, 4), (64, 40)), (Precision(5, bits, 2, 1 if bits == 16 else 4), (80, 96))):
        tier = tier_of(precision, *dims, **numbers)
        tokens = make_tokens(tier, 37, torch.float16)
        tokens[2].score[:6] = torch.tensor([0.0, 2.0**-46, 3e5, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1e-38])
        pages = assert_stored_alike(tier, tokens, torch.float16)
        assert_read_alike(pages, tier, tokens, torch.float16)
        assert_moved_alike(pages, tier, tokens)


@pytest.mark.parametrize("v_bits", SUPPORTED_BITS)
@pytest.mark.parametrize("k_bits", SUPPORTED_BITS)
@pytest.mark.sampled(6)
def test_every_pair_of_bits_is_byte_identical_to_the_reference(k_bits, v_bits):
    tier = tier_of(Precision(k_bits, v_bits), 64, 64)
    tokens = make_tokens(tier, 37, torch.float16)
    assert_read_alike(assert_stored_alike(tier, tokens, torch.float16), tier, tokens, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "precision",
    [
        Precision(8, 4),
        Precision(4, 2, 2, 4),
        Precision(16, 16),
        Precision(16, 1, 1, 2),
        Precision(6, 3, 2, 4),
        Precision(5, 6),
    ],
    ids=lambda p: p.name,
)
@pytest.mark.parametrize("key_dim, value_dim", [(8, 16), (80, 80), (96, 64), (128, 128), (256, 256)])
@pytest.mark.sampled(6)
def test_dims_groups_and_dtypes(precision, key_dim, value_dim, dtype):
    tier = tier_of(precision, key_dim, value_dim, dtype.itemsize)
    tokens = make_tokens(tier, 11, dtype)
    assert_read_alike(assert_stored_alike(tier, tokens, dtype), tier, tokens, dtype)


@pytest.mark.parametrize("numbers", [{}, *NARROW], ids=str)
def test_ties_and_ranges_round_like_the_reference(numbers):
    tier = tier_of(Precision(4, 2), 16, 16, **numbers)
    tokens = list(make_tokens(tier, 8, torch.float32))
    grid = torch.arange(16.0)
    key = torch.stack(
        [
            grid,
            grid.clamp(0.5, 14.5).mul(0.5).add(0.25).scatter(0, torch.tensor([0, 15]), torch.tensor([0.0, 15.0])),
            torch.full((16,), 3.14159),
            torch.zeros(16),
            1e-7 * grid,
            1000.3 + 0.001 * grid,
            -60000 + 8000 * grid,
            3e-5 * grid - 1e-4,
        ]
    )
    tokens[2] = tokens[2]._replace(key=key, value=key.flip(0).contiguous())
    assert_stored_alike(tier, tokens, torch.float32)


def test_equal_elements_decode_to_the_zero_point_exactly():
    tier = tier_of(Precision(8, 4), 32, 32)
    page, slot = torch.tensor([1]), torch.tensor([0])
    pages = poisoned(tier)
    constant = torch.full((1, 32), -1.625)
    contents = Contents(constant, constant, torch.ones(1), torch.zeros(1).long())
    launch.store_tokens(pages, tier, page, slot, contents, torch.float16)
    key, value = launch.load_tokens(pages, tier, page, slot, torch.float16)
    assert torch.equal(key, constant) and torch.equal(value, constant)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_error_is_at_most_half_a_step_of_a_dense_computation(bits):
    tier = tier_of(Precision(bits, bits, 4, 1), 64, 64)
    page, slot, contents = make_tokens(tier, 9, torch.float32)
    key, value, score, position = contents
    pages = poisoned(tier)
    launch.store_tokens(pages, tier, page, slot, contents, torch.float16)
    read_key, read_value = launch.load_tokens(pages, tier, page, slot, torch.float16)
    for got, want, groups in ((read_key, key, 4), (read_value, value, 1)):
        want = want.view(len(page), groups, -1)
        span = (want.amax(-1) - want.amin(-1))[..., None]
        # half a step, plus what fp16 rounding of scale and zero point adds at the far end
        bound = span / (2**bits - 1) * 0.5 + (span + want.abs().amax(-1, keepdim=True)) * 2**-10
        assert ((got.view_as(want) - want).abs() <= bound).all()
    view = segments(pages, tier)
    assert torch.equal(view.score[page, slot], score) and torch.equal(view.position[page, slot].long(), position)


def test_null_page_is_neither_written_nor_read():
    tier = tier_of(Precision(8, 4), 32, 32)
    tokens = list(make_tokens(tier, 5, torch.float16))
    tokens[0][1:4] = 0
    tokens[1][1:4] = 2
    pages = assert_stored_alike(tier, tokens, torch.float16)
    key, value = launch.load_tokens(pages, tier, tokens[0], tokens[1], torch.float16)
    assert not key[1:4].any() and not value[1:4].any()
    assert key[0].any() and key[4].any()


def test_no_tokens_and_strided_inputs():
    tier = tier_of(Precision(8, 4), 32, 32)
    page, slot, (key, value, score, position) = make_tokens(tier, 6, torch.float16)
    empty = Contents(key[:0], value[:0], score[:0], position[:0])
    pages = poisoned(tier)
    launch.store_tokens(pages, tier, page[:0], slot[:0], empty, torch.float16)
    assert (pages == 0xFF).all()
    assert [tuple(x.shape) for x in launch.load_tokens(pages, tier, page[:0], slot[:0], torch.float16)] == [(0, 32)] * 2

    wide = torch.full((6, 3, 32), torch.nan, dtype=torch.float16)
    wide[:, 1] = key
    columns = value.T.contiguous().T
    assert_stored_alike(tier, (page, slot, Contents(wide[:, 1], columns, score, position.int())), torch.float16)


def test_bad_inputs_are_named():
    tier = tier_of(Precision(8, 4), 32, 32)
    page, slot, contents = make_tokens(tier, 2, torch.float16)
    for backend in BACKENDS:
        with use_backend(backend):
            with pytest.raises(ValueError, match="pages must be"):
                store_tokens(poisoned(tier)[:, 1:], tier, page, slot, contents, torch.float16)
            with pytest.raises(ValueError, match="key"):
                short = contents._replace(key=contents.key[:1])
                store_tokens(poisoned(tier), tier, page, slot, short, torch.float16)
    with pytest.raises(ValueError, match="float64"):
        launch.store_tokens(poisoned(tier), tier, page, slot, contents, torch.float64)


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize(
    "precision, key_dim, value_dim",
    [
        (Precision(8, 4), 128, 128),
        (Precision(4, 2, 2, 4), 80, 80),
        (Precision(16, 1), 24, 8),
        (Precision(1, 16), 48, 256),
        (Precision(2, 8), 24, 13),
        (Precision(5, 3), 24, 64),
        (Precision(6, 5), 80, 128),
    ],
)
def test_moved_tokens_keep_every_byte(precision, key_dim, value_dim, element_bytes):
    tier = tier_of(precision, key_dim, value_dim, element_bytes)
    pages, moves = random_moves(tier)
    expected, before = pages.clone(), pages.clone()
    reference.move_tokens(expected, tier, *moves)
    launch.move_tokens(pages, tier, *moves)
    assert torch.equal(pages, expected)
    assert not torch.equal(pages, before)
    launch.move_tokens(pages, tier, *(place[:0] for place in moves))
    assert torch.equal(pages, expected)
