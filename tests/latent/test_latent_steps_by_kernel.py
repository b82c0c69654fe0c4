"""Steps of tiny models by Triton kernels against the reference."""

import interpreted  # noqa: F401
import pytest
import torch
from latent_models import latent_model

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing
from hf_diffkv.ops.backend import KERNELS, use_backend
from hf_diffkv.ops.decode_attention import launch
from hf_diffkv.ops.prefill_attention import cpu


@pytest.mark.parametrize("fields", [{"high": "K8V8"}, {"high": "K8V4", "sinks": 2, "rotate": False}])
def test_prompts_steps_and_turns(fields, monkeypatch) -> None:
    """A prompt, which PyTorch runs, steps, and a turn, against the reference; every step launches the kernel."""
    model = latent_model("deepseek_v3", num_hidden_layers=1)
    model.set_attn_implementation("diffkv")
    ids = torch.randint(3, 100, (2, 30), generator=torch.Generator().manual_seed(4))
    launched = []
    kernel = launch.latent_kernel
    monkeypatch.setattr(launch, "latent_kernel", Counted(kernel, launched))
    logits = []
    for backend in ("reference", KERNELS):
        with use_backend(backend), torch.no_grad():
            cache = DiffKVCache(model, window=8, **fields)
            parts = [model(part, **passing(cache)).logits for part in ids.split([25, 1, 3, 1], dim=1)]
            cache.check_integrity()
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-4)
    assert len(launched) == 2
    store = cache.stores.all[0]
    with use_backend(KERNELS):
        assert store.ops.backend == KERNELS and int(store.high_count.min()) > 10
        assert store.ops.prefill_attention is cpu.prefill_attention


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel, launched) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        self.launched.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize(
    "fields", [{"high": "K8V6", "low": "K8V4", "alpha_high": 2.0, "alpha_low": 1.0}, {"high": "K8V4g1/8"}]
)
def test_what_the_kernel_does_not_take_is_left_to_the_reference(fields) -> None:
    """Pages with scores, and latents of eight groups."""
    model = latent_model("deepseek_v3", num_hidden_layers=1)
    model.set_attn_implementation("diffkv")
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(4))
    logits = []
    for backend in ("reference", KERNELS):
        with use_backend(backend), torch.no_grad():
            cache = DiffKVCache(model, window=8, **fields)
            parts = [model(part, **passing(cache)).logits for part in ids.split([37, 1, 1, 1], dim=1)]
            assert cache.stores.all[0].ops.backend == "reference"
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
