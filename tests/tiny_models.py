"""Tiny random decoder models, one per architecture, and ragged batches of prompts for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

PAD = 0
VOCABULARY = 128
LAYER_KINDS = ["sliding_attention", "full_attention"]
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING: dict[str, Any] = {"sliding_window": 24, "layer_types": LAYER_KINDS}
LATENT: dict[str, Any] = {
    **MOE,
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
# rotary keys of latents have 8 bits or more
PRECISIONS_OF_LATENTS = {"high": "K8V4", "low": "K8V2"}
# what an architecture needs beyond COMMON; None removes an argument
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {**MOE, "sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**MOE, "decoder_sparse_step": 1},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "phi3": {"original_max_position_embeddings": 1024, "sliding_window": None},
    "olmo2": {},
    "gpt_oss": {**MOE, **SLIDING},
    "granite": {"attention_multiplier": 0.25, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "deepseek_v3": {**LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "diffllama": {},
    "jetmoe": {**MOE, "kv_channels": 16, "head_dim": None, "num_attention_heads": None},
    "bloom": {"n_layer": 2, "n_head": 4},
}
MAY_BE_NONE = ("eos_token_id", "sliding_window")


def tiny_model(
    name: str,
    attention: str = "sdpa",
    *,
    dtype: torch.dtype = torch.float32,
    sharpness: float = 2.0,
    seed: int = 1,
    **options: Any,
) -> PreTrainedModel:
    """Returns a random model whose attention is far from uniform.

    Args:
        name: the `model_type`; `SPECIAL` holds what some need.
        attention: its attention implementation.
        sharpness: factor on query and key weights; the larger, the more attention concentrates on few tokens.
        seed: seed of the weights.
        **options: further config arguments.
    """
    arguments = {**COMMON, **SPECIAL.get(name, {}), **options}
    arguments = {key: value for key, value in arguments.items() if value is not None or key in MAY_BE_NONE}
    config = CONFIG_MAPPING[name](**arguments)
    torch.manual_seed(0)
    # Mistral 4's class for generation is not among the automatic ones
    create = transformers.Mistral4ForCausalLM._from_config if name == "mistral4" else AutoModelForCausalLM.from_config
    model = create(config, attn_implementation=attention, dtype=dtype).eval()
    if dtype == torch.float64 and name == "gpt_oss":
        model.set_experts_implementation("eager")  # the grouped matmul has no float64
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim >= 2:
                parameter.copy_(values * _gain(path, sharpness) / parameter.shape[-1] ** 0.5)
            elif "sinks" in path:
                parameter.copy_(values)
            elif "q_norm" in path or "k_norm" in path:
                parameter.copy_(sharpness * (1 + 0.1 * values))
    return model


def with_plain_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with any experts computed one by one, as grouped products support few dtypes."""
    if getattr(model, "set_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    return model


def _gain(path: str, sharpness: float) -> float:
    return sharpness if any(part in path for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0


def greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor, tokens: int, **options: Any) -> Any:
    """Returns the output of greedy `generate()`, with logits."""
    options = {"max_new_tokens": tokens, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, attention_mask=mask, do_sample=False, **options)


def ragged_prompts(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Left-padded ids and their attention mask, int64 [len(lengths), max(lengths)] each."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    return ids * mask + PAD * (1 - mask), mask
