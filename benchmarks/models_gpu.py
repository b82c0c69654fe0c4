"""Model and caches for the GPU benchmarks of decoding and prompts. The model has the shape of Llama-3-8B."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from lean import LEAN, register
from measure import Session, relative_error
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.config.presets import PRESETS

# as in Transformers, and with attention that does not expand keys and values
STATIC, LEAN_STATIC = "StaticCache, compiled", "StaticCache, lean, compiled"
DEFAULT = "DiffKV balanced"
# captured, with a compiled forward
COMPILED = ("DiffKV balanced, compiled", "DiffKV 1/0, compiled")
DIFFKV = {
    **{f"DiffKV {name}": DiffKVConfig.preset(name) for name in PRESETS},
    # the published thresholds for Llama-3-8B
    "DiffKV paper": DiffKVConfig.paper(alpha_high=1.0, alpha_low=0.02),
    "DiffKV 1/0": DiffKVConfig(alpha_high=1.0, alpha_low=0.0),
    "DiffKV K8V4": DiffKVConfig(alpha_high=0.0, alpha_low=0.0),
    "DiffKV K4V2": DiffKVConfig(alpha_high=1e9, alpha_low=0.0),
    "DiffKV 1/0.3": DiffKVConfig(alpha_high=1.0, alpha_low=0.3),
    "DiffKV 1/0, not captured": DiffKVConfig(alpha_high=1.0, alpha_low=0.0, cuda_graphs=False),
    "DiffKV balanced, compiled": DiffKVConfig.preset("balanced"),
    "DiffKV 1/0, compiled": DiffKVConfig(alpha_high=1.0, alpha_low=0.0),
}
# makes a cache for a number of tokens
Makers = dict[str, Callable[[int], Cache]]


def build_model(session: Session, tiny: bool) -> PreTrainedModel:
    """Builds the model with the usual random weights.

    Larger queries and keys would turn 16-bit logits into noise after 32 layers.
    """
    size = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    size |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    if tiny:
        size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(
        **size,
        initializer_range=0.02 * (4096 / size["hidden_size"]) ** 0.5,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    register()
    torch.manual_seed(0)
    with session.device:
        model = AutoModelForCausalLM.from_config(config, dtype=session.dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def caches(session: Session, model: PreTrainedModel, names: list[str] | None) -> Makers:
    """Returns, by name, a function from a number of tokens to each cache, the most informative first.

    Caches whose backend is missing are left out.
    """
    config = model.config
    made: Makers = {
        DEFAULT: lambda tokens: DiffKVCache(config, DIFFKV[DEFAULT]),
        "DynamicCache": lambda tokens: DynamicCache(config=config),
        STATIC: lambda tokens: StaticCache(config=config, max_cache_len=tokens),
        LEAN_STATIC: lambda tokens: StaticCache(config=config, max_cache_len=tokens),
    }
    for name, choices in DIFFKV.items():
        made.setdefault(name, lambda tokens, choices=choices: DiffKVCache(config, choices))
    for backend in ("quanto", "hqq"):
        name = f"QuantizedCache, {backend} 4 bit"
        if names is not None and not any(part in name for part in names):
            continue
        try:
            QuantizedCache(backend=backend, config=config, nbits=4)
        except ImportError:
            session.leave_out({"kind": "length", "cache": name}, f"{backend} is not installed")
            continue
        made[name] = lambda tokens, backend=backend: QuantizedCache(backend=backend, config=config, nbits=4)
    return {name: make for name, make in made.items() if names is None or any(part in name for part in names)}


def attention_of(name: str) -> str:
    if name.startswith("DiffKV"):
        return "diffkv"
    return LEAN if name == LEAN_STATIC else "sdpa"


@torch.no_grad()
def check_lossless(session: Session, model: PreTrainedModel, tokens: Tensor) -> dict:
    """Errors of the logits against float32; stops if lossless DiffKV is worse than DynamicCache."""
    logits = {}
    for name, cache in (
        ("dense", DynamicCache(config=model.config)),
        ("lossless", DiffKVCache(model.config, DiffKVConfig.lossless())),
    ):
        model.set_attn_implementation("diffkv" if name == "lossless" else "sdpa")
        model(tokens[:, :-4], **passing(cache))
        steps = [model(token, **passing(cache)).logits for token in tokens[:, -4:].split(1, dim=1)]
        logits[name] = torch.cat(steps, dim=1)
    model.set_attn_implementation("sdpa")
    size = sum(parameter.numel() for parameter in model.parameters())
    exact_model = copy.deepcopy(model).to(session.device if session.has_memory(8 * size) else "cpu", torch.float32)
    exact = exact_model(tokens.to(exact_model.device), logits_to_keep=4).logits.to(session.device)
    errors = {f"{name}_error": relative_error(found, exact) for name, found in logits.items()}
    # rounding differs, so neither bounds the other
    if not errors["lossless_error"] <= max(1.5 * errors["dense_error"], 1e-4):
        raise SystemExit(f"logits differ from float32: {errors}; nothing timed.")
    return errors
