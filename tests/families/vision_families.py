"""Vision-language families: a tiny configuration of each, and an image per request that fits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from families import WINDOWED
from tiny_models import COMMON, LATENT
from torch import Tensor

IMAGE_TOKEN = 100
SIDE, PATCH = 32, 8
PATCHES = (SIDE // PATCH) ** 2


@dataclass(frozen=True)
class VisionFamily:
    """Expectations of one `model_type`.

    Attributes:
        options: arguments of its configuration.
        image_tokens: tokens an image takes in the prompt.
        layout: layout of its pixels: "image", "images" (a list per request), "sized", "patches" (of two frames), or
            "grid" (patches of one frame).
        compressed: compressed layers of the text side, which has two.
        token_types: name of the argument that marks image tokens, if any.
        latents: whether the text side caches latents.
    """

    options: dict[str, Any]
    image_tokens: int
    layout: str = "image"
    compressed: tuple[int, ...] = (0, 1)
    token_types: str | None = None
    latents: bool = False


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "num_channels": 3,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "window_size": SIDE,
    "fullatt_block_indexes": [0],
    "num_position_embeddings": PATCHES,
    "deepstack_visual_indexes": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _text(model_type: str | None = None, **options: Any) -> dict[str, Any]:
    return {**COMMON, **({"model_type": model_type} if model_type else {}), **options}


def _vision(model_type: str, **options: Any) -> dict[str, Any]:
    return {**VISION, "model_type": model_type, **options}


def _qwen(**vision: Any) -> VisionFamily:
    tokens = {"video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
    options = {
        "text_config": _text(rope_parameters=ROPE),
        "vision_config": {**QWEN_VISION, **vision},
        "image_token_id": IMAGE_TOKEN,
        **tokens,
    }
    return VisionFamily(options, PATCHES // 4, "patches", token_types="mm_token_type_ids")


def _idefics() -> VisionFamily:
    options = {"vision_config": VISION, "image_token_id": IMAGE_TOKEN, "scale_factor": 2, "text_config": _text("llama")}
    return VisionFamily(options, PATCHES // 4, "images")


VISION_FAMILIES: dict[str, VisionFamily] = {
    "aya_vision": VisionFamily(
        {
            "text_config": _text("cohere2", **WINDOWED),
            "vision_config": _vision("siglip_vision_model"),
            "image_token_index": IMAGE_TOKEN,
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        PATCHES // 4,
        compressed=(1,),
    ),
    "gemma3": VisionFamily(
        {
            "text_config": _text(**WINDOWED, query_pre_attn_scalar=16),
            "vision_config": _vision("siglip_vision_model"),
            "mm_tokens_per_image": PATCHES // 4,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": 101,
            "eoi_token_index": 102,
        },
        PATCHES // 4,
        compressed=(1,),
        token_types="token_type_ids",
    ),
    "idefics3": _idefics(),
    "internvl": VisionFamily(
        {
            "text_config": _text("qwen2"),
            "vision_config": {**VISION, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
            "image_token_id": IMAGE_TOKEN,
            "downsample_ratio": 0.5,
        },
        PATCHES // 4,
    ),
    "kimi_k25": VisionFamily(
        {
            "text_config": {name: x for name, x in _text("deepseek_v3", **LATENT).items() if name != "head_dim"},
            "vision_config": {
                **{name: VISION[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
                **{"num_attention_heads": 2, "patch_size": PATCH, "pos_emb_height": 4, "pos_emb_width": 4},
            },
            "projection_hidden_size": 32,
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": 101,
        },
        PATCHES // 4,
        "grid",
        latents=True,
    ),
    "llava": VisionFamily(
        {
            "text_config": _text("llama"),
            "vision_config": _vision("clip_vision_model", projection_dim=32),
            "vision_feature_layer": -1,
            "image_token_index": IMAGE_TOKEN,
        },
        PATCHES,
    ),
    "mistral3": VisionFamily(
        {
            "text_config": _text("mistral", sliding_window=None),
            "vision_config": _vision("pixtral", head_dim=16),
            "image_token_index": IMAGE_TOKEN,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        PATCHES // 4,
        "sized",
    ),
    "paligemma": VisionFamily(
        {
            "text_config": _text("gemma"),
            "vision_config": _vision("siglip_vision_model", projection_dim=64),
            "projection_dim": 64,
            "image_token_index": IMAGE_TOKEN,
        },
        PATCHES,
        token_types="token_type_ids",
    ),
    "qwen2_5_vl": _qwen(),
    "qwen2_vl": _qwen(hidden_size=64),
    "qwen3_vl": _qwen(),
    "smolvlm": _idefics(),
}


def images(family: VisionFamily, count: int, seed: int = 0) -> dict[str, Tensor]:
    """One random image per request, as the family wants them."""
    generator = torch.Generator().manual_seed(seed)
    if family.layout in ("patches", "grid"):
        shape = (3 * 2 * PATCH**2,) if family.layout == "patches" else (3, PATCH, PATCH)
        pixels = torch.randn(count * PATCHES, *shape, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * count)}
    pixels = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    if family.layout == "images":
        pixels = pixels[:, None]
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]] * count)} if family.layout == "sized" else {}
    return {"pixel_values": pixels, **sizes}
