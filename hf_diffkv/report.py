"""What a cache holds: bytes, tokens per level, and a picture of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .store import Store, payload

if TYPE_CHECKING:
    from .integration.cache import DiffKVCache

# colour of each level in plots, in stacking order
LEVELS = {"high": "#1b4f72", "low": "#5dade2", "window": "#f5b041", "pruned": "#d5d8dc"}
MAX_BARS = 64


@dataclass(frozen=True)
class LayerReport:
    """Tokens of one compressed layer, per KV head and summed over the batch.

    Attributes:
        high, low, window, pruned: tokens at each level, one number per KV head.
    """

    layer_idx: int
    high: tuple[int, ...]
    low: tuple[int, ...]
    window: tuple[int, ...]
    pruned: tuple[int, ...]


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a cache.

    Attributes:
        compressed_bytes: what the devices hold for the compressed layers: whole pages, windows, tables, free list,
            counters.
        compressed_dense_bytes: what an uncompressed cache of the same tokens would hold for them.
        other_bytes: what Transformers' own layers (sliding window, linear) hold, compressed or not.
        payload_bytes: `bytes` with the compressed layers' codes and windows alone, the figure the papers give; no
            metadata, scores or page slack.
        tokens: token count over layers, heads and requests, by level: high, low, window, pruned.
        layers: the same per layer and head.
        num_layers: layers of the cache, compressed or not.
        thresholds: alpha_high and alpha_low, the highest of any request and head, where `max_bytes` has raised them;
            else None.
    """

    compressed_bytes: int
    compressed_dense_bytes: int
    other_bytes: int
    payload_bytes: int
    tokens: dict[str, int]
    layers: tuple[LayerReport, ...]
    num_layers: int
    thresholds: tuple[float, float] | None = None

    @property
    def bytes(self) -> int:
        """What the whole cache holds, in bytes."""
        return self.compressed_bytes + self.other_bytes

    @property
    def dense_bytes(self) -> int:
        """What it would hold uncompressed."""
        return self.compressed_dense_bytes + self.other_bytes

    @property
    def ratio(self) -> float:
        """bytes / dense_bytes; 0 for an empty cache."""
        return _quotient(self.bytes, self.dense_bytes)

    @property
    def compressed_ratio(self) -> float:
        """The same of the compressed layers alone."""
        return _quotient(self.compressed_bytes, self.compressed_dense_bytes)

    @property
    def payload_ratio(self) -> float:
        """payload_bytes / dense_bytes; 0 for an empty cache."""
        return _quotient(self.payload_bytes, self.dense_bytes)

    def __str__(self) -> str:
        parts = [
            f"{self.bytes / 1e6:.2f} MB of {self.dense_bytes / 1e6:.2f} MB dense ({self.ratio:.1%}; payload "
            f"{self.payload_ratio:.1%})"
        ]
        if len(self.layers) < self.num_layers and self.layers:
            parts.append(
                f"{len(self.layers)} of {self.num_layers} layers compressed, to {self.compressed_ratio:.1%} of theirs"
            )
        parts.append("tokens: " + ", ".join(f"{name} {count}" for name, count in self.tokens.items()))
        if self.thresholds is not None:
            parts.append("max_bytes has raised alpha_high to {:.3g}, alpha_low to {:.3g}".format(*self.thresholds))
        if self.ratio >= 1:
            parts.append("too few tokens to save memory")
        return "; ".join(parts)


def memory_report(cache: DiffKVCache) -> MemoryReport:
    """Reads the devices; see `MemoryReport`."""
    stores = cache.stores.stores
    counts = {id(store): payload(store) for store in stores}
    other = _stock_bytes(cache)
    layers = []
    dense = held_payload = 0
    for layer_idx in cache.compressed_layers():
        layer = cache.layers[layer_idx]
        if layer.store is None:
            continue
        store, held = layer.store, counts[id(layer.store)]
        high, low, window = (t[layer.slot] for t in (held.high, held.low, held.window))
        pruned = held.seen[layer.slot][:, None] - high - low - window
        layers.append(LayerReport(layer_idx, *(tuple(t.sum(0).tolist()) for t in (high, low, window, pruned))))
        token = _dense_token_bytes(store)
        dense += int(held.seen[layer.slot].sum()) * store.num_heads * token
        held_payload += int(window.sum()) * token
        held_payload += int(high.sum()) * store.layout.high.payload_bits // 8
        held_payload += int(low.sum()) * store.layout.low.payload_bits // 8
    tightened = [store for store in stores if store.tightening]
    return MemoryReport(
        compressed_bytes=sum(store.bytes for store in stores),
        compressed_dense_bytes=dense,
        other_bytes=other,
        payload_bytes=held_payload + other,
        tokens={name: sum(sum(getattr(layer, name)) for layer in layers) for name in LEVELS},
        layers=tuple(layers),
        num_layers=len(cache.layers),
        thresholds=tuple(
            max(float(getattr(store, name).max()) for store in tightened) for name in ("alpha_high", "alpha_low")
        )
        if tightened
        else None,
    )


