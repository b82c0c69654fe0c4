"""Snapshots: a cache's contents as values and tensors, which can be kept, moved, written and restored."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..config.diffkv_config import DiffKVConfig, configuration_of
from ..config.files import as_written
from ..config.layers import same_pages
from ..pages import NULL_PAGE
from ..pages.rows import ROW_STATE
from ..store import KVHeads, Store, settle
from .held_tokens import HeldTokens
from .stores import Stores

# configuration fields that 0.1.0 left out of a fingerprint
FIRST_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
# fields that do not affect a model's keys and values; neither do dropout rates
VOLATILE = FIRST_VOLATILE | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type", "tie_word_embeddings"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("initializer_range", "router_aux_loss_coef"),
}
DROPOUT = re.compile(r"dropout|pdrop$|layerdrop$")
WEIGHT_SAMPLES = 64
# name of `LoweringState.moments`, absent where nothing is rounded for a prompt's queries, and from earlier releases
QUERY_MOMENTS = "query_moments"


class CacheContents(Protocol):
    """The parts of `DiffKVCache` that reports and snapshots use."""

    layers: list[Any]
    stores: Stores
    held_tokens: HeldTokens
    config: DiffKVConfig
    model_fingerprint: str

    def compressed_layers(self) -> list[int]: ...
    def levels(self, layer_idx: int) -> Tensor: ...
    def get_seq_length(self) -> int: ...
    def check_handover(self) -> None: ...
    def attach(self, model: Any) -> None: ...
    def check_integrity(self) -> None: ...


CacheT = TypeVar("CacheT", bound=CacheContents)


class CacheFileError(ValueError):
    """A saved cache cannot be loaded: it is damaged, too new, or made with another model."""


@dataclass(frozen=True)
class Snapshot:
    """Contents of a cache at one point in time, which share no memory with the cache.

    Only pages in use are included, layer after layer, so the size depends on the stored tokens.

    Attributes:
        content: values for JSON: fingerprints, configuration, place of each layer.
        tensors: tensors by name.
    """

    content: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def take_snapshot(cache: CacheContents, weights: str | None = None) -> Snapshot:
    """Copies the contents of `cache`, keeping them on its devices.

    Args:
        weights: `weights_fingerprint` of the cache's model, which the snapshot records; None records none.

    Raises:
        ValueError: some tokens may still be taken back, or one of Transformers' own layers cannot be copied.
    """
    with cache.stores.between_forwards():
        cache.check_handover()
        compressed = cache.compressed_layers()
        places = {
            layer.index: (cache.stores.all.index(layer.store), layer.slot, layer.seen)
            for layer in (cache.layers[layer_idx] for layer_idx in compressed)
            if layer.store is not None
        }
        others = {index: layer for index, layer in enumerate(cache.layers) if index not in compressed}
        return _snapshot(cache.stores.all, places, others, cache.config, cache.model_fingerprint, weights)


def snapshot_of_request(
    stores: Sequence[Store], others: Mapping[int, Any], config: DiffKVConfig, model: str, weights: str
) -> Snapshot:
    """Copies one request of a batch in the form of a separate cache.

    Args:
        stores: stores with every compressed layer of the model and only this request.
        others: Transformers' own layers by index.
        config: configuration of the cache.
        model, weights: fingerprints of the model.
    """
    places = {
        index: (number, layer, store.seen)
        for number, store in enumerate(stores)
        for layer, index in enumerate(store.layers)
    }
    return _snapshot(stores, dict(sorted(places.items())), others, config, model, weights)


def _snapshot(
    stores: Sequence[Store],
    places: dict[int, tuple[int, int, int]],
    others: Mapping[int, Any],
    config: DiffKVConfig,
    model: str,
    weights: str | None,
) -> Snapshot:
    """Copies stores and other layers; `places`: index of the store, slot in it and tokens seen, by compressed layer."""
    tensors: dict[str, Tensor] = {}
    content = {
        "model": model,
        "weights": weights,
        "config": config.to_dict(),
        "stores": [_describe_store(store, number, tensors) for number, store in enumerate(stores)],
        "places": {str(index): list(place) for index, place in places.items()},
        "stock_layers": {
            str(index): _describe_stock(layer, f"layer{index}", tensors) for index, layer in others.items()
        },
    }
    return Snapshot(content, tensors)


def restore_snapshot(
    make_cache: Callable[[Any, DiffKVConfig], CacheT],
    snapshot: Snapshot,
    model: Any,
    devices: dict[int, torch.device],
    other_device: torch.device,
) -> CacheT:
    """Makes a new cache for `model` with the contents of the snapshot, sharing no memory with it.

    Args:
        make_cache: function that makes an empty cache from a model or its configuration.
        model: model, or its configuration.
        devices: device of each layer, by the layer's index in the model.
        other_device: device of layers that `devices` does not name.

    Raises:
        CacheFileError: the snapshot holds layers that are not in this process, or pages of a different format.
    """
    content, tensors = snapshot.content, snapshot.tensors
    cache = make_cache(model, DiffKVConfig.from_dict(as_written(content["config"])))
    if configuration_of(model) is not model:
        cache.attach(model)
    # layers that shared a store may run on several devices now
    together: dict[tuple[int, torch.device], list[tuple[int, int, int]]] = {}
    layers = {cache.layers[layer_idx].index: cache.layers[layer_idx] for layer_idx in cache.compressed_layers()}
    if any(int(index) in cache.stores.absent for index in content["places"]):
        raise CacheFileError(
            "the saved cache holds layers that are not in this process, or that layers on another device read; under "
            "pipeline parallelism, save and load one folder per rank."
        )
    for index, (store, slot, seen) in content["places"].items():
        device = devices.get(layers[int(index)].layer_idx, other_device)
        together.setdefault((store, device), []).append((int(index), slot, seen))
    for (number, device), places in together.items():
        store = _restore_store(cache.stores, content["stores"][number], number, tensors, places, device)
        for position, (index, _, seen) in enumerate(places):
            store.place_layer(position, index)
            cache.stores.assign(index, store, position)
            layers[index].restore(store, position, seen)
    for layer_idx, described in content["stock_layers"].items():
        device = devices.get(int(layer_idx), other_device)
        _restore_stock(cache.layers[int(layer_idx)], described, f"layer{layer_idx}", tensors, device)
    return cache


def model_fingerprint(model_config: Any) -> str:
    """Returns a digest of all configuration fields that affect keys and values."""
    return _digest_of_fields(model_config, lambda name: name in VOLATILE or DROPOUT.search(name) is not None)


def is_fingerprint_of(fingerprint: str, model_config: Any) -> bool:
    """Returns whether a saved fingerprint belongs to a model, in today's form or in that of 0.1.0."""
    earlier = _digest_of_fields(model_config, FIRST_VOLATILE.__contains__)
    return fingerprint in (model_fingerprint(model_config), earlier)


