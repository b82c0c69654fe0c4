"""Saved caches as earlier releases wrote them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_diffkv.cache.io import JSON_NAME, TENSORS_NAME, _checksum

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(*ends: str) -> Change:
    """Leaves out the tensors whose names have one of these ends."""
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}


def write_as_before(folder: Path, version: int, fields: Sequence[str], change: Change) -> None:
    """Gives a saved cache the format `version`: a configuration without `fields`, and changed tensors."""
    path = folder / TENSORS_NAME
    save_file(change(load_file(path)), path)
    content = json.loads((folder / JSON_NAME).read_text())
    for field in fields:
        del content["config"][field]
    content |= {"format_version": version, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    del content["checksum"]
    (folder / JSON_NAME).write_text(json.dumps({**content, "checksum": _checksum(content)}))
