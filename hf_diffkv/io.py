"""Saving a cache to a folder and loading it: safetensors and JSON, nothing pickled."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import DiffKVConfig
from .memory import NULL_PAGE
from .store import Store
from .store.state import ROW_STATE

if TYPE_CHECKING:
    from .integration.cache import DiffKVCache
    from .integration.devices import TensorParallel
    from .integration.stores import Stores

FORMAT_VERSION = 4
# in version 1 thresholds had no batch dimension, and keys and values were held as the model had them; up to version 2
# there were no sinks; up to version 3 all pages had scores and positions
READABLE_VERSIONS = (1, 2, 3, 4)
FIRST_WITHOUT_SCORES = 4
JSON_NAME = "diffkv_cache.json"
TENSORS_NAME = "diffkv_cache.safetensors"
# what does not change the keys and values a model computes
VOLATILE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
WEIGHT_SAMPLES = 64


class CacheFileError(ValueError):
    """A saved cache that cannot be loaded: damaged, too new, or made with another model."""


def save_cache(cache: DiffKVCache, save_directory: str | os.PathLike, model: Any = None) -> None:
    """Writes `cache` into `save_directory` (made if missing).

    Args:
        model: also record a fingerprint of this model's weights, which loading then checks.

    Raises:
        ValueError: tokens that may still be taken back, or a layer of Transformers' own that cannot be saved.
    """
    folder = Path(save_directory)
    json_path, path = _paths(folder, cache.stores.tensor_parallel)
    tensors: dict[str, Tensor] = {}
    stores = [_describe_store(store, index, tensors) for index, store in enumerate(cache.stores.stores)]
    places = {
        str(layer.index): [cache.stores.stores.index(layer.store), layer.slot, layer.seen]
        for layer in (cache.layers[i] for i in cache.compressed_layers())
        if layer.store is not None
    }
    stock = {
        str(layer_idx): _describe_stock(layer, f"layer{layer_idx}", tensors)
        for layer_idx, layer in enumerate(cache.layers)
        if layer_idx not in cache.compressed_layers()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)
    content = {
        "format_version": FORMAT_VERSION,
        "model": cache.model_fingerprint,
        "weights": None if model is None else weights_fingerprint(model),
        "config": cache.config.to_dict(),
        "stores": stores,
        "places": places,
        "stock_layers": stock,
        "sha256": _digest(path),
    }
    content["checksum"] = _checksum(content)
    json_path.write_text(json.dumps(content, indent=2) + "\n")


def load_cache(
    cache_class: type[DiffKVCache],
    save_directory: str | os.PathLike,
    model: Any,
    parallel: TensorParallel,
    devices: dict[int, torch.device],
) -> DiffKVCache:
    """Reads what `save_cache` wrote.

    Args:
        parallel: the model's ranks.
        devices: of its layers; `model.device` for those that are not named.

    Raises:
        FileNotFoundError: there is no saved cache.
        CacheFileError: the files are damaged, newer than this version, or belong to another model.
    """
    folder = Path(save_directory)
    json_path, path = _paths(folder, parallel)
    for needed in (json_path, path):
        if not needed.is_file():
            raise FileNotFoundError(
                f"{needed} does not exist; write it with cache.save_pretrained first, in as many tensor-parallel "
                "processes as load it."
            )
    content = _read_json(json_path)
    if content["model"] != model_fingerprint(model.config):
        raise CacheFileError(f"{folder} was saved with another model configuration; load it with the model it is of.")
    if content["weights"] is not None and content["weights"] != weights_fingerprint(model):
        raise CacheFileError(f"{folder} was saved with other model weights; load it with the model it is of.")
    if _digest(path) != content["sha256"]:
        raise CacheFileError(f"{path} is damaged (its checksum differs); save the cache again.")
    config = DiffKVConfig.from_dict(content["config"])
    if not config.selects and content["format_version"] < FIRST_WITHOUT_SCORES:
        raise CacheFileError(
            f"{folder} was saved by an earlier hf_diffkv, in pages with scores and positions, which this one does not "
            "keep for such a configuration; read its text with the model again and save the new cache."
        )
    cache = cache_class(model.config, config)
    cache.attach(model)
    try:
        tensors = load_file(path, device="cpu" if devices else str(model.device))
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} cannot be read: {error}") from error
    # layers that were together may run on several devices now
    groups: dict[tuple[int, torch.device], list[tuple[int, int, int]]] = {}
    layers = cache.compressed_layers()
    if any(int(index) in cache.stores.absent for index in content["places"]):
        raise CacheFileError(
            f"{folder} holds layers that are not in this process, or that layers on another device read; under "
            "pipeline parallelism save and load with a folder for each rank."
        )
    for index, (store, slot, seen) in content["places"].items():
        device = devices.get(layers[int(index)], model.device)
        groups.setdefault((store, device), []).append((int(index), slot, seen))
    for (number, device), places in groups.items():
        slots = [slot for _, slot, _ in places]
        store = _restore_store(cache.stores, content["stores"][number], number, tensors, slots, device)
        for position, (index, _, seen) in enumerate(places):
            store.place_layer(position, index)
            cache.stores.assign(index, store, position)
            cache.layers[layers[index]].restore(seen)
    for layer_idx, described in content["stock_layers"].items():
        device = devices.get(int(layer_idx), model.device)
        _restore_stock(cache.layers[int(layer_idx)], described, f"layer{layer_idx}", tensors, device)
    cache.check_integrity()
    return cache


def model_fingerprint(model_config: Any) -> str:
    """Digest of everything in the config that shapes keys and values."""
    values = model_config.get_text_config(decoder=True).to_dict()
    for name in VOLATILE:
        values.pop(name, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def weights_fingerprint(model: Any) -> str:
    """Digest of a few elements of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        # under tensor parallelism, what this rank holds
        parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // WEIGHT_SAMPLES)][:WEIGHT_SAMPLES]
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _paths(folder: Path, parallel: TensorParallel) -> tuple[Path, Path]:
    """Description and tensors; every tensor-parallel rank has files of its own."""
    part = f".rank{parallel.rank}of{parallel.size}" if parallel.size > 1 else ""
    return tuple((folder / name).with_suffix(part + Path(name).suffix) for name in (JSON_NAME, TENSORS_NAME))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        version = content["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CacheFileError(f"{path} is not a saved DiffKV cache: {error}") from error
    if not isinstance(version, int):
        raise CacheFileError(f"{path} is not a saved DiffKV cache: its format version is {version!r}.")
    if version not in READABLE_VERSIONS:
        raise CacheFileError(
            f"{path} has format version {version}, this hf_diffkv reads versions up to {FORMAT_VERSION}; "
            + ("upgrade hf_diffkv." if version > FORMAT_VERSION else "save the cache again.")
        )
    if content.pop("checksum", None) != _checksum(content):
        raise CacheFileError(f"{path} is damaged (its checksum differs); save the cache again.")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _slow_digest(file)
        )


