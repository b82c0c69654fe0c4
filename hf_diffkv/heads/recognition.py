"""Recognises measured models by a digest of their weights, and by a mark."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import hub
from .mark import RELATIVE, Mark
from .weights import files_digest, model_digest, norms_in_files, norms_of

# key of a mark in JSON files and in the metadata of safetensors files
MARK_KEY = "mark"
# number of measurement files whose marks are cached
MOST_FILES = 4096


@dataclass(frozen=True)
class Identity:
    """Properties by which a model is recognised.

    Attributes:
        digest: digest of all weights; None if they cannot be read.
        mark: mark of the normalisation weights; None if they cannot tell models apart.
    """

    digest: str | None
    mark: Mark | None


_UNKNOWN = Identity(None, None)
# each with the state of the parameters it was computed from
_identities: weakref.WeakKeyDictionary[Any, tuple[list[Any], Identity]] = weakref.WeakKeyDictionary()


def identity_of(model: Any) -> Identity:
    """Returns a model's identity, which is recomputed once its parameters have changed.

    Args:
        model: loaded model. If its weights are offloaded or on the meta device, its safetensors files on this machine
            are read. Configurations, names and a rank's part of a model have an empty identity.
    """
    if not hasattr(model, "named_parameters") or not hasattr(getattr(model, "config", None), "get_text_config"):
        return _UNKNOWN
    states = _states_of(model)
    known, identity = _identities.get(model, (None, _UNKNOWN))
    if known != states:
        sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        identity = _UNKNOWN if sharded else Identity(_digest(model), mark_of(model))
        _identities[model] = states, identity
    return identity


def _states_of(model: Any) -> list[Any]:
    """Returns the states of all parameters, without reading elements."""
    states: list[Any] = []
    # `parameters()` takes ten times as long, and every new cache waits for this
    modules = [model]
    while modules:
        module = modules.pop()
        modules.extend(child for child in module._modules.values() if child is not None)
        for parameter in module._parameters.values():
            if parameter is not None:
                states.append(state_of(parameter))
    return states


def state_of(parameter: Any) -> Any:
    """Returns a value that changes when a parameter is written to or moves in memory."""
    try:
        return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version
    except RuntimeError:
        # tensors that consist of others have no memory of their own
        return id(parameter)


def mark_of(model: Any) -> Mark | None:
    """Returns the mark of a model, from its weights or from its files, or None."""
    norms: dict[str, Any] | None = norms_of(model)
    if any(weight.is_meta for weight in (norms or {}).values()):
        folder = folder_of(model)
        norms = None if folder is None else norms_in_files(model, folder)
    return Mark.of(model.config, norms or {})


def marks_in(folder: Path, suffix: str) -> list[tuple[Path, Mark]]:
    """Returns the measurement files in a folder with their marks, newest first, skipping files without one.

    Args:
        suffix: ".json" for head losses, ".safetensors" for query moments.
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
    """Returns the first file with the nearest mark and its distance; None if none belongs to a relative."""
    distances = ((path, mark.distance(other)) for path, other in known)
    return min((each for each in distances if each[1] <= RELATIVE), key=lambda each: each[1], default=None)


def loaded_from(model: Any) -> str:
    """Returns the folder or repository of a loaded model; empty if unknown, or for configurations and names."""
    return getattr(getattr(model, "config", None), "name_or_path", "")


def folder_of(model: Any) -> Path | None:
    """Returns the local folder with a model's files, its own or one in the Hub's cache, or None."""
    name = loaded_from(model)
    if not name:
        return None
    known = name if Path(name).is_dir() else hub.cached(name, "config.json")
    return None if known is None else Path(known) if Path(known).is_dir() else Path(known).parent


def loaded_digest(model: Any) -> str | None:
    """Returns the digest of a model's weights (`model_digest`); None if some are not loaded, as on the meta device."""
    try:
        return model_digest(model)
    except ValueError:
        return None


def _digest(model: Any) -> str | None:
    digest = loaded_digest(model)
    folder = folder_of(model) if digest is None else None
    return digest if folder is None else files_digest(model, folder)


@lru_cache(MOST_FILES)
def _mark_in(path: Path, changed: int, size: int) -> Mark | None:
    """Returns the mark in a file, or None; `changed` and `size` make a changed file be read again."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            return Mark.from_dict(json.loads(path.read_text())[MARK_KEY])
        with safe_open(path, framework="pt") as file:
            return Mark.from_dict(json.loads((file.metadata() or {})[MARK_KEY]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
