"""Run of each process in `test_tensor_parallel.py`; started by torchrun, or called for one process.

Arguments: folders with a folder `model` each, which also take what the ranks find. The same processes run all models in
turn, so that what one of them leaves behind shows in the next.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_diffkv import CacheFileError, DiffKVCache, DiffKVConfig, HandOverError
from hf_diffkv.compat import passing
from hf_diffkv.config.layers import layer_configs

LAYERS, KV_HEADS, HEAD_DIM = 2, 4, 16
COMPRESSED = {"alpha_high": 1.0, "alpha_low": 0.5, "window": 16}
# thresholds so far apart that a head given another one's cannot have the same levels
PER_HEAD = {
    "alpha_high": ((0.5, 1.0, 2.0, 3.0), (3.0, 0.6, 1.5, 1.0)),
    "alpha_low": ((0.0, 0.8, 0.3, 1.0), (0.4, 0.2, 1.0, 0.0)),
    "window": 16,
}
CONFIGS: dict[str, DiffKVConfig] = {
    "lossless": DiffKVConfig.lossless(window=16),
    "compressed": DiffKVConfig(**COMPRESSED),
    "per head": DiffKVConfig(**PER_HEAD),
    "precision per head": DiffKVConfig(
        head_precisions=(("K8V8", "K4V2", "K4V2", "K8V8"), ("K5V4", "K3V3", "K5V4", "K5V4")), window=16
    ),
    # thresholds in the other layer
    "precision per head of one layer": DiffKVConfig(
        head_precisions=(("K8V8", "K4V2", "K4V2", "K4V2"), None), **PER_HEAD
    ),
}
GREEDY = {"max_new_tokens": 40, "do_sample": False}


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and mask, int64 [2, 120]."""
    ids = torch.randint(3, 128, (2, 120), generator=torch.Generator().manual_seed(5))
    mask = (torch.arange(120) >= torch.tensor([0, 50])[:, None]).long()
    return ids * mask, mask


def contents(cache: DiffKVCache) -> dict[str, Any]:
    """Levels, sums, keys and values of all layers, and what is reported."""
    cache.check_integrity()
    layers = cache.compressed_layers()
    found = {
        "levels": torch.stack([cache.levels(i) for i in layers]),
        "keys": torch.stack([cache.dequantize(i)[0] for i in layers]),
        "values": torch.stack([cache.dequantize(i)[1] for i in layers]),
        "tokens": cache.memory().tokens,
        "dense_bytes": cache.memory().dense_bytes,
    }
    if cache.config.selects:
        # layers with a precision for each head keep none
        choosing = [i for index, i in enumerate(layers) if cache.config.of_layer(index).selects]
        found["sums"] = torch.stack([cache.significance(i).nan_to_num(-1.0) for i in choosing])
    return found


def dense(model: PreTrainedModel) -> torch.Tensor:
    """The text that an uncompressed cache gives."""
    ids, mask = prompts()
    return model.generate(ids, attention_mask=mask, **GREEDY)


