"""Recognises a model among those that were measured: by a digest of its weights, and by its mark."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .mark import RELATIVE, Mark
from .weights import files_digest, model_digest, norms_in_files, norms_of

# what files call a mark, in JSON and in the metadata of safetensors
MARK_KEY = "mark"
# files of measurements whose marks are held at once
MOST_FILES = 4096


@dataclass(frozen=True)
class Identity:
    """What a model is recognised by.

    Attributes:
        digest: of all its weights; None where they cannot be read.
        mark: of its normalisation weights; None where they tell nothing.
    """

    digest: str | None
    mark: Mark | None


_UNKNOWN = Identity(None, None)
_identities: weakref.WeakKeyDictionary[Any, Identity] = weakref.WeakKeyDictionary()


def identity_of(model: Any) -> Identity:
    """The identity of a model, found once.

    Args:
        model: a loaded one; one whose weights are offloaded, or on the meta device, is known by safetensors files on
            this machine. For a configuration or a name, and for a rank's part of a model, nothing is known.
    """
    if not hasattr(model, "named_parameters") or not hasattr(getattr(model, "config", None), "get_text_config"):
        return _UNKNOWN
    if model not in _identities:
        sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        _identities[model] = _UNKNOWN if sharded else Identity(_digest(model), mark_of(model))
    return _identities[model]


def mark_of(model: Any) -> Mark | None:
    """The mark of a model, of its weights or those in its files; None where they tell nothing."""
    norms: dict[str, Any] | None = norms_of(model)
    if any(weight.is_meta for weight in (norms or {}).values()):
        folder = folder_of(model)
        norms = None if folder is None else norms_in_files(model, folder)
    return Mark.of(model.config, norms or {})


def marks_in(folder: Path, suffix: str) -> list[tuple[Path, Mark]]:
    """Files of measurements in a folder and their marks, the newest first; files without a mark are left out.

    Args:
        suffix: ".json" for what heads lose, ".safetensors" for moments of queries.
    """
    try:
        states = [(path, path.stat()) for path in folder.iterdir() if path.suffix == suffix]
    except OSError:
        return []
    found = []
    for path, state in sorted(states, key=lambda each: (-each[1].st_mtime_ns, each[0])):
        mark = _mark_in(path, state.st_mtime_ns, state.st_size)
        if mark is not None:
            found.append((path, mark))
    return found


def nearest(mark: Mark, known: Iterable[tuple[Path, Mark]]) -> tuple[Path, float] | None:
    """The file whose mark is nearest, and its distance; the first of several, None where none is a relative's."""
    best: tuple[Path, float] | None = None
    for path, other in known:
        distance = mark.distance(other)
        if distance <= RELATIVE and distance < (math.inf if best is None else best[1]):
            best = path, distance
    return best


def loaded_from(model: Any) -> str:
    """The folder or repository of a loaded model; empty where it has none, or it is only a configuration or a name."""
    return getattr(getattr(model, "config", None), "name_or_path", "")


def folder_of(model: Any) -> Path | None:
    """Where the files of a model are on this machine: its folder, or what the Hub's cache has of its repository."""
    name = loaded_from(model)
    if not name:
        return None
    known = name if Path(name).is_dir() else known_of_the_hub(name, "config.json")
    return None if known is None else Path(known) if Path(known).is_dir() else Path(known).parent


def known_of_the_hub(repo: str, file: str) -> str | None:
    """The path of a file that the Hub's cache has."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        known = try_to_load_from_cache(repo, file)
    except HFValidationError:
        return None
    return known if isinstance(known, str) else None


def _digest(model: Any) -> str | None:
    try:
        return model_digest(model)
    except ValueError:
        folder = folder_of(model)
        return None if folder is None else files_digest(model, folder)


@lru_cache(MOST_FILES)
def _mark_in(path: Path, changed: int, size: int) -> Mark | None:
    """The mark in a file that was changed at a time; None for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            return Mark.from_dict(json.loads(path.read_text())[MARK_KEY])
        with safe_open(path, framework="pt") as file:
            return Mark.from_dict(json.loads((file.metadata() or {})[MARK_KEY]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
