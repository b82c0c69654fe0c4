"""Run of each process in `test_batched_tensor_parallel.py`; started by torchrun, or called for one process.

Argument: a folder with a folder `model`, which also takes what the ranks find.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_diffkv_serving.batching import engine  # noqa: F401  looks at what is watched below
from hf_diffkv_serving.batching import slots as slots_module
from hf_diffkv_serving.batching.engine_cache import ContinuousCache
from hf_diffkv_serving.batching.reservations import Reservations
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_diffkv import DiffKVConfig
from hf_diffkv.store import check_integrity

sys.path += [str(Path(__file__).parents[4] / "tests"), str(Path(__file__).parents[1] / "batching")]
from batching import levels_of  # noqa: E402

KV_HEADS = 4
LOSSY = DiffKVConfig(alpha_high=1.0, alpha_low=0.4, window=16)
CONFIGS: dict[str, DiffKVConfig] = {
    "lossless": DiffKVConfig.lossless(window=8),
    "compressed": LOSSY,
    "per head": DiffKVConfig(
        alpha_high=((0.5, 1.0, 2.0, 3.0), (3.0, 0.6, 1.5, 1.0)),
        alpha_low=((0.0, 0.8, 0.3, 1.0), (0.4, 0.2, 1.0, 0.0)),
        window=16,
    ),
    # the first rank has the large heads
    "precision per head": DiffKVConfig(
        head_precisions=(("K8V8", "K8V8", "K4V2", "K4V2"), ("K5V4", "K3V3", "K5V4", "K5V4")), window=16
    ),
    # thresholds in the other layer
    "precision per head of one layer": DiffKVConfig(
        head_precisions=(("K8V8", "K4V2", "K4V2", "K4V2"), None),
        alpha_high=((0.5, 1.0, 2.0, 3.0), (3.0, 0.6, 1.5, 1.0)),
        alpha_low=((0.0, 0.8, 0.3, 1.0), (0.4, 0.2, 1.0, 0.0)),
        window=16,
    ),
}
LENGTHS, NEW = (5, 90, 1, 40, 130), 12
CROWD, CROWD_NEW = (70, 60, 75, 50), 32
AMPLE, TIGHT, TIGHTER = 64 << 20, 400_000, 110_000


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def wanted(config: DiffKVConfig, max_bytes: int, **options: Any) -> GenerationConfig:
    fields = {**config.to_dict(), "max_bytes": max_bytes}
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    return GenerationConfig(cache_implementation="diffkv", cache_config=fields, **given)


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Notes the levels of each request at its end, preemptions and denials, and checks that nothing is left."""
    found: dict[str, Any] = {"levels": {}, "preempted": 0, "denied": 0, "pages": []}
    free, caches = ContinuousCache.free_blocks, []
    can_store = ContinuousCache.can_store_request_tokens

    def watched_store(cache: ContinuousCache, *args: Any) -> bool:
        stored = can_store(cache, *args)
        found["denied"] += not stored
        return stored

    def watched_free(cache: ContinuousCache, request_id: str, no_cache: bool = False) -> None:
        if cache not in caches:
            caches.append(cache)
        slot = cache._slot_of.get(request_id)
        found["preempted"] += no_cache and slot is not None
        if slot is not None and cache.slots.seen(slot):
            found["pages"].append(sum(part.held(slot) for part in cache.slots.parts))
            found["levels"][request_id] = torch.cat(levels_of(cache.slots, slot))
        free(cache, request_id, no_cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContinuousCache, "free_blocks", watched_free)
        patch.setattr(ContinuousCache, "can_store_request_tokens", watched_store)
        yield found
    for cache in caches:
        assert cache.slots.idle == cache.slots.count
        for part in cache.slots.parts:
            check_integrity(part.store)
            assert part.store.owned_pages().numel() == 0
    found["slots"] = [(cache.slots.count, cache.slots.longest) for cache in caches]