def generated(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Text and contents for every configuration."""
    ids, mask = prompts()
    found = {}
    for name, config in CONFIGS.items():
        cache = DiffKVCache(model.config, config)
        text = model.generate(ids, attention_mask=mask, **passing(cache), **GREEDY)
        found[name] = {"text": text, **contents(cache)}
    return found


def saved_and_loaded(model: PreTrainedModel, folder: Path) -> torch.Tensor:
    """Saves every rank's part into one folder, and continues from the loaded part."""
    ids, mask = prompts()
    cache = DiffKVCache(model.config, **COMPRESSED)
    text = model.generate(ids, attention_mask=mask, **passing(cache), **GREEDY)
    cache.save_pretrained(folder, model)
    loaded = DiffKVCache.from_pretrained(folder, model)
    before, after = contents(cache), contents(loaded)
    assert all(torch.equal(before[name], after[name]) for name in ("levels", "keys", "values", "sums"))
    mask = torch.cat([mask, torch.ones(2, text.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    return model.generate(text, attention_mask=mask, **passing(loaded), **GREEDY)


def called(model: PreTrainedModel) -> dict[str, Any]:
    """The model called by hand, with per-head thresholds, which need `attach`."""
    ids, _ = prompts()
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, **PER_HEAD)
    if dist.is_initialized():
        # a cache that knows nothing of ranks has thresholds of another number of heads
        with pytest.raises(ValueError, match="attach"):
            model(ids, **passing(cache))
        cache.reset()
        cache.attach(model)
    with torch.no_grad():
        for part in ids.split([100, *[1] * 20], dim=1):
            model(part, **passing(cache))
    return contents(cache)


def stopped_together(model: PreTrainedModel) -> list[str]:
    """One rank cannot go on, in the prompt, in a step, in a choice of rows, in taking back, with broken keys."""
    ids, mask = prompts()
    mine = dist.get_rank() == 1
    tiny = DiffKVConfig(**COMPRESSED, max_bytes=1000)
    messages = []

    def stops(kind: type[Exception], cache: DiffKVCache, broken: bool, work: Any) -> None:
        with pytest.raises(kind) as stopped:
            work(cache)
        messages.append(str(stopped.value))
        # both ranks agree on whether the cache can go on; if not, only reset() helps
        with pytest.raises(HandOverError, match=r"reset\(\)") if broken else nullcontext():
            generate(cache)
        cache.reset()
        assert torch.equal(generate(cache), expected)

    def generate(cache: DiffKVCache, **options: Any) -> torch.Tensor:
        for store in cache.stores.all:
            store.config = cache.config
        given = (ids, mask)
        if cache.get_seq_length():
            # any token stands for those that were generated or fed
            cache.held_tokens.clear()
            given = [torch.cat([t, torch.ones(2, cache.get_seq_length() + 1 - 120, dtype=t.dtype)], 1) for t in given]
        return model.generate(given[0], attention_mask=given[1], **passing(cache), **GREEDY, **options)

    def fresh() -> DiffKVCache:
        return DiffKVCache(model.config, **COMPRESSED)

    @torch.no_grad()
    def feed(cache: DiffKVCache, count: int) -> None:
        ones = torch.ones(2, cache.get_seq_length() + count - 120, dtype=mask.dtype)
        model(ids[:, :count], attention_mask=torch.cat([mask, ones], 1), **passing(cache))

    def starve(cache: DiffKVCache) -> None:
        for store in cache.stores.all if mine else ():
            store.config = tiny

    def prompt(cache: DiffKVCache) -> None:
        stores = cache.stores
        stores.config = tiny if mine else cache.config
        stores.configs = layer_configs(stores.config, LAYERS)
        try:
            generate(cache)
        finally:
            stores.config, stores.configs = cache.config, layer_configs(cache.config, LAYERS)

    def step(cache: DiffKVCache) -> None:
        generate(cache)
        starve(cache)
        for _ in range(20):
            feed(cache, 1)

    def rows(cache: DiffKVCache) -> None:
        generate(cache)
        starve(cache)
        cache.reorder_cache(torch.tensor([0, 0]))

    def taking_back(cache: DiffKVCache) -> None:
        generate(cache)
        cache.activate_past_recording()
        feed(cache, 8)
        starve(cache)
        cache.crop(0)

    def keys(cache: DiffKVCache) -> None:
        projection = model.model.layers[1].self_attn.k_proj.weight.to_local()
        before = projection.clone()
        try:
            if mine:
                projection.fill_(torch.nan)
            generate(cache)
        finally:
            projection.copy_(before)

    expected = generate(fresh())
    stops(MemoryError, fresh(), True, prompt)
    stops(MemoryError, fresh(), True, step)
    stops(MemoryError, fresh(), False, rows)
    stops(MemoryError, fresh(), True, taking_back)
    with torch.no_grad():
        stops(ValueError, fresh(), True, keys)
    return messages


def staged(folder: Path, saved: Path) -> dict[str, dict[str, Any]]:
    """Half of the layers in each process: text, and the contents of the layers that are here."""
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(pp_size=2))
    ids, mask = prompts()
    found = {}
    for name in ("lossless", "compressed"):
        cache = DiffKVCache(model.config, CONFIGS[name], max_bytes=10**7)
        text = model.generate(ids, attention_mask=mask, **passing(cache), **GREEDY)
        rank = dist.get_rank()
        layer_idx = cache.compressed_layers()[rank]
        assert [store.num_layers for store in cache.stores.all] == [1]
        found[name] = {"text": text, "levels": cache.levels(layer_idx), "keys": cache.dequantize(layer_idx)[0]}
        cache.save_pretrained(saved / f"{name}{rank}")
        dist.barrier()
        with pytest.raises(CacheFileError, match="folder per rank"):
            DiffKVCache.from_pretrained(saved / f"{name}{1 - rank}", model)
        loaded = DiffKVCache.from_pretrained(saved / f"{name}{rank}", model)
        assert torch.equal(loaded.levels(layer_idx), cache.levels(layer_idx))
        mask_of_all = torch.cat([mask, torch.ones(2, text.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        texts = [
            model.generate(text, attention_mask=mask_of_all, **passing(each), **GREEDY) for each in (cache, loaded)
        ]
        assert torch.equal(*texts)
        found[name]["next turn"] = texts[0]
    return found


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto")
        assert model.dtype == torch.float64
        found = {
            "dense": dense(model),
            "generated": generated(model),
            "loaded": saved_and_loaded(model, folder / "cache"),
            "called": called(model),
            "messages": stopped_together(model),
            "staged": staged(folder / "model", folder / "stages"),
        }
        if (folder / "windowed").exists():
            found["windowed"] = staged(folder / "windowed", folder / "windowed stages")
        torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
