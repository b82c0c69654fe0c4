"""Reports of a cache's bytes and of its tokens per level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..pages import HIGH_LEVEL, LOW_LEVEL, PRUNED_LEVEL, WINDOW_LEVEL
from ..store import Store, payload
from ..store.lowering import names_of, room
from .snapshot import CacheContents
from .wording import kept_in_words

# codes of `DiffKVCache.levels`
LEVEL_CODES = {"high": HIGH_LEVEL, "low": LOW_LEVEL, "window": WINDOW_LEVEL, "pruned": PRUNED_LEVEL}


@dataclass(frozen=True)
class LayerReport:
    """Token counts of one compressed layer, per KV head and summed over the batch.

    Attributes:
        layer_idx: index of the layer in the model.
        high, low, window, pruned: number of tokens at each level, one per KV head.
        precisions: names of the stored tokens' precisions, one per KV head: "K4V3", or "K8V4/K4V2" if the head chooses
            between two levels or requests differ.
    """

    layer_idx: int
    high: tuple[int, ...]
    low: tuple[int, ...]
    window: tuple[int, ...]
    pruned: tuple[int, ...]
    precisions: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryReport:
    """Memory use of a cache.

    Attributes:
        compressed_bytes: device memory of the compressed layers: whole pages, windows, tables, free list, counters.
        compressed_dense_bytes: memory that the same tokens would need in these layers if uncompressed.
        other_bytes: memory of Transformers' own layers (sliding window, linear), which is the same with and without
            compression.
        payload_bytes: like `bytes`, but counting only codes and windows of the compressed layers, as papers do, without
            metadata, scores and page slack. Here and in `bytes`, forks count equal parts of shared memory.
        tokens: token counts summed over layers, heads and requests, by level: high, low, window, pruned.
        layers: token counts per layer and head.
        num_layers: number of layers of the cache, compressed or not.
        thresholds: highest alpha_high and alpha_low of any request and head if `max_bytes` has raised them, else None.
        max_bytes: budget of each device, in bytes; None if unlimited.
        filled: share of the budget in use, not counting free pages, on the fullest device; None without a budget.
        until_full: precision that all tokens have until the budget is full, "K8V8/K6V5" if it differs in some layers;
            None if tokens are chosen to stay within the budget, or without a budget.
        lowered: number of times that stored tokens were lowered, summed over layers, heads and requests.
        room: number of further tokens that each request has room for once all are lowered; None without `until_full`.
    """

    compressed_bytes: int
    compressed_dense_bytes: int
    other_bytes: int
    payload_bytes: int
    tokens: dict[str, int]
    layers: tuple[LayerReport, ...]
    num_layers: int
    thresholds: tuple[float, float] | None = None
    max_bytes: int | None = None
    filled: float | None = None
    until_full: str | None = None
    lowered: int = 0
    room: int | None = None

    @property
    def bytes(self) -> int:
        """Memory of the whole cache, in bytes."""
        return self.compressed_bytes + self.other_bytes

    @property
    def dense_bytes(self) -> int:
        """Memory of the cache if it were uncompressed, in bytes."""
        return self.compressed_dense_bytes + self.other_bytes

    @property
    def ratio(self) -> float:
        """bytes / dense_bytes; 0 for an empty cache."""
        return _quotient(self.bytes, self.dense_bytes)

    @property
    def compressed_ratio(self) -> float:
        """compressed_bytes / compressed_dense_bytes; 0 for an empty cache."""
        return _quotient(self.compressed_bytes, self.compressed_dense_bytes)

    @property
    def payload_ratio(self) -> float:
        """payload_bytes / dense_bytes; 0 for an empty cache."""
        return _quotient(self.payload_bytes, self.dense_bytes)

    @property
    def hint(self) -> str:
        """Reason why no memory is saved; empty if some is."""
        if self.ratio < 1:
            return ""
        if not self.layers:
            return "no layer of this model is compressed"
        # fewer bits or pruning would show in the payload
        as_they_are = self.tokens["high"] + self.tokens["low"] > 0 and self.payload_bytes == self.dense_bytes
        return "tokens are stored as they are, which saves nothing" if as_they_are else "too few tokens to save memory"

    def __str__(self) -> str:
        parts = [
            f"{self.bytes / 1e6:.2f} MB of {self.dense_bytes / 1e6:.2f} MB dense ({self.ratio:.1%}; payload "
            f"{self.payload_ratio:.1%})"
        ]
        if len(self.layers) < self.num_layers and self.layers:
            parts.append(
                f"{len(self.layers)} of {self.num_layers} layers compressed, to {self.compressed_ratio:.1%} of theirs"
            )
        if self.layers:
            parts.append(kept_in_words(self.layers))
        if self.thresholds is not None:
            parts.append("max_bytes has raised alpha_high to {:.3g}, alpha_low to {:.3g}".format(*self.thresholds))
        if self.until_full is not None and self.filled is not None:
            parts.append(f"{self.filled:.0%} of max_bytes in use, room for about {self.room:,} more tokens each")
        if self.hint:
            parts.append(self.hint)
        return "; ".join(parts)


def memory_report(cache: CacheContents) -> MemoryReport:
    """Measures the memory of `cache`. Reads the devices."""
    stores = cache.stores.all
    counts = {id(store): payload(store) for store in stores}
    other = _stock_bytes(cache)
    layers = []
    dense = 0
    bits = dict.fromkeys(counts, 0)
    for layer_idx in cache.compressed_layers():
        store, slot = cache.layers[layer_idx].store, cache.layers[layer_idx].slot
        if store is None:
            continue
        held = counts[id(store)]
        high, low, window = (t[slot] for t in (held.high, held.low, held.window))
        pruned = held.seen[slot][:, None] - high - low - window
        token = _dense_token_bytes(store)
        dense += int(held.seen[slot].sum()) * store.num_heads * token
        for stored, size in (
            (window, 8 * token),
            (high, store.layout.high.payload_bits),
            (low, store.layout.low.payload_bits),
        ):
            bits[id(store)] += int(stored.sum()) * size
        levels = (tuple(t.sum(0).tolist()) for t in (high, low, window, pruned))
        layers.append(LayerReport(layer_idx, **dict(zip(LEVEL_CODES, levels)), precisions=_precisions(store, slot)))
    tightened = [store for store in stores if store.tightening]
    return MemoryReport(
        compressed_bytes=sum(store.bytes for store in stores),
        compressed_dense_bytes=dense,
        other_bytes=other,
        payload_bytes=sum(bits[id(store)] // (8 * store.sharers) for store in stores) + other,
        tokens={name: sum(sum(getattr(layer, name)) for layer in layers) for name in LEVEL_CODES},
        layers=tuple(layers),
        num_layers=len(cache.layers),
        thresholds=(_highest(tightened, "alpha_high"), _highest(tightened, "alpha_low")) if tightened else None,
        **_budget(stores),
    )


def _budget(stores: list[Store]) -> dict[str, Any]:
    """Returns the fields of a `MemoryReport` about `max_bytes`."""
    max_bytes = stores[0].config.max_bytes if stores else None
    if max_bytes is None:
        return {}
    max_bytes = int(max_bytes)
    used: dict[torch.device, float] = {}
    for store in stores:
        held = store.bytes - store.pool.free_list.free * store.pool.page_bytes // store.sharers
        used[store.device] = used.get(store.device, 0.0) + held / max_bytes
    fields: dict[str, Any] = {"max_bytes": max_bytes, "filled": max(used.values())}
    if not stores[0].lowering.active:
        return fields
    left = min(room([store for store in stores if store.device == device]) for device in used)
    lowered = sum(store.lowering.tokens for store in stores)
    return fields | {"until_full": names_of(stores, 0), "lowered": lowered, "room": left}


def held_bytes(cache: CacheContents) -> int:
    """Returns the bytes of the whole cache as the host knows them, even during a forward."""
    return sum(store.bytes for store in cache.stores.all) + _stock_bytes(cache)


def in_short(cache: CacheContents) -> str:
    """Describes requests, tokens and bytes in one line, as the host knows them, without reading a device.

    Padding counts as tokens.
    """
    compressed = cache.compressed_layers()
    layers = f"{len(compressed)} layer{'' if len(compressed) == 1 else 's'} compressed"
    tokens, stores = cache.get_seq_length(), cache.stores.all
    if not stores:
        return f"empty, {layers}"
    batch, held, other = stores[0].batch_size, held_bytes(cache), _stock_bytes(cache)
    filled = (cache.layers[layer_idx].store for layer_idx in compressed)
    token = sum(store.num_heads * _dense_token_bytes(store) for store in filled if store is not None)
    dense = batch * tokens * token + other
    requests = "1 request" if batch == 1 else f"{batch} requests"
    each = "" if batch == 1 else " each"
    return f"{requests}, {tokens:,} tokens{each}, {held / 1e6:,.2f} MB of {dense / 1e6:,.2f} MB, {layers}"


def level_counts(levels: torch.Tensor) -> dict[str, list[int]]:
    """Counts, for each level and token, the heads that have the token at that level; padding has no level.

    Args:
        levels: int8 [heads, tokens], one request of `DiffKVCache.levels`.
    """
    return {name: (levels == code).sum(0).tolist() for name, code in LEVEL_CODES.items()}


def levels_of_request(
    cache: CacheContents, request: int = 0, layer_idx: int | None = None, head: int | None = None
) -> torch.Tensor:
    """Returns a request's levels, int8 [heads, tokens], for all heads, one layer's heads or a single head.

    Raises:
        ValueError: the request, layer or head does not exist, `head` is given without `layer_idx`, or the cache is
            empty.
    """
    if head is not None and layer_idx is None:
        raise ValueError(f"head={head} needs layer_idx, the layer that contains it.")
    chosen = cache.compressed_layers() if layer_idx is None else [layer_idx]
    if not chosen:
        raise ValueError("no layer of this cache is compressed, so there are no levels.")
    found = [cache.levels(index) for index in chosen]
    if not 0 <= request < found[0].shape[0]:
        raise ValueError(f"request={request} does not exist: the cache holds {found[0].shape[0]} requests.")
    if head is not None and not 0 <= head < found[0].shape[1]:
        raise ValueError(f"head={head} does not exist: layer {layer_idx} has {found[0].shape[1]} KV heads.")
    rows = torch.cat([levels[request].cpu() for levels in found])
    return rows if head is None else rows[head : head + 1]


def _precisions(store: Store, slot: int) -> tuple[str, ...]:
    """Returns the names of the precisions of a layer's heads."""
    high, low = store.high.full_name, store.low.full_name
    if store.layout.selects:
        return (high if high == low else f"{high}/{low}",) * store.num_heads
    at_low = store.low_heads[slot]
    names = {(True, True): low, (False, False): high}
    return tuple(names.get(pair, f"{high}/{low}") for pair in zip(at_low.all(0).tolist(), at_low.any(0).tolist()))


def _quotient(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _highest(stores: list[Store], name: str) -> float:
    return max(float(getattr(store, name).max()) for store in stores)


def _dense_token_bytes(store: Store) -> int:
    return (store.key_dim + store.value_dim) * store.dtype.itemsize


def _stock_bytes(cache: CacheContents) -> int:
    compressed = set(cache.compressed_layers())
    total = 0
    for layer_idx, layer in enumerate(cache.layers):
        if layer_idx in compressed or not getattr(layer, "is_initialized", True):
            continue
        # a list, as another thread may add attributes; states are in dicts
        held = [list(value.values()) if isinstance(value, dict) else [value] for value in list(vars(layer).values())]
        tensors = [each for values in held for each in values if hasattr(each, "element_size")]
        total += sum(t.numel() * t.element_size() for t in tensors)
    return total