def texts(model: PreTrainedModel, lengths: tuple[int, ...], config: GenerationConfig, tokens: int) -> list[list[int]]:
    options = ContinuousBatchingConfig(max_batch_tokens=tokens, safety_margin=0.0, seed=3)
    outputs = model.generate_batch(prompts(lengths), config, options)
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


def uncut(model: PreTrainedModel) -> dict[str, Any]:
    """Text and levels of every configuration where no prompt is cut into parts."""
    found = {}
    for name, config in CONFIGS.items():
        with watched() as seen:
            said = texts(model, LENGTHS, wanted(config, AMPLE), 512)
        found[name] = {"texts": said, **seen}
    return found


def crowded(model: PreTrainedModel) -> dict[str, Any]:
    """Too little memory for all, prompts in parts."""
    found = {}
    for name, config in CONFIGS.items():
        with watched() as seen:
            budget = TIGHT if name == "lossless" else TIGHTER
            said = texts(model, CROWD, wanted(config, budget, max_new_tokens=CROWD_NEW), 64)
        found[name] = {"texts": said, **seen}
    return found


def several_of_each(model: PreTrainedModel) -> list[list[int]]:
    """Sampled, two answers to each prompt."""
    with watched():
        return texts(model, (30, 80), wanted(LOSSY, AMPLE, do_sample=True, num_return_sequences=2), 64)


def one_request_fails_on_one_rank(model: PreTrainedModel) -> list[tuple[str | None, int]]:
    """Error and generated tokens of each request; the second one cannot go on where the rank is 1."""
    attention = slots_module.PromptAttention

    def fails(store: Any, layer: int, key: Any, value: Any) -> Any:
        if dist.get_rank() == 1 and key.shape[2] == 40:
            raise ValueError("cannot be stored")
        return attention(store, layer, key, value)

    with pytest.MonkeyPatch.context() as patch, watched():
        patch.setattr(slots_module, "PromptAttention", fails)
        options = ContinuousBatchingConfig(max_batch_tokens=512)
        outputs = model.generate_batch(prompts((20, 40, 60)), wanted(LOSSY, AMPLE), options)
    return [(output.error, len(output.generated_tokens)) for output in outputs.values()]


def no_memory_on_one_rank(model: PreTrainedModel) -> list[str | None]:
    """Errors of all requests where a rank's device has no memory for pages that were promised."""
    provide, calls = Reservations.provide, []

    def fails(reservations: Reservations) -> None:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 3:
            raise MemoryError("the device is full")
        provide(reservations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reservations, "provide", fails)
        outputs = model.generate_batch(prompts((20, 40)), wanted(LOSSY, AMPLE), ContinuousBatchingConfig())
    return [output.error for output in outputs.values()]


def managed(model: PreTrainedModel) -> dict[str, Any]:
    """The driver adds and cancels; the other rank follows until all stop."""
    manager = model.init_continuous_batching(wanted(LOSSY, AMPLE), ContinuousBatchingConfig(max_batch_tokens=64))
    manager.start()
    names = [manager.add_request(ids, max_new_tokens=30) for ids in prompts((20, 40))]
    found = {"names": names, "driver": manager.is_tp_driver}
    if manager.is_tp_driver:
        manager.cancel_request(names[0])
        output = None
        while output is None and manager.is_running():
            output = manager.get_result(timeout=1)
        found |= {"done": output.request_id, "tokens": output.generated_tokens}
    else:
        while manager.is_running():
            time.sleep(0.05)
    manager.stop()
    memory = manager.memory()
    assert memory is None or memory.requests == 0
    manager.destroy()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=DistributedConfig(tp_size=2))
    found = {
        "uncut": uncut(model),
        "crowded": crowded(model),
        "several": several_of_each(model),
        "failed": one_request_fails_on_one_rank(model),
        "full": no_memory_on_one_rank(model),
        "managed": managed(model),
    }
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
