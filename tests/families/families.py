"""Every text family of Transformers that generates: options of a tiny model, and what `DiffKVCache` compresses of it.

`docs/models.md` is written from this file by `report.py`; `test_families.py` checks that it is true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiny_models import LATENT

SLIDING, CHUNKED, LINEAR, BOTH = "sliding window", "chunked", "linear or convolution", "linear and attention in one"
MLP, READER = "no attention", "reads the keys and values of an earlier layer"
# class of the layer in the cache, by what is said of it in the table
KEPT_CLASSES = {
    SLIDING: "DynamicSlidingWindowLayer",
    CHUNKED: "DynamicSlidingWindowLayer",
    LINEAR: "LinearAttentionLayer",
    BOTH: "LinearAttentionAndFullAttentionLayer",
    MLP: "DummyLayer",
    READER: "DummyLayer",
}


# encoders, decoders of encoder-decoder models and of other modalities, models whose tokens are no text
OTHER = frozenset(
    (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blt camembert cpmant "
        "data2vec-text electra ernie gemma4_assistant gemma4_unified_assistant git marian mbart megatron-bert "
        "moshi moss_transcribe_diarize musicgen musicgen_melody mvp pegasus plbart prophetnet reformer "
        "rembert roberta roberta-prelayernorm roc_bert roformer rwkv trocr whisper xlm xlm-roberta "
        "xlm-roberta-xl xlnet xlstm xmod"
    ).split()
)
# wrappers around a text model that has its own row, and second names of one
WRAPPERS = frozenset(
    (
        "dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2 gpt-sw3 llama4 mllama phi4_multimodal "
        "qwen3_5 qwen3_5_moe qwen4_exp"
    ).split()
)


@dataclass(frozen=True)
class Family:
    """Expectations of one `model_type`.

    Attributes:
        options: arguments of its configuration beyond the common ones.
        layers: number of layers of the tiny model.
        compressed: indices of the compressed layers.
        kept: kinds of the other layers, in the table's words.
        refused: part of the error if the family is refused.
        latents: whether its full-attention layers cache latents (multi-head latent attention).
        since: first release in which Transformers' attention interface runs it; refused before.
    """

    options: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    compressed: tuple[int, ...] = (0, 1)
    kept: tuple[str, ...] = ()
    refused: str = ""
    latents: bool = False
    since: tuple[int, int] = (0, 0)


MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FULL_LAYERS = {"layer_types": ["full_attention", "full_attention"]}
WINDOWED = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
CONV = {"layer_types": ["conv", "full_attention"]}
SHARING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 24,
    "num_kv_shared_layers": 2,
    "tie_word_embeddings": True,
}
PER_LAYER_INPUT = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
HYBRID = {"num_hidden_layers": 4, "head_dim": None, "use_mamba_kernels": False}
HYBRID_LAYERS = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}

_FULL: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "apertus apertus1p5_text arcee aria_text biogpt bitnet cohere ctrl ernie4_5 exaone flint gemma glm "
            "glm4 gpt_bigcode gpt_neox gpt2 granite helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder "
            "jais2 llama ministral3 nanochat nemotron olmo olmo2 opt persimmon phi qwen2 qwen3 seed_oss smollm3 "
            "stablelm starcoder2"
        ).split()
    },
    **{
        name: MOE
        for name in (
            "flex_olmo glm4_moe granitemoe granitemoeshared hy_v3 minimax_m2 olmoe phimoe qwen2_moe qwen3_moe "
            "sarvam_moe solar_open"
        ).split()
    },
    "dbrx": {
        **dict.fromkeys(
            "hidden_size intermediate_size num_attention_heads num_hidden_layers num_key_value_heads head_dim "
            "max_position_embeddings".split()
        ),
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 1024,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {**MOE, **FULL_LAYERS, "sliding_window": None},
    "ernie4_5_moe": {**MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "mistral": {"sliding_window": None},
    "mixtral": {**MOE, "sliding_window": None},
    "phi3": {"original_max_position_embeddings": 1024, "sliding_window": None},
}
_WINDOWED: dict[str, dict[str, Any]] = {
    **{name: {} for name in "beam cohere2 cwm exaone4 granite_swa ministral olmo3".split()},
    **{name: MOE for name in "cohere2_moe exaone_moe gpt_oss granitemoe_swa kolibri1 laguna mellum".split()},
    "afmoe": {**MOE, "num_dense_layers": 1},
    "cohere_compass_text": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "mimo_v2_flash": {
        **MOE,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "modernbert-decoder": {"local_attention": 24},
    "vaultgemma": {"query_pre_attn_scalar": 16},
}
_LINEAR: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MOE, **MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {
        **MOE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "lfm2": CONV,
    "lfm2_moe": {**MOE, **CONV, "num_dense_layers": 1},
    "lfm3": CONV,
    "lara_mini": {**MOE, **DELTA},
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": {**MOE, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**MOE, **DELTA},
}
_LATENT: dict[str, dict[str, Any]] = {
    **{name: LATENT for name in "deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 sarvam_mla youtu".split()},
    "axk1": {**LATENT, "n_routed_experts": 16, "num_local_experts": 16, "num_experts": 16},
    # older releases count its layers, two attentions each, under a name of their own
    "longcat_flash": {**LATENT, "num_layers": 1, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "head_dim": 8},
    "mistral4": {**LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "head_dim": 16},
}
_LATENT_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (LATENT, "choose the tokens") for name in "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4".split()},
    "deepseek_v4": (
        {
            **MOE,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["moe", "moe"],
        },
        "choose the tokens",
    ),
    "minimax_m3_vl_text": (
        {
            **MOE,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
        "choose the tokens",
    ),
    "qwen4_exp_text": (
        {
            **MOE,
            **DELTA,
            "n_group": None,
            "ngram_vocab_size_base": 100,
            "hc_lowrank": 8,
            "make_ngram_vocab_size_divisible_by": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        "choose the tokens",
    ),
    "diffllama": ({}, "splits values"),
    "doge": ({}, "adds a learned bias"),
    "inkling_text": (
        {
            **MOE,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "sliding_window_size": 24,
            "rel_extent": 64,
        },
        "adds a learned position bias",
    ),
    "jetmoe": ({**MOE, "kv_channels": 16, "head_dim": None, "num_attention_heads": None}, "repeats keys and values"),
    "dory": (
        {**WINDOWED, "n_input_layers": 0, "n_recurrent_layers": 2, "n_output_layers": 0},
        "its own layers to the cache",
    ),
    "minimax": ({**MOE, "layer_types": ["linear_attention", "full_attention"]}, "its own cache class"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "attention interface"),
    "falcon": ({"head_dim": None}, "attention interface"),
    "gpt_neo": (
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 24,
            "num_hidden_layers": None,
            "num_attention_heads": None,
        },
        "attention interface",
    ),
    "gpt_neox_japanese": ({}, "attention interface"),
    "mpt": ({"use_cache": True, "n_layers": 2, "n_heads": 4, "d_model": 64}, "attention interface"),
    "openai-gpt": ({}, "attention interface"),
    "xglm": ({}, "attention interface"),
    "mamba": ({}, "no attention layers"),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16}, "no attention layers"),
    "falcon_mamba": ({}, "no attention layers"),
}
# families of the same kind that are new enough to have their options differ
_INKLING2, _BIAS = {**_REFUSED["inkling_text"][0], "unpadded_vocab_size": 128}, _REFUSED["inkling_text"][1]
_REFUSED["inkling2_text"] = (_INKLING2, _BIAS)
_REFUSED["inkling2_loop_text"] = (
    {**_INKLING2, "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
    _BIAS,
)

FAMILIES: dict[str, Family] = {
    **{name: Family(options) for name, options in _FULL.items()},
    **{name: Family({**WINDOWED, **options}, compressed=(1,), kept=(SLIDING,)) for name, options in _WINDOWED.items()},
    **{name: Family(options, compressed=(1,), kept=(LINEAR,)) for name, options in _LINEAR.items()},
    **{name: Family(options, latents=True) for name, options in _LATENT.items()},
    **{
        name: Family({**LATENT, **_LATENT_LINEAR}, compressed=(1,), kept=(LINEAR,), latents=True)
        for name in ("bailing_hybrid", "kimi_linear")
    },
    "gemma3n_text": Family(
        {**SHARING, **PER_LAYER_INPUT, "laurel_rank": 8, "activation_sparsity_pattern": None},
        layers=6,
        compressed=(1, 3),
        kept=(SLIDING, READER),
    ),
    "gemma4_text": Family(
        {**SHARING, **PER_LAYER_INPUT, "global_head_dim": 16}, layers=6, compressed=(1, 3), kept=(SLIDING, READER)
    ),
    "gemma4_unified_text": Family(
        {**SHARING, "global_head_dim": 16}, layers=6, compressed=(1, 3), kept=(SLIDING, READER)
    ),
    **{name: Family(dict(_GPTJ), since=(5, 24)) for name in ("codegen", "gptj")},
    "hrm_text": Family({}, layers=16, compressed=tuple(range(16))),
    "llama4_text": Family(
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 96,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0],
        },
        compressed=(1,),
        kept=(CHUNKED,),
    ),
    "nemotron_h": Family(
        {
            **MOE,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_groups": 1,
            "moe_shared_expert_intermediate_size": 32,
        },
        layers=3,
        compressed=(1,),
        kept=(LINEAR, MLP),
    ),
    "recurrent_gemma": Family(
        {"block_types": ["recurrent", "attention"], "attention_window_size": 24, "lru_width": 64},
        compressed=(),
        kept=(LINEAR, SLIDING),
    ),
    "falcon_h1": Family({**MAMBA, "mamba_d_ssm": 128}, compressed=(), kept=(BOTH,)),
    "zamba": Family(
        {
            **HYBRID,
            "layer_types": HYBRID_LAYERS,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "n_mamba_heads": 2,
        },
        layers=4,
        compressed=(),
        kept=(LINEAR, BOTH),
    ),
    "zamba2": Family(
        {
            **HYBRID,
            "layers_block_type": HYBRID_LAYERS,
            "mamba_d_state": 16,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "n_mamba_heads": 8,
        },
        layers=4,
        compressed=(),
        kept=(LINEAR, BOTH),
    ),
    "zaya": Family({**MOE, "num_experts_per_tok": 1, "router_hidden_size": 16}, compressed=(), kept=(BOTH,)),
    **{name: Family(options, compressed=(), refused=reason) for name, (options, reason) in _REFUSED.items()},
}

# length beyond which these rotate or scale otherwise; the first three drop the cache there and compute the text anew
ORIGINAL_LENGTH = 64
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0, 3.0, 2.0, 5.0] * 2,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
LONGER: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": ORIGINAL_LENGTH, "rope_parameters": _LONG_ROPE},
    "phimoe": {
        **MOE,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "rope_parameters": {**_LONG_ROPE, "short_mscale": 1.0, "long_mscale": 1.2},
    },
    "phi4_multimodal": {
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "rope_parameters": {**_LONG_ROPE, "partial_rotary_factor": 1.0},
        "sliding_window": None,
        "vision_config": {**_ENCODER, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14, "crop_size": 28},
        "audio_config": {
            **_ENCODER,
            **dict.fromkeys(("ext_pw_out_channel", "nemo_conv_channels", "depthwise_separable_out_channel"), 32),
            "num_blocks": 1,
            "input_size": 16,
        },
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_LENGTH,
            "llama_4_scaling_beta": 0.1,
        }
    },
}
