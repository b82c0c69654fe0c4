"""Writes `docs/models.md` from `families.py`: `python tests/families/report.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))  # for the tiny models

from families import FAMILIES, SLIDING, Family  # noqa: E402
from vision_families import VISION_FAMILIES  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

What `DiffKVCache` does with each text family of Transformers. `tests/families/families.py` holds this list and a tiny
random model of each; `tests/families/test_families.py` checks every row, on the oldest and the newest Transformers that
is supported:

- Families that are not refused generate the very tokens that `DynamicCache` generates when everything is stored as it
  is (greedy, a batch of three prompts with left padding, logits within 1e-4 in float32). With lossy settings the layers
  that are said to be compressed truly are.
- Refused families raise an `UnsupportedModelError` before the model runs.

A random model says that the cache is wired up rightly, not how much compression a trained model bears.

This file is written by `python tests/families/report.py`.
"""
REASONS = {
    "caches latents": "multi-head latent attention: it caches latents, not keys and values",
    "choose the tokens": "sparse attention: its layers choose the tokens they attend to",
    "splits values": "splits values after caching them",
    "adds a learned bias": "adds a learned bias to its attention logits",
    "adds a learned position bias": "adds a learned position bias to its attention logits",
    "repeats keys and values": "repeats keys and values after caching them",
    "cache class of its own": "brings a cache class of its own",
    "attention interface": "does not use Transformers' attention interface",
    "no attention layers": "has no attention layers",
}


def document() -> str:
    """The whole of `docs/models.md`."""
    rows = {name: family for name, family in sorted(FAMILIES.items())}
    full = [name for name, family in rows.items() if family.compressed and not family.kept]
    partly = {name: family for name, family in rows.items() if family.compressed and family.kept}
    nothing = {name: family for name, family in rows.items() if not family.compressed and not family.refused}
    refused = {name: family for name, family in rows.items() if family.refused}
    parts = [
        HEAD,
        f"{len(full)} families are compressed in all layers, {len(partly)} in their full-attention layers, "
        f"{len(nothing)} run but have no layer to compress, {len(refused)} are refused.\n",
        "## All layers compressed\n\n" + ", ".join(f"`{name}`" for name in full) + ".\n",
        "Mistral and Phi-3 checkpoints whose configuration sets `sliding_window` have sliding-window layers only: "
        "they run uncompressed, with a warning.\n",
        "## Full-attention layers compressed\n\nThe other layers keep Transformers' own cache.\n\n"
        + _table("kept as they are", partly, _kept),
        "Where later layers read the keys and values of an earlier one (Gemma 3n, Gemma 4), that one is compressed for "
        "all of them: their queries count as further heads of its KV heads when significance is decided "
        "([architecture.md](architecture.md); checked in `tests/test_shared.py` and "
        "`tests/generation/test_shared_layers.py`). Steps of these models are not captured as CUDA graphs. Where a "
        "`device_map` or pipeline parallelism parts such layers, `generate()` leaves the one they read uncompressed.\n",
        "## Vision-language models\n\nTheir text side is compressed, as far as the table says; the vision side keeps "
        "its own attention. Checked with an image in every prompt (`tests/families/test_vision.py`).\n\n"
        + _vision_table(),
        "## Nothing to compress\n\nThey generate as with `DynamicCache`, and a warning says so.\n\n"
        + _table("layers", nothing, _kept),
        "## Refused\n\n" + _table("why", refused, lambda family: REASONS[family.refused]),
        "Encoder-decoder models are refused as well.\n",
    ]
    return "\n".join(parts)


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
