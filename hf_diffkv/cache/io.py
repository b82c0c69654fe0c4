"""Saves caches to folders and loads them, as safetensors and JSON without pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file

from ..config.diffkv_config import DiffKVConfig, configuration_of
from ..config.files import as_written, new_folder
from ..replacing import replacing
from .devices import TensorParallel
from .inference import ordinary_tensors
from .snapshot import (
    CacheContents,
    CacheFileError,
    CacheT,
    Snapshot,
    is_fingerprint_of,
    restore_snapshot,
    take_snapshot,
    weights_fingerprint,
)

FORMAT_VERSION = 4
# version 1: thresholds without a batch dimension, keys not centred; up to version 2: no sinks; up to version 3: no
# layers with several states, and all pages had scores and positions
READABLE_VERSIONS = (1, 2, 3, 4)
FIRST_WITHOUT_SCORES = 4
JSON_NAME = "diffkv_cache.json"
TENSORS_NAME = "diffkv_cache.safetensors"


def save_cache(cache: CacheContents, save_directory: str | os.PathLike, model: Any = None) -> None:
    """Writes `cache` into `save_directory`, which is created if missing.

    Args:
        model: model whose weights' fingerprint is recorded, which loading then checks; None records none.

    Raises:
        ValueError: some tokens may still be taken back, one of Transformers' own layers cannot be saved, or
            `save_directory` is not a folder.
        OSError: the files cannot be written.
    """
    weights = None if model is None else weights_fingerprint(model)
    with cache.stores.between_forwards():
        snapshot = take_snapshot(cache, weights)
        held = cache.held_tokens.pieces(cache.get_seq_length())
    snapshot.content["held_tokens"] = [piece.start for piece in held]
    snapshot.tensors.update({f"held_tokens{index}": piece.ids for index, piece in enumerate(held)})
    save_snapshot(snapshot, new_folder(save_directory), cache.stores.tensor_parallel)


def save_snapshot(snapshot: Snapshot, folder: Path, parallel: TensorParallel) -> None:
    """Writes `snapshot` into `folder`, which is created if missing, as this rank's part."""
    json_path, path = _paths(folder, parallel)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        save_file({name: tensor.cpu().contiguous() for name, tensor in snapshot.tensors.items()}, new)
        content = {"format_version": FORMAT_VERSION, **snapshot.content, "sha256": _digest(new)}
        content["checksum"] = _checksum(content)
        # nested, so that an error in either file names that file
        with replacing(json_path) as new_json:
            new_json.write_text(json.dumps(content, indent=2) + "\n")


@ordinary_tensors()
def load_cache(
    make_cache: Callable[[Any, DiffKVConfig], CacheT],
    save_directory: str | os.PathLike,
    model: Any,
    parallel: TensorParallel,
    devices: dict[int, torch.device],
    other_device: torch.device,
) -> CacheT:
    """Reads a cache that `save_cache` wrote.

    Args:
        model: model, or its configuration, in which case weights are not compared.
        parallel: the model's ranks. Other arguments as in `restore_snapshot`.

    Raises:
        FileNotFoundError: no cache was saved there.
        CacheFileError: the files are damaged, newer than this version, or belong to another model.
    """
    folder = Path(save_directory)
    snapshot = load_snapshot(folder, parallel, torch.device("cpu") if devices else other_device)
    model_config = configuration_of(model)
    if not is_fingerprint_of(snapshot.content["model"], model_config):
        raise CacheFileError(
            f"{folder} was saved with another model configuration; load it with the model it belongs to."
        )
    weights = snapshot.content["weights"]
    if weights is not None and model is not model_config and weights != weights_fingerprint(model):
        raise CacheFileError(f"{folder} was saved with other model weights; load it with the model it belongs to.")
    try:
        cache = restore_snapshot(make_cache, snapshot, model, devices, other_device)
    except CacheFileError as error:
        raise CacheFileError(f"{folder}: {error}") from error
    # absent from caches saved by an earlier hf_diffkv
    starts = snapshot.content.get("held_tokens", [])
    # copied, as the file may change later
    held = [(start, snapshot.tensors[f"held_tokens{index}"].clone()) for index, start in enumerate(starts)]
    cache.held_tokens.take_up(held, cache.get_seq_length())
    cache.check_integrity()
    return cache


def load_snapshot(folder: Path, parallel: TensorParallel, device: torch.device | None = None) -> Snapshot:
    """Reads a snapshot that `save_snapshot` wrote.

    Args:
        parallel: the model's ranks.
        device: device of the tensors; on a CPU they stay mapped to the file. None reads the file into memory at once,
            as another process may remove it in the meantime.

    Raises:
        FileNotFoundError: no cache was saved there.
        OSError: with `device=None`, the files cannot be read.
        CacheFileError: the files are damaged, or newer than this version.
    """
    json_path, path = _paths(folder, parallel)
    for needed in (json_path, path):
        if not needed.is_file():
            raise FileNotFoundError(
                f"{needed} does not exist; write it with cache.save_pretrained first, in as many tensor-parallel "
                "processes as you load it in."
            )
    content = _read_json(json_path)
    data = path.read_bytes() if device is None else None
    if (_digest(path) if data is None else hashlib.sha256(data).hexdigest()) != content["sha256"]:
        raise CacheFileError(f"{path} is damaged (its checksum differs); save the cache again.")
    try:
        config = DiffKVConfig.from_dict(as_written(content["config"]))
    except ValueError as error:
        raise CacheFileError(
            f"{folder} was saved with a configuration that this hf_diffkv cannot use: {error}"
        ) from error
    if content["format_version"] < FIRST_WITHOUT_SCORES and not config.selects:
        raise CacheFileError(
            f"{folder} was saved by an earlier hf_diffkv, in pages with scores and positions, which this version does "
            "not keep for such a configuration; run the model on its text again and save the new cache."
        )
    try:
        return Snapshot(content, load_file(path, device=str(device)) if data is None else load(data))
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} cannot be read: {error}") from error


def _paths(folder: Path, parallel: TensorParallel) -> tuple[Path, Path]:
    """Returns the paths of the description and the tensors; every tensor-parallel rank has its own files."""
    part = f".rank{parallel.rank}of{parallel.size}" if parallel.size > 1 else ""
    return tuple((folder / name).with_suffix(part + Path(name).suffix) for name in (JSON_NAME, TENSORS_NAME))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheFileError(f"{path} is not a saved DiffKV cache: {error}") from error
    if not isinstance(version, int):
        raise CacheFileError(f"{path} is not a saved DiffKV cache: its format version is {version!r}.")
    if version not in READABLE_VERSIONS:
        raise CacheFileError(
            f"{path} has format version {version}, but this hf_diffkv reads versions up to {FORMAT_VERSION}; "
            + ("upgrade hf_diffkv." if version > FORMAT_VERSION else "save the cache again.")
        )
    if content.pop("checksum", None) != _checksum(content):
        raise CacheFileError(f"{path} is damaged (its checksum differs); save the cache again.")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