def _quotient(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _dense_token_bytes(store: Store) -> int:
    return (store.key_dim + store.value_dim) * store.dtype.itemsize


def _stock_bytes(cache: DiffKVCache) -> int:
    compressed = set(cache.compressed_layers())
    total = 0
    for layer_idx, layer in enumerate(cache.layers):
        if layer_idx in compressed or not getattr(layer, "is_initialized", True):
            continue
        tensors = [value for value in vars(layer).values() if hasattr(value, "element_size")]
        total += sum(t.numel() * t.element_size() for t in tensors)
    return total


def plot_levels(cache: DiffKVCache, path: str | Path, title: str | None = None) -> Path:
    """Writes a PNG of what was kept: the shares of high, low, window and pruned tokens of every layer and KV head.

    Few heads get a bar each; for more than `MAX_BARS` of them each level gets a map of layers and heads.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the cache holds nothing yet.
    """
    pyplot = _pyplot()
    report = memory_report(cache)
    if not report.layers:
        raise ValueError("the cache holds nothing yet; generate with it first.")
    heads = sum(len(layer.high) for layer in report.layers)
    figure = _bars(pyplot, report) if heads <= MAX_BARS else _maps(pyplot, report)
    figure.suptitle(title or _title(report))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return Path(path)


def _title(report: MemoryReport) -> str:
    whole = f"{report.bytes / 1e6:,.2f} MB held, {report.ratio:.1%} of a dense cache"
    if len(report.layers) == report.num_layers:
        return whole
    return f"{whole}\n{len(report.layers)} of {report.num_layers} layers compressed, to {report.compressed_ratio:.1%}"


def _shares(layer: LayerReport) -> dict[str, list[float]]:
    """Share of each level in the tokens a head has seen, one number per head."""
    counts = {name: getattr(layer, name) for name in LEVELS}
    totals = [max(1, sum(parts)) for parts in zip(*counts.values())]
    return {name: [count / total for count, total in zip(counts[name], totals)] for name in LEVELS}


def _bars(pyplot: Any, report: MemoryReport) -> Any:
    labels = [f"{layer.layer_idx}.{head}" for layer in report.layers for head in range(len(layer.high))]
    shares = [_shares(layer) for layer in report.layers]
    figure, axis = pyplot.subplots(figsize=(8, max(2.5, 0.22 * len(labels) + 1.7)), layout="constrained")
    left = [0.0] * len(labels)
    for name, color in LEVELS.items():
        widths = [share for layer in shares for share in layer[name]]
        axis.barh(labels, widths, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, widths)]
    axis.set(xlim=(0, 1), xlabel="share of tokens seen", ylabel="layer.head")
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncol=len(LEVELS), frameon=False)
    return figure


def _maps(pyplot: Any, report: MemoryReport) -> Any:
    width = max(len(layer.high) for layer in report.layers)
    shares = [_shares(layer) for layer in report.layers]
    size = (max(8.0, 4 * (0.2 * width + 0.6)), min(40.0, max(3.0, 0.14 * len(shares) + 1.5)))
    figure, axes = pyplot.subplots(1, len(LEVELS), figsize=size, sharey=True, layout="constrained")
    for axis, name in zip(axes, LEVELS):
        rows = [layer[name] + [float("nan")] * (width - len(layer[name])) for layer in shares]
        image = axis.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axis.set(title=name, xlabel="KV head")
    step = max(1, len(shares) // 16)
    ticks = range(0, len(shares), step)
    axes[0].set(ylabel="layer", yticks=list(ticks), yticklabels=[report.layers[i].layer_idx for i in ticks])
    figure.colorbar(image, ax=axes, label="share of tokens seen")
    return figure


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('plotting needs matplotlib: pip install "hf-diffkv[demo]"') from error
    return pyplot
