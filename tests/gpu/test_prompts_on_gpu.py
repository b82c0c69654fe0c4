"""Prompts that enter by kernels, against the PyTorch reference on the same device; the host waits for nothing."""

from __future__ import annotations

import pytest
import torch
from chosen_ops import rotate
from device_waits import no_waits
from given_stores import attend_prompt, new_store
from torch import Tensor

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import begin_forward, check_integrity, read_tokens


def relative(got: Tensor, expected: Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def by_both(
    device, config: DiffKVConfig, dtype: torch.dtype, dim: int, turns: tuple[int, ...], spread: float = 1.0
) -> list[tuple]:
    """Runs a padded prompt and turns in a store of two layers, by kernels and by the reference.

    Queries have a standard deviation of `spread`.

    Returns:
        For each of both, counts, lengths, the last layer's tokens, offsets, and that layer's outputs.
    """
    found = []
    for backend in ("kernels", "reference"):
        generator = torch.Generator().manual_seed(0)
        store = new_store(config, 2, 2, 2, dim, dim, dtype, device)
        for layer in range(2):
            own = config.of_layer(layer)
            store.set_thresholds(layer, own.alpha_high, own.alpha_low)
        # so that nobody looks whether it will do
        store.pool.ensure_free(16 * (sum(turns) // 16 + 8))
        outputs = []
        with use_backend(backend), torch.no_grad():
            for turn, tokens in enumerate(turns):
                valid = torch.ones(2, tokens, dtype=torch.bool, device=device)
                valid[1, : tokens // 3] = False
                begin_forward(store, tokens)
                store.padding.append(tokens, valid if turn == 0 else None)
                for layer in range(2):
                    # keys with a mean far from zero
                    query, key, value = (
                        (torch.randn(2, heads, tokens, dim, generator=generator) + mean).to(device, dtype)
                        for heads, mean in ((8, 0), (2, 1), (2, 0))
                    )
                    inputs = (spread * query, key, value)
                    with no_waits(backend == "kernels" and layer > 0):
                        output = attend_prompt(
                            store, layer, *inputs, softmax=Softmax(dim**-0.5), valid=valid if turn == 0 else None
                        )
                outputs.append(output[0])
        with use_backend("reference"):
            check_integrity(store)
            counts = store.high_count + store.low_count
            found.append((counts, store.length, read_tokens(store, 1), store.key_offset, outputs))
    return found


def assert_tokens_near(got: Tensor, expected: Tensor) -> None:
    """A code may differ by one where a quotient is rounded differently."""
    assert relative(got, expected) < 1e-2


PER_HEAD = DiffKVConfig.preset("balanced", low="K3V3", alpha_high=((float("inf"), 0.0), (0.0, float("inf"))))


@pytest.mark.parametrize(
    "config", [*map(DiffKVConfig.preset, ("quality", "balanced", "small")), PER_HEAD], ids=lambda c: f"{c.high}-{c.low}"
)
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
def test_prompts_and_turns(device, config, dtype, dim, turns) -> None:
    found = by_both(device, config, dtype, dim, turns)
    (counts, lengths, tokens, offset, outputs), (*same, expected, mean, exact) = found
    assert torch.equal(counts, same[0]) and torch.equal(lengths, same[1]) and counts.min() > 0
    assert_tokens_near(tokens.keys, expected.keys)
    assert_tokens_near(tokens.values, expected.values)
    assert relative(offset, mean) < 1e-3
    assert max(map(relative, outputs, exact)) < 2e-2


@pytest.mark.parametrize("make", [DiffKVConfig.paper, DiffKVConfig], ids=["paper", "transformed"])
@pytest.mark.parametrize(
    "dtype, dim, turns",
    [
        (torch.bfloat16, 128, (3000, 2500, 20)),
        (torch.float16, 64, (20, 900, 700)),
        (torch.bfloat16, 80, (500, 500)),
        (torch.float32, 128, (300, 40)),
    ],
    ids=str,
)
def test_levelled_prompts_and_turns(device, make, dtype, dim, turns) -> None:
    """Tokens near a threshold may come to other levels, as sums are added up in another order."""
    found = by_both(device, make(alpha_high=1.6, alpha_low=1.0), dtype, dim, turns, spread=3.0)
    (_, lengths, tokens, _, outputs), (_, same, expected, _, exact) = found
    assert torch.equal(lengths, same)
    alike = tokens.levels == expected.levels
    assert float(alike.float().mean()) > 0.99
    assert all(bool((tokens.levels == level).any()) for level in range(4))
    assert_tokens_near(tokens.keys[alike], expected.keys[alike])
    assert_tokens_near(tokens.values[alike], expected.values[alike])
    assert max(map(relative, outputs, exact)) < 5e-2


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
