"""Appending one token per request: the kernel in Triton's interpreter, and the reference, against a loop."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import pytest
import torch

from hf_diffkv.ops.append import append_rotated, append_token
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.rotation import rotation_matrix

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)


CPU = torch.device("cpu")


def state(dtype: torch.dtype, key_dim: int, value_dim: int, batch: int = 3, slots: int = 5) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(dtype)

    return {
        "window_key": random(batch, 2, slots, key_dim),
        "window_value": random(batch, 2, slots, value_dim),
        "window_score": torch.rand(batch, 2, slots, generator=made),
        "length": torch.tensor([0, 7, 14])[:batch].clone(),
        "invalid": torch.zeros((), dtype=torch.bool),
        # as a model leaves them: one token of [batch, tokens, heads, dim]
        "key": random(batch, 1, 2, key_dim).transpose(1, 2)[:, :, 0],
        "value": random(batch, 1, 2, 2 * value_dim).transpose(1, 2)[:, :, 0, value_dim:],
    }


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("valid", [None, [True, False, True]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12)], ids=str)
def test_one_slot_of_each_real_row_changes(backend, valid, dtype, dims) -> None:
    got, expected = state(dtype, *dims), state(dtype, *dims)
    valid = None if valid is None else torch.tensor(valid)
    with use_backend(backend):
        append_token(**got, limit=1e4, valid=valid)
    for request in range(3):
        if valid is not None and not valid[request]:
            continue
        slot = int(expected["length"][request]) % 5
        expected["window_key"][request, :, slot] = expected["key"][request]
        expected["window_value"][request, :, slot] = expected["value"][request]
        expected["window_score"][request, :, slot] = 0
        expected["length"][request] += 1
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 20.0, -20.0])
@pytest.mark.sampled(8)
def test_what_cannot_be_stored_is_flagged(backend, name, bad) -> None:
    for request, valid, flagged in ((1, None, True), (1, [True, True, False], True), (1, [True, False, True], False)):
        made = state(torch.bfloat16, 16, 16)
        made[name] = made[name].clone()
        made[name][request, 1, 3] = bad
        with use_backend(backend):
            append_token(**made, limit=10.0, valid=None if valid is None else torch.tensor(valid))
        assert bool(made["invalid"]) is flagged
        if flagged:
            # once set it stays
            made["key"], made["value"] = torch.zeros(3, 2, 16).bfloat16(), torch.zeros(3, 2, 16).bfloat16()
            with use_backend(backend):
                append_token(**made, limit=10.0)
            assert bool(made["invalid"])


def rotated_by_hand(made: dict[str, Any], query: torch.Tensor, offset: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Key, value and query in float64."""
    matrices = {dim: rotation_matrix(dim, torch.float64, CPU) for dim in (made["key"].shape[2], made["value"].shape[2])}
    key, value, query = (x.double() @ matrices[x.shape[2]] for x in (made["key"], made["value"], query))
    return key if offset is None else key - offset, value, query


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
    made, before = state(dtype, *dims), state(dtype, *dims)
    generator = torch.Generator().manual_seed(1)
    # more query heads than a program takes
    query = torch.randn(3, 1, 22, dims[0], generator=generator).transpose(1, 2)[:, :, 0].to(dtype)
    offset = torch.randn(3, 2, dims[0], generator=generator) if centered else None
    key, value, expected = rotated_by_hand(made, query, offset)
    matrices = [rotation_matrix(dim, torch.float32, CPU) for dim in dims]
    options = {"key_rotation": matrices[0], "value_rotation": matrices[1], "offset": offset, "limit": 1e4}
    with use_backend(backend):
        got = append_rotated(*made.values(), query, valid=torch.tensor([True, False, True]), **options)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=error, atol=error)
    for request in (0, 2):
        slot = int(before["length"][request]) % 5
        for name, want in (("window_key", key), ("window_value", value)):
            torch.testing.assert_close(made[name][request, :, slot].double(), want[request], rtol=error, atol=error)
            before[name][request, :, slot] = made[name][request, :, slot]
        before["window_score"][request, :, slot] = 0
        before["length"][request] += 1
    for name in ("window_key", "window_value", "window_score", "length", "invalid"):
        assert torch.equal(made[name], before[name]), name
    # what a rotation makes too large, without queries
    made["value"] = matrices[1].sign()[:, 0].mul(9000).to(dtype).expand_as(made["value"])
    with use_backend(backend):
        assert append_rotated(*made.values(), None, **options) is None
    assert made["invalid"]


def test_wrong_shapes_are_refused() -> None:
    made = state(torch.float32, 16, 16)
    with use_backend("kernels"), pytest.raises(ValueError, match="key must be \\[3, 2, 16\\]"):
        append_token(**{**made, "key": torch.zeros(3, 2, 8)}, limit=1.0)
    with use_backend("kernels"), pytest.raises(ValueError, match="must be torch.float32"):
        append_token(**{**made, "key": made["key"].half()}, limit=1.0)
