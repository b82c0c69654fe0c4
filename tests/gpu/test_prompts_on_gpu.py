"""Prompts that enter by kernels, against the PyTorch reference on the same device; the host waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.rotation import rotate, rotation_matrix
from hf_diffkv.store import Store, attend_tokens, check_integrity, read_tokens


def relative(got: Tensor, expected: Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def no_waits(checked: bool) -> Iterator[None]:
    """Makes every wait of the host for the device an error."""
    torch.cuda.set_sync_debug_mode("error" if checked else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["quality", "balanced", "small"])
@pytest.mark.parametrize(
    "dtype, dim, turns",
    [
        (torch.bfloat16, 128, (3000, 700, 20)),
        (torch.float16, 64, (20, 900, 5)),
        (torch.bfloat16, 80, (500, 500)),
        (torch.float32, 128, (300, 40)),
    ],
    ids=str,
)
def test_prompts_and_turns(device, name, dtype, dim, turns) -> None:
    found = {}
    for backend in ("kernels", "reference"):
        generator = torch.Generator().manual_seed(0)
        store = Store(DiffKVConfig.preset(name), 2, 2, 2, dim, dim, dtype, device)
        outputs = []
        with use_backend(backend), torch.no_grad():
            for turn, tokens in enumerate(turns):
                valid = torch.ones(2, tokens, dtype=torch.bool, device=device)
                valid[1, : tokens // 3] = False
                store.begin(tokens)
                store.padding.append(tokens, valid if turn == 0 else None)
                for layer in range(2):
                    # keys with a mean far from zero
                    query, key, value = (
                        (torch.randn(2, heads, tokens, dim, generator=generator) + mean).to(device, dtype)
                        for heads, mean in ((8, 0), (2, 1), (2, 0))
                    )
                    inputs = (query, key, value)
                    with no_waits(backend == "kernels" and layer > 0):
                        output = attend_tokens(
                            store, layer, *inputs, scaling=dim**-0.5, valid=valid if turn == 0 else None
                        )
                outputs.append(output[0])
        with use_backend("reference"):
            check_integrity(store)
            found[backend] = (store.high_count, store.length, read_tokens(store, 1), store.key_offset, outputs)
    (counts, lengths, tokens, offset, outputs), (*same, expected, mean, exact) = found["kernels"], found["reference"]
    assert torch.equal(counts, same[0]) and torch.equal(lengths, same[1]) and counts.min() > 0
    # a code may differ by one where a quotient is rounded differently
    assert max(relative(tokens.keys, expected.keys), relative(tokens.values, expected.values)) < 1e-2
    assert relative(offset, mean) < 1e-3
    assert max(map(relative, outputs, exact)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256, 512])
def test_rotation(device, dim, dtype) -> None:
    matrix = rotation_matrix(dim, torch.float32, device)
    tensor = torch.randn(2, 333, 3, dim, device=device).to(dtype).transpose(1, 2)
    offset = torch.randn(2, 3, dim, device=device)
    for turned, taken in ((matrix, offset), (matrix.mT, None)):
        with use_backend("kernels"):
            got = rotate(tensor, turned, taken)
        expected = tensor.double() @ turned.double() - (0 if taken is None else taken[:, :, None].double())
        assert relative(got, expected) < max(1e-6, 0.5 * torch.finfo(dtype).eps)
