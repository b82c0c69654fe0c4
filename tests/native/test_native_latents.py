"""Native steps with absorbed queries against attention over the tokens that the store gives back, and the reference."""

from __future__ import annotations

import pytest
import torch
from given_stores import attend_prompt, attend_step
from torch import Tensor

from hf_diffkv import DiffKVConfig
from hf_diffkv.native.library import use_instructions
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import KVHeads, Store, begin_forward, read_tokens
from hf_diffkv.store.read import LayerTokens

SCALING = 0.2


def random_states(tokens: int, dims: tuple[int, int], heads: int, batch: int = 2, seed: int = 0) -> list[Tensor]:
    """Rotary keys, latents and absorbed queries."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((1, dims[0]), (1, dims[1]), (heads, sum(dims)))
    return [torch.randn(batch, count, tokens, dim, generator=generator) for count, dim in sizes]


def run(
    backend: str,
    config: DiffKVConfig,
    states: list[Tensor],
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    valid: Tensor | None = None,
) -> tuple[list[Tensor], LayerTokens, Store]:
    """Stores a prompt, then `steps` tokens; returns the steps' outputs, what the last one found, and the store."""
    rope, latent, query = (tensor.to(dtype) for tensor in states)
    dims = (rope.shape[-1], latent.shape[-1])
    store = Store(config, 1, rope.shape[0], KVHeads(1, *dims, dtype, torch.device("cpu"), latent=True))
    prompt = rope.shape[2] - steps
    store.set_thresholds(0, config.alpha_high, config.alpha_low)
    outputs, softmax = [], Softmax(SCALING)
    with use_backend(backend), torch.no_grad():
        assert store.ops.backend == backend
        begin_forward(store, prompt)
        parts = (query[:, :, :prompt], rope[:, :, :prompt], latent[:, :, :prompt])
        attend_prompt(store, 0, *parts, softmax, valid)
        store.padding.append(prompt, valid)
        for token in range(prompt, prompt + steps):
            # what the step attends to: after it, the oldest token of the window is compressed
            before = read_tokens(store, 0)
            begin_forward(store, 1)
            parts = (tensor[:, :, token : token + 1] for tensor in (query, rope, latent))
            outputs.append(attend_step(store, 0, *parts, softmax))
            store.padding.append(1, None)
    return outputs, before, store


def dense(before: LayerTokens, states: list[Tensor]) -> Tensor:
    """Attention from the newest token over itself and what the store gave back before, in float64."""
    rope, latent, query = (tensor[:, :, -1].double() for tensor in states)
    keys, values = (
        torch.cat([held[:, 0].double(), new], dim=1) for held, new in zip((before.keys, before.values), (rope, latent))
    )
    there = torch.cat([before.mask, torch.ones_like(before.mask[..., :1])], dim=-1)
    logits = torch.einsum("bhd,btd->bht", query, torch.cat([keys, values], dim=-1)) * SCALING
    weights = logits.masked_fill(~there, -torch.inf).softmax(-1)
    return torch.einsum("bht,btd->bhd", weights, values)[:, :, None]


def uniform(name: str, **fields: object) -> DiffKVConfig:
    return DiffKVConfig(high=name, low=name, alpha_high=0.0, **{"window": 8, "metadata_bits": 16, **fields})


@pytest.mark.parametrize("name", ["K16V16", "K8V8", "K8V6", "K8V5", "K8V4", "K8V3", "K8V4g2/4"])
@pytest.mark.parametrize("dims", [(8, 16), (64, 512), (32, 256)])
def test_precisions(name: str, dims: tuple[int, int]) -> None:
    states = random_states(70, dims, heads=5)
    outputs, before, store = run("native", uniform(name), states)
    torch.testing.assert_close(outputs[-1].double(), dense(before, states), rtol=0, atol=2e-4)
    expected, _, reference = run("reference", uniform(name), states)
    torch.testing.assert_close(torch.cat(outputs), torch.cat(expected), rtol=0, atol=2e-4)
    # that something is lost, and tokens are in pages
    exact = read_tokens(store, 0).values[:, :, :-3] - states[1][:, :, :-3]
    assert bool(exact.abs().max() > 1e-3) == (name != "K16V16")
    assert int(reference.high_count.min()) > 50


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_and_dtypes(heads: int, dtype: torch.dtype) -> None:
    states = random_states(60, (16, 32), heads)
    outputs, before, store = run("native", uniform("K8V4"), states, dtype=dtype)
    given = [tensor.to(dtype) for tensor in states]
    torch.testing.assert_close(outputs[-1].double(), dense(before, given), rtol=0, atol=2e-2)
    if dtype == torch.float32:
        torch.testing.assert_close(outputs[-1].double(), dense(before, given), rtol=0, atol=2e-4)


@pytest.mark.parametrize("rotated", [True, False])
def test_stored_as_they_are(rotated: bool) -> None:
    states = random_states(60, (16, 48), heads=3)
    outputs, before, store = run("native", uniform("K8V8", rotate=rotated, center=rotated), states)
    torch.testing.assert_close(outputs[-1].double(), dense(before, states), rtol=0, atol=2e-4)


def test_long_rows_with_padding_and_threads() -> None:
    """Several chunks, whose results are joined; the second request is shorter."""
    states = random_states(2600, (16, 32), heads=6)
    valid = torch.ones(2, 2597, dtype=torch.bool)
    valid[1, :1200] = False
    threads_before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            outputs, before, store = run("native", uniform("K8V8"), states, valid=valid)
        finally:
            torch.set_num_threads(threads_before)
        torch.testing.assert_close(outputs[-1].double(), dense(before, states), rtol=0, atol=2e-4)


def test_significance() -> None:
    """With levels by significance both backends store the same tokens at the same levels, with the same sums."""
    config = DiffKVConfig(high="K8V6", low="K8V3", alpha_high=2.0, alpha_low=1.2, window=8)
    states = random_states(120, (16, 32), heads=4, seed=3)
    (outputs, _, store), (expected, _, reference) = (run(name, config, states, 12) for name in ("native", "reference"))
    torch.testing.assert_close(torch.cat(outputs), torch.cat(expected), rtol=0, atol=1e-3)
    mine, theirs = read_tokens(store, 0), read_tokens(reference, 0)
    assert (mine.levels == theirs.levels).float().mean() > 0.99
    same = mine.levels == theirs.levels
    torch.testing.assert_close(mine.score[same], theirs.score[same], rtol=1e-2, atol=1e-3)
    assert {0, 1, 2, 3} <= set(mine.levels.unique().tolist())


@pytest.mark.parametrize("instructions", ["portable", "avx2", "avx512", "avx512vnni", "avx512bf16"])
def test_instruction_sets(instructions: str) -> None:
    states = random_states(60, (64, 128), heads=5)
    try:
        with use_instructions(instructions):
            outputs, before, store = run("native", uniform("K8V4"), states, dtype=torch.bfloat16)
    except ValueError:
        pytest.skip("this processor has none")
    given = [tensor.bfloat16() for tensor in states]
    torch.testing.assert_close(outputs[-1].double(), dense(before, given), rtol=0, atol=2e-2)


def test_queries_of_other_dims_are_refused() -> None:
    states = random_states(30, (16, 32), heads=2)
    _, _, store = run("native", uniform("K8V8"), states, 1)
    begin_forward(store, 1)
    rope, latent, query = (tensor[:, :, :1] for tensor in states)
    with pytest.raises(ValueError, match="48 if it is absorbed"):
        attend_step(store, 0, query[..., :40], rope, latent, Softmax(SCALING))
