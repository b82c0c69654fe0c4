"""Writes `docs/models.md` from `families.py`: `python tests/families/report.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the tiny models

from families import FAMILIES, SLIDING, Family  # noqa: E402
from vision_families import VISION_FAMILIES  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

This page says what `DiffKVCache` does with each text family of Transformers. Well-known models come first, followed by
every family under its `model_type`, which is in a model's `config.json`.
"""
# what models are called, and their families
FAMOUS = {
    "Llama 2 and 3": ("llama",),
    "Llama 4": ("llama4_text",),
    "Qwen2, Qwen2.5, QwQ": ("qwen2", "qwen2_moe"),
    "Qwen3": ("qwen3", "qwen3_moe"),
    "Qwen3-Next, Qwen3.5": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    "Mistral, Mixtral": ("mistral", "mixtral"),
    "Ministral": ("ministral",),
    "Ministral 3": ("ministral3",),
    "Gemma": ("gemma",),
    "Gemma 2 and 3": ("gemma2", "gemma3_text"),
    "Gemma 3n and 4": ("gemma3n_text", "gemma4_text"),
    "Phi-2, Phi-3, Phi-4": ("phi", "phi3", "phimoe"),
    "gpt-oss": ("gpt_oss",),
    "DeepSeek V2, V3, R1": ("deepseek_v2", "deepseek_v3"),
    "DeepSeek V3.2": ("deepseek_v32",),
    "GLM-4, GLM-4.5": ("glm4", "glm4_moe"),
    "GLM-4.7-Flash": ("glm4_moe_lite",),
    "GLM-5": ("glm_moe_dsa",),
    "Kimi-Linear": ("kimi_linear",),
    "LongCat-Flash": ("longcat_flash",),
    "MiniCPM3": ("minicpm3",),
    "Youtu-LLM": ("youtu",),
    "SmolLM2": ("llama",),
    "SmolLM3": ("smollm3",),
    "OLMo 2": ("olmo2",),
    "OLMo 3": ("olmo3",),
    "Granite 3": ("granite",),
    "Granite 4": ("granitemoehybrid",),
    "Command R": ("cohere",),
    "Command R7B, Command A": ("cohere2",),
    "Mamba": ("mamba", "mamba2"),
    "GPT-J": ("gptj",),
    "Falcon, BLOOM": ("falcon", "bloom"),
}
CHECKS = """## How this is checked

`tests/families/families.py` holds this list and a tiny random model of each family. `tests/families/test_families.py`
checks every row, on the oldest and newest supported Transformers:

- Families that are not refused generate the same tokens as `DynamicCache` when everything is stored losslessly (greedy,
  a batch of three left-padded prompts, logits within 1e-4 in float32). With lossy settings, the layers that this page
  calls compressed are compressed.
- Refused families raise an `UnsupportedModelError` before the model runs.

These tests prove correctness, not quality. `hf-diffkv verify --model MODEL` says how much compression a trained model
tolerates.

`python tests/families/report.py` writes this file.
"""
REASONS = {
    "choose the tokens": "sparse attention: its layers choose the tokens they attend to",
    "splits values": "splits values after caching them",
    "adds a learned bias": "adds a learned bias to its attention logits",
    "adds a learned position bias": "adds a learned position bias to its attention logits",
    "repeats keys and values": "repeats keys and values after caching them",
    "its own layers to the cache": "adds its own layers to the cache",
    "its own cache class": "has its own cache class",
    "attention interface": "does not use Transformers' attention interface",
    "no attention layers": "has no attention layers",
}


def groups() -> tuple[dict[str, Family], dict[str, Family], dict[str, Family], dict[str, Family]]:
    """Families compressed in all layers, in some, in none, and refused ones, by name."""
    rows = {name: family for name, family in sorted(FAMILIES.items())}
    full = {name: family for name, family in rows.items() if family.compressed and not family.kept}
    partly = {name: family for name, family in rows.items() if family.compressed and family.kept}
    nothing = {name: family for name, family in rows.items() if not family.compressed and not family.refused}
    return full, partly, nothing, {name: family for name, family in rows.items() if family.refused}


def features() -> list[str]:
    """What `docs/features.md` says of how many families there are."""
    full, partly, nothing, refused = groups()
    (newer,) = {_from(family) for family in full.values() if family.since[0]}
    since = sum(family.since[0] > 0 for family in full.values())
    compressed = len(full) + len(partly)
    return [
        f"{len(full)} are compressed in all layers ({since} of them only {newer}), "
        f"{len(partly)} in their full-attention layers, {len(nothing)} have nothing to compress, "
        f"{len(refused)} are refused with a reason.",
        f"the {compressed} compressed families generate",
        f"So do {len(VISION_FAMILIES)} vision-language families",
    ]