def _digest_of_fields(model_config: Any, is_left_out: Callable[[str], bool]) -> str:
    values = model_config.get_text_config(decoder=True).to_dict()
    values = {name: value for name, value in values.items() if not is_left_out(name)}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def weights_fingerprint(model: Any) -> str:
    """Returns a digest of a few elements of every parameter. Raises `ValueError` if weights are offloaded."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.is_meta:
            raise ValueError(
                f"{name} is offloaded, so model's weights cannot be compared with others; load it without offloading."
            )
        # this rank's part under tensor parallelism
        parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // WEIGHT_SAMPLES)][:WEIGHT_SAMPLES]
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _describe_store(store: Store, index: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if store.revocable:
        raise ValueError("some tokens may still be rolled back; call cache.crop(0) before saving.")
    settle(store)
    store.look()
    table = store.table.table
    used = table != NULL_PAGE
    renumbered = torch.zeros_like(table)
    renumbered[used] = torch.arange(1, int(used.sum()) + 1, dtype=table.dtype, device=table.device)
    tensors[f"store{index}.table"] = renumbered
    tensors[f"store{index}.pages"] = store.pool.pages[table[used].long()]
    tensors[f"store{index}.padding"] = store.padding.mask().clone()
    for name in ROW_STATE:
        tensors[f"store{index}.{name}"] = getattr(store, name).clone()
    if store.lowering.active and store.lowering.moments is not None:
        # keys lowered later are rounded for the queries of these prompts as well
        tensors[f"store{index}.{QUERY_MOMENTS}"] = store.lowering.moments.clone()
    # earlier releases do not know lowered tokens
    lowered = {"lowered": store.lowering.tokens, "stage": store.stage} if store.lowering.active else {}
    return {
        "num_layers": store.num_layers,
        "batch_size": store.batch_size,
        "num_heads": store.num_heads,
        "key_dim": store.key_dim,
        "value_dim": store.value_dim,
        "dtype": str(store.dtype).removeprefix("torch."),
        "seen": store.seen,
        "steps_since_compaction": 0,
        "tightening": store.tightening,
        "page_bytes": store.layout.page_bytes,
        **lowered,
    }


def _restore_store(
    stores: Stores,
    described: dict[str, Any],
    index: int,
    tensors: dict[str, Tensor],
    places: list[tuple[int, int, int]],
    device: torch.device,
) -> Store:
    """Restores a store on `device`; `places`: layer, slot in the saved store and tokens seen."""
    layers, slots = [index for index, _, _ in places], [slot for _, slot, _ in places]
    dims = {name: described[name] for name in ("num_heads", "key_dim", "value_dim")}
    heads = KVHeads(**dims, dtype=getattr(torch, described["dtype"]), device=device, latent=stores.latent)
    configs = [stores.configs[layer] for layer in layers]
    if any(not same_pages(config, configs[0]) for config in configs):
        raise CacheFileError("the saved cache groups layers that this version keeps separate; save the cache again.")
    store = stores.make_store(layers[0], len(slots), described["batch_size"], heads)
    # earlier releases had two precisions and no stages
    stage = described.get("stage", 0)
    unknown = "stage" not in described and len(store.layouts) > 1
    if unknown or described["page_bytes"] != store.layout.page_bytes:
        raise CacheFileError("the page format of the saved cache differs from this version's; save the cache again.")
    store.begin_stage(stage)
    for name in ROW_STATE:
        target = getattr(store, name)
        # the key offset is empty if keys are not centred, and absent in version 1; sinks are absent in versions 1 and 2
        known = name != "sink_end" or store.sink_slots or f"store{index}.{name}" in tensors
        if target.numel() and known:
            saved = tensors[f"store{index}.{name}"][slots]
            target.copy_(saved if saved.ndim == target.ndim else saved[:, None])
    table = tensors[f"store{index}.table"][slots].to(device)
    used = table != NULL_PAGE
    pages = tensors[f"store{index}.pages"]
    if slots != list(range(described["num_layers"])):
        pages = pages[(table[used] - 1).long().to(pages.device)]
    pages = pages.to(device)
    store.pool.ensure_free(pages.shape[0])
    _, fresh = store.pool.free_list.take(torch.tensor([pages.shape[0]], device=device))
    store.pool.pages[fresh] = pages
    table[used] = fresh.to(table.dtype)
    store.table.table = table
    padding = tensors[f"store{index}.padding"].to(device)
    store.padding.append(padding.shape[1], None if bool(padding.all()) else padding)
    store.seen = described["seen"]
    # absent up to version 3
    store.tightening = described.get("tightening", 0.0)
    # absent where nothing is lowered
    store.lowering.tokens = described.get("lowered", 0)
    store.lowering.told_full = store.lowering.tokens > 0
    moments = tensors.get(f"store{index}.{QUERY_MOMENTS}")
    if store.moments is None and moments is not None:
        store.lowering.moments = moments[slots].to(device)
    return store


def _describe_stock(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Collects a Transformers layer's tensors and plain values by attribute name."""
    described: dict[str, Any] = {"type": type(layer).__name__, "plain": {}, "tensors": []}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}.{name}"] = value.clone()
            described["tensors"].append(name)
        else:
            described["plain"][name] = _describe_value(layer, name, value, prefix, tensors)
    return described