def _slow_digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _describe_store(store: Store, index: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if any(recorded is not None for recorded in store.recorded):
        raise ValueError("some tokens may still be taken back; call cache.crop(0) before saving.")
    store.settle()
    store.check_values()
    table = store.table.table
    used = table != NULL_PAGE
    renumbered = torch.zeros_like(table)
    renumbered[used] = torch.arange(1, int(used.sum()) + 1, dtype=table.dtype, device=table.device)
    tensors[f"store{index}.table"] = renumbered
    tensors[f"store{index}.pages"] = store.pool.pages[table[used].long()]
    tensors[f"store{index}.padding"] = store.padding.mask()
    for name in ROW_STATE:
        tensors[f"store{index}.{name}"] = getattr(store, name)
    return {
        "num_layers": store.num_layers,
        "batch_size": store.batch_size,
        "num_heads": store.num_heads,
        "key_dim": store.key_dim,
        "value_dim": store.value_dim,
        "dtype": str(store.dtype).removeprefix("torch."),
        "seen": store.seen,
        "steps_since_compaction": store.steps_since_compaction,
        "page_bytes": store.layout.page_bytes,
    }


def _restore_store(
    stores: Stores,
    described: dict[str, Any],
    index: int,
    tensors: dict[str, Tensor],
    slots: list[int],
    device: torch.device,
) -> Store:
    """A store on `device` of the layers that had the places `slots` in the saved one."""
    shape = [described[name] for name in ("batch_size", "num_heads", "key_dim", "value_dim")]
    store = stores.make_store(len(slots), *shape, getattr(torch, described["dtype"]), device)
    if described["page_bytes"] != store.layout.page_bytes:
        raise CacheFileError("the page format of the saved cache differs from this version's; save the cache again.")
    for name in ROW_STATE:
        target = getattr(store, name)
        # the key offset is empty where keys are not centred, and unknown to version 1, as sinks are to versions 1 and 2
        known = name != "sink_end" or store.sink_slots or f"store{index}.{name}" in tensors
        if target.numel() and known:
            saved = tensors[f"store{index}.{name}"][slots]
            target.copy_(saved if saved.ndim == target.ndim else saved[:, None])
    table = tensors[f"store{index}.table"][slots].to(device)
    used = table != NULL_PAGE
    pages = tensors[f"store{index}.pages"]
    pages = pages[(table[used] - 1).long().to(pages.device)].to(device)
    store.pool.ensure_free(pages.shape[0])
    _, fresh = store.pool.free_list.take(torch.tensor([pages.shape[0]], device=device))
    store.pool.pages[fresh] = pages
    table[used] = fresh.to(table.dtype)
    store.table.table = table
    padding = tensors[f"store{index}.padding"].to(device)
    store.padding.append(padding.shape[1], None if bool(padding.all()) else padding)
    store.seen = described["seen"]
    store.steps_since_compaction = described["steps_since_compaction"]
    return store


def _describe_stock(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A Transformers layer's tensors and plain values, by attribute name."""
    described: dict[str, Any] = {"type": type(layer).__name__, "plain": {}, "tensors": []}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}.{name}"] = value
            described["tensors"].append(name)
        elif value is None or isinstance(value, (bool, int, float, str)):
            described["plain"][name] = value
        elif isinstance(value, (torch.dtype, torch.device)):
            described["plain"][name] = {type(value).__name__: str(value)}
        else:
            raise ValueError(
                f"a {type(layer).__name__} holds {name}={type(value).__name__}, which cannot be saved; caches of this "
                "model can only be copied with copy.deepcopy."
            )
    return described


def _restore_stock(
    layer: Any, described: dict[str, Any], prefix: str, tensors: dict[str, Tensor], device: torch.device
) -> None:
    if described["type"] != type(layer).__name__:
        raise CacheFileError(f"{prefix} was a {described['type']} and now is a {type(layer).__name__}.")
    for name in described["tensors"]:
        setattr(layer, name, tensors[f"{prefix}.{name}"].to(device))
    for name, value in described["plain"].items():
        if isinstance(value, dict) and "dtype" in value:
            value = getattr(torch, value["dtype"].removeprefix("torch."))
        elif isinstance(value, dict):
            value = device
        setattr(layer, name, value)
