"""Appending one token per request: the kernel in Triton's interpreter and the reference, against a loop."""

from __future__ import annotations

import interpreted  # noqa: F401
import pytest
import torch
from chosen_ops import append_token
from torch import Tensor

from hf_diffkv.config import Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.rotation import Rotation, rotation_matrix
from hf_diffkv.pages import LayerRows, PageLayout
from tools.kernels.rows import given_rows

CPU = torch.device("cpu")
FULL = Precision(16, 16)


WRITTEN = ("window_key", "window_value", "window_score", "length", "invalid")


def state(
    dtype: torch.dtype, key_dim: int, value_dim: int, batch: int = 3, slots: int = 5, centered: bool = False
) -> tuple[LayerRows, Tensor, Tensor]:
    """Rows, and a key and a value for each."""
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    layout = PageLayout.build(FULL, FULL, key_dim, value_dim, dtype.itemsize)
    rows = given_rows(
        layout,
        random(batch, 2, slots, key_dim),
        random(batch, 2, slots, value_dim),
        window_score=torch.rand(batch, 2, slots, generator=made),
        length=torch.tensor([0, 7, 14])[:batch].clone(),
        key_offset=torch.randn(batch, 2, key_dim if centered else 0, generator=torch.Generator().manual_seed(2)),
    )
    # laid out as in a model: one token of [batch, tokens, heads, dim]
    key = random(batch, 1, 2, key_dim).transpose(1, 2)[:, :, 0]
    return rows, key, random(batch, 1, 2, 2 * value_dim).transpose(1, 2)[:, :, 0, value_dim:]


def assert_alike(got: LayerRows, expected: LayerRows) -> None:
    for name in WRITTEN:
        assert torch.equal(getattr(got, name).nan_to_num(-7), getattr(expected, name).nan_to_num(-7)), name


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("valid", [None, [True, False, True]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12)], ids=str)
def test_one_slot_of_each_real_row_changes(backend, valid, dtype, dims) -> None:
    got, key, value = state(dtype, *dims)
    expected, *_ = state(dtype, *dims)
    valid = None if valid is None else torch.tensor(valid)
    with use_backend(backend):
        append_token(got, key, value, limit=1e4, valid=valid)
    for request in range(3):
        if valid is not None and not valid[request]:
            continue
        slot = int(expected.length[request]) % 5
        expected.window_key[request, :, slot] = key[request]
        expected.window_value[request, :, slot] = value[request]
        expected.window_score[request, :, slot] = 0
        expected.length[request] += 1
    assert_alike(got, expected)


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 20.0, -20.0])
@pytest.mark.sampled(8)
def test_what_cannot_be_stored_is_flagged(backend, name, bad) -> None:
    for request, valid, flagged in ((1, None, True), (1, [True, True, False], True), (1, [True, False, True], False)):
        rows, key, value = state(torch.bfloat16, 16, 16)
        given = {"key": key.clone(), "value": value.clone()}
        given[name][request, 1, 3] = bad
        with use_backend(backend):
            append_token(rows, **given, limit=10.0, valid=None if valid is None else torch.tensor(valid))
        assert bool(rows.invalid) is flagged
        if flagged:
            # once set, it stays
            with use_backend(backend):
                append_token(rows, *torch.zeros(2, 3, 2, 16).bfloat16(), limit=10.0)
            assert bool(rows.invalid)


def rotated_by_hand(*tensors: Tensor, offset: Tensor | None = None) -> list[Tensor]:
    """Rotates tensors in float64, with the offset subtracted from the first one."""
    rotated = [x.double() @ rotation_matrix(x.shape[2], torch.float64, CPU) for x in tensors]
    return rotated if offset is None else [rotated[0] - offset, *rotated[1:]]


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize(
    "dtype, dims, centered, error",
    [
        (torch.float32, (32, 16), True, 1e-5),
        (torch.bfloat16, (16, 80), False, 2**-8),
        (torch.float16, (16, 16), True, 2**-10),
    ],
    ids=str,
)
@pytest.mark.sampled(8)
def test_tokens_are_rotated_on_their_way(backend, dtype, dims, centered, error) -> None:
    (rows, key, value), (before, *_) = (state(dtype, *dims, centered=centered) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    # more query heads than a program handles
    query = torch.randn(3, 1, 22, dims[0], generator=generator).transpose(1, 2)[:, :, 0].to(dtype)
    *wanted, expected = rotated_by_hand(key, value, query, offset=rows.offset)
    rotation = Rotation(*(rotation_matrix(dim, torch.float32, CPU) for dim in dims))
    with use_backend(backend):
        valid = torch.tensor([True, False, True])
        got = append_token(rows, key, value, limit=1e4, valid=valid, query=query, rotation=rotation)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=error, atol=error)
    for request in (0, 2):
        slot = int(before.length[request]) % 5
        for name, want in zip(("window_key", "window_value"), wanted):
            window = getattr(rows, name)
            torch.testing.assert_close(window[request, :, slot].double(), want[request], rtol=error, atol=error)
            getattr(before, name)[request, :, slot] = window[request, :, slot]
        before.window_score[request, :, slot] = 0
        before.length[request] += 1
    assert_alike(rows, before)
    # without queries, elements that a rotation makes too large
    large = rotation.value.sign()[:, 0].mul(9000).to(dtype).expand_as(value)
    with use_backend(backend):
        assert append_token(rows, key, large, limit=1e4, rotation=rotation) is None
    assert rows.invalid


def test_wrong_shapes_are_refused() -> None:
    rows, key, value = state(torch.float32, 16, 16)
    with use_backend("kernels"), pytest.raises(ValueError, match="key must be \\[3, 2, 16\\]"):
        append_token(rows, torch.zeros(3, 2, 8), value, limit=1.0)
    with use_backend("kernels"), pytest.raises(ValueError, match="must be torch.float32"):
        append_token(rows, key.half(), value, limit=1.0)
