"""Steps of models that cache latents on a GPU: kernels against the reference, exact latents, and captured steps."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tiny_models import LATENT, greedy, tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import KERNELS, use_backend

LENGTHS = (700, 130, 70)
# heads, rank and rotary dimensions of GLM-4.7-Flash and of DeepSeek V3
SHAPES = {"glm": (20, 512, 64), "deepseek": (128, 512, 64), "small": (6, 128, 32)}


def build(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    heads, rank, rope = SHAPES[shape]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    # a dense MLP, as routing to experts reads the device
    sizes |= {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    return tiny_model("deepseek_v3", dtype=dtype, **{**LATENT, **sizes}).to(device)


def prompts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts of `LENGTHS` with padding before them, and their mask."""
    ids = torch.randint(3, 256, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, :-length] = 0
    return ids.to(device), mask.to(device)


def logits(model: PreTrainedModel, cache: DiffKVCache | DynamicCache, steps: int, backend: str | None = None) -> Tensor:
    """Logits of a prompt's end and of steps over fixed tokens; only the steps run on `backend`."""
    model.set_attn_implementation("diffkv" if isinstance(cache, DiffKVCache) else "sdpa")
    ids, mask = prompts(model.device)
    with torch.no_grad():
        with nullcontext() if backend is None else use_backend("reference"):
            found = [model(ids, attention_mask=mask, **passing(cache)).logits[:, -1]]
        with nullcontext() if backend is None else use_backend(backend):
            for step in range(steps):
                mask = torch.cat([mask, mask.new_ones(len(LENGTHS), 1)], dim=1)
                found.append(model(ids[:, step : step + 1], attention_mask=mask, **passing(cache)).logits[:, -1])
    return torch.stack(found).float()


@pytest.mark.parametrize(
    "dtype, high",
    [
        *((torch.bfloat16, high) for high in ("K8V8", "K8V6", "K8V5", "K8V4", "K16V16")),
        (torch.float16, "K8V8"),
        (torch.float32, "K8V8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_kernels_agree_with_the_reference(device, shape: str, high: str, dtype: torch.dtype) -> None:
    """Steps by both after one prompt."""
    model = build(shape, dtype, device)
    found = {}
    for backend in (KERNELS, "reference"):
        cache = DiffKVCache(model, high=high, window=16)
        found[backend] = logits(model, cache, 24, backend)
        cache.check_integrity()
    assert cache.stores.all[0].high_count.max() > 600
    error = (found[KERNELS] - found["reference"]).norm() / found["reference"].norm()
    assert error < {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", list(SHAPES))
def test_prompts_agree_with_a_dense_cache(device, shape: str, dtype: torch.dtype) -> None:
    """With padding, which kernels attend to."""
    model = build(shape, dtype, device)
    expected = logits(model.float(), DynamicCache(config=model.config), 0)
    got = logits(model.to(dtype), DiffKVCache(model, DiffKVConfig.lossless(window=16)), 0)
    assert (got - expected).norm() < {torch.float32: 1e-3}.get(dtype, 3e-2) * expected.norm()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_exact_latents_give_the_logits_of_a_dense_cache(device, shape: str) -> None:
    model = build(shape, torch.float32, device)
    expected = logits(model, DynamicCache(config=model.config), 10)
    got = logits(model, DiffKVCache(model, DiffKVConfig.lossless(window=16)), 10)
    assert (got - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("high", ["K8V8", "K8V5"])
def test_replays_give_the_logits_of_eager_steps(device, steps, high: str, new: int = 100) -> None:
    model = build("glm", torch.bfloat16, device)
    found = []
    for captured in (False, True):
        cache = DiffKVCache(model, high=high, window=16, cuda_graphs=captured)
        found.append(greedy(model, *prompts(device), new, **passing(cache)))
        cache.check_integrity()
    assert steps[-1].captures == 1 and steps[-1].replays == new - 2
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[1].logits), torch.stack(found[0].logits))
