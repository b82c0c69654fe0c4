"""The library as a user calls it. It is never run: `make check` checks it with the types that users see."""

from __future__ import annotations

from pathlib import Path

import torch
from hf_diffkv_demo.coloured_text import ColouredText
from hf_diffkv_demo.coloured_text import text as coloured_text
from hf_diffkv_evaluation.lines import memory as held_bytes

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig, MemoryReport, Precision, PrefixStore, plot
from hf_diffkv.cache.report import LayerReport
from hf_diffkv.planning import LayerShape
from hf_diffkv.plot import Picture
from hf_diffkv.policy import Policy


def configurations() -> list[DiffKVConfig]:
    return [
        DiffKVConfig(),
        DiffKVConfig(high="K8V4", low=Precision(4, 2), alpha_high=[1.0, 2.0], alpha_low=0.0),
        DiffKVConfig.preset("balanced"),
        DiffKVConfig.paper(alpha_high=2.0, window=16),
        DiffKVConfig.lossless(),
        DiffKVConfig.from_dict(DiffKVConfig().to_dict()),
    ]


def caches(model: torch.nn.Module, folder: Path) -> DiffKVCache:
    cache = DiffKVCache(model, DiffKVConfig(), max_bytes=1 << 30)
    cache.save_pretrained(folder, model)
    loaded: DiffKVCache = DiffKVCache.from_pretrained(folder, model)
    length: int = loaded.get_seq_length()
    layers: list[int] = loaded.compressed_layers()
    levels: torch.Tensor = loaded.levels(layers[0])[:, :, :length]
    keys, values, stored = loaded.dequantize(layers[0])
    assert levels.shape == stored.shape == keys.shape[:-1] == values.shape[:-1]
    loaded.check_integrity()
    loaded.reset()
    return loaded


def reports(cache: DiffKVCache) -> tuple[int, float]:
    memory: MemoryReport = cache.memory()
    first: LayerReport = memory.layers[0]
    high: int = sum(first.high)
    return memory.bytes + high, memory.ratio


def pictures(cache: DiffKVCache, ids: list[int], tokenizer: object, folder: Path) -> list[Path]:
    overview: Picture = plot.levels(cache)
    text: ColouredText = coloured_text(cache, ids, tokenizer, layer_idx=0, head=0).words()
    lines: Picture = held_bytes({"DynamicCache": [(1024, 3.0e6)], "DiffKV": [(1024, 1.0e6)]})
    return [overview.save(folder / "a.png"), text.save(folder / "b.html"), lines.save(folder / "c.png")]


def prefixes(model: torch.nn.Module, ids: torch.Tensor, folder: Path) -> float:
    store = PrefixStore(model, DiffKVConfig(), folder=folder, host_bytes=1 << 30)
    cache: DiffKVCache = store.lookup(ids)
    store.insert(ids, cache)
    return store.stats.lookups + store.measure()


def bytes_of(shape: LayerShape) -> int:
    return shape.num_key_value_heads * shape.key_dim


def name_of(policy: Policy) -> bool:
    return policy.by_thresholds or policy.sets_thresholds


hf_diffkv.register()
hf_diffkv.unregister()