def _describe_value(layer: Any, name: str, value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value)}
    if isinstance(value, Tensor):
        tensors[f"{prefix}.{name}"] = value.clone()
        return {"tensor": name}
    if isinstance(value, dict) and all(type(key) is int for key in value):
        # several states of one layer by number
        items = value.items()
        return {"states": [[key, _describe_value(layer, f"{name}.{key}", v, prefix, tensors)] for key, v in items]}
    raise ValueError(
        f"a {type(layer).__name__} holds {name}={type(value).__name__}, which cannot be saved; caches of this "
        "model can only be copied with copy.deepcopy."
    )


def _restore_stock(
    layer: Any, described: dict[str, Any], prefix: str, tensors: dict[str, Tensor], device: torch.device
) -> None:
    if described["type"] != type(layer).__name__:
        raise CacheFileError(f"{prefix} was a {described['type']} and is now a {type(layer).__name__}.")
    values = {name: {"tensor": name} for name in described["tensors"]} | described["plain"]
    for name, value in values.items():
        setattr(layer, name, _restore_value(value, prefix, tensors, device))


def _restore_value(value: Any, prefix: str, tensors: dict[str, Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        # some layers write into their tensors
        return tensors[f"{prefix}.{value['tensor']}"].to(device, copy=True)
    if "states" in value:
        return {key: _restore_value(state, prefix, tensors, device) for key, state in value["states"]}
    return getattr(torch, value["dtype"].removeprefix("torch.")) if "dtype" in value else device