def document() -> str:
    """The whole of `docs/models.md`."""
    full, partly, nothing, refused = groups()
    latent = [name for name, family in sorted(FAMILIES.items()) if family.latents]
    parts = [
        HEAD,
        f"{len(full)} families are compressed in all layers, {len(partly)} in their full-attention layers, "
        f"{len(nothing)} run but have no layer to compress, {len(refused)} are refused.\n",
        _famous(),
        "DeepSeek's distilled models are Llama and Qwen2 models and work like these.\n",
        f"## All layers compressed\n\n{_names(full)}.\n",
        _since(full),
        "If a Mistral or Phi-3 checkpoint sets `sliding_window`, all its layers have sliding windows, and it runs "
        "uncompressed, with a warning.\n",
        "## Full-attention layers compressed\n\nThe other layers keep Transformers' own cache.\n\n"
        + _table("kept as they are", partly, _kept),
        "In Gemma 3n and Gemma 4, later layers read the keys and values of an earlier one. That layer is compressed "
        "for all of them: for significance, their queries count as additional heads of its KV heads "
        "([store.md](store.md#how-later-layers-read-an-earlier-ones-keys-and-values); checked in "
        "`tests/store/test_shared.py` and `tests/cache/test_shared_layers.py`). Steps of these models are "
        "not captured as CUDA graphs. If a `device_map` or pipeline parallelism puts such "
        "layers on different devices, `generate()` leaves the layer that they read uncompressed.\n",
        "## Latents\n\n"
        f"Families with multi-head latent attention are {_names(latent)}; "
        "[latent.md](latent.md) says how their caches are compressed. No large trained model of this kind was "
        "measured. Families whose indexer chooses tokens are refused: `axk2`, `deepseek_v32`, `dots3_note_text`, "
        "`glm_moe_dsa`, `hy_v4`. They cache latents too; support follows once steps can read chosen tokens.\n",
        "## Vision-language models\n\nTheir text side is compressed, except for the layers in this table; the vision "
        "side keeps its own attention. `tests/families/test_vision.py` checks them with images. `kimi_k25` caches "
        "latents.\n\n" + _vision_table(),
        "## Nothing to compress\n\nThese families generate as they do with `DynamicCache`, with a warning.\n\n"
        + _table("layers", nothing, _kept),
        "## Refused\n\n" + _table("why", refused, lambda family: REASONS[family.refused]),
        "Encoder-decoder models are refused as well.\n",
        CHECKS,
    ]
    return "\n".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _since(rows: dict[str, Family]) -> str:
    """Families that older releases run in a way that the cache cannot use."""
    newer = [f"`{name}` {_from(family)}" for name, family in rows.items() if family.since[0]]
    return ", ".join(newer) + "; before that, these are refused.\n"


def _from(family: Family) -> str:
    return f"from Transformers {family.since[0]}.{family.since[1]} on"


def _famous() -> str:
    lines = ["| model | family | compressed |", "|---|---|---|"]
    for model, names in FAMOUS.items():
        (outcome,) = {_outcome(FAMILIES[name]) for name in names}
        lines.append(f"| {model} | {', '.join(f'`{name}`' for name in names)} | {outcome} |")
    return "\n".join(lines) + "\n"


def _outcome(family: Family) -> str:
    """Describes the result for `family` in a few words."""
    if family.refused:
        return f"refused: {REASONS[family.refused].partition(':')[0]}"
    if not family.compressed:
        return "nothing to compress"
    newer = f", {_from(family)}" if family.since[0] else ""
    return (f"full-attention layers; others: {family.kept[0]}" if family.kept else "all layers") + newer


def _kept(family: Family) -> str:
    return "; ".join(family.kept)


def _vision_table() -> str:
    lines = ["| family | text layers kept as they are |", "|---|---|"]
    for name, family in sorted(VISION_FAMILIES.items()):
        lines.append(f"| `{name}` | {'none' if family.compressed == (0, 1) else SLIDING} |")
    return "\n".join(lines) + "\n"


def _table(column: str, rows: dict[str, Family], cell: Callable[[Family], str]) -> str:
    lines = [f"| family | {column} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {cell(family)} |" for name, family in rows.items())]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
