"""`generate()` and continuous batching on one model: refused while both would run, fine one after the other."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from batching import LOSSLESS, chunks, expected, prompts, request_config
from tiny_models import tiny_model
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria

from hf_diffkv import DiffKVCache
from hf_diffkv.cache.errors import ModelInUseError
from hf_diffkv.compat import passing

IDS = prompts((60,))[0]
NEW = 24
STOCK = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
DIFFKV = {"cache_implementation": "diffkv", "cache_config": LOSSLESS.to_dict()}
CONFIGS = {"stock": STOCK, "ours": request_config(LOSSLESS, max_new_tokens=NEW)}


def few_pages() -> Any:
    """Options of a manager; Transformers' own would take a share of all memory."""
    return chunks(num_blocks=8)


@pytest.fixture(params=["eager", "sdpa"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model("llama", request.param)


def generate(model: PreTrainedModel, **options: Any) -> list[int]:
    return expected(model, IDS, 4, **options)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_running_manager_keeps_its_requests(model: PreTrainedModel, kind: str) -> None:
    said = expected(model, IDS, NEW)
    attention = model.config._attn_implementation
    manager = model.init_continuous_batching(CONFIGS[kind], few_pages())
    manager.start()
    try:
        name = manager.add_request(IDS, max_new_tokens=NEW)
        within = model.config._attn_implementation
        for options in (DIFFKV, passing(DiffKVCache(model.config, LOSSLESS))):
            with pytest.raises(ModelInUseError, match=r"generate_batch.*manager\.stop\(\)"):
                generate(model, **options)
            assert model.config._attn_implementation == within
        if kind == "ours":
            with pytest.raises(ModelInUseError, match="continuous batching is running on"):
                generate(model)
        answer = manager.get_result(name, timeout=60)
        assert answer.error is None and answer.generated_tokens == said
    finally:
        manager.stop()
    # as the message says
    assert generate(model, **DIFFKV) == said[:4]
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_paused_manager_lends_its_model(model: PreTrainedModel, kind: str) -> None:
    said = expected(model, IDS, NEW)
    manager = model.init_continuous_batching(CONFIGS[kind], few_pages())
    if not hasattr(manager, "pause"):
        pytest.skip("this release of Transformers does not pause")
    manager.start()
    try:
        name = manager.add_request(IDS, max_new_tokens=NEW)
        with manager.pause():
            assert generate(model, **passing(DiffKVCache(model.config, LOSSLESS))) == said[:4]
        answer = manager.get_result(name, timeout=60)
        assert answer.error is None and answer.generated_tokens == said
    finally:
        manager.stop()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_kept_manager_is_not_in_the_way(model: PreTrainedModel, kind: str) -> None:
    """`generate_batch`, `generate()`, and the manager that the first one left once more."""
    said = expected(model, IDS, NEW)
    for _ in range(2):
        batch = {
            "generation_config": CONFIGS[kind],
            "continuous_batching_config": few_pages(),
            "progress_bar": False,
        }
        answers = model.generate_batch([IDS], persistent_manager=True, **batch)
        assert next(iter(answers.values())).generated_tokens == said
        assert generate(model, **DIFFKV) == said[:4]
    model.destroy_cached_continuous_batching_manager()


def test_batching_waits_for_a_running_call(model: PreTrainedModel) -> None:
    class Begin(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            reached.set()
            assert go_on.wait(60)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    reached, go_on, said = threading.Event(), threading.Event(), []
    idle = model.init_continuous_batching(CONFIGS["ours"], few_pages())
    idle.start()
    idle.stop()
    wanted = generate(model)
    options = {**DIFFKV, "stopping_criteria": [Begin()]}
    thread = threading.Thread(target=lambda: said.append(generate(model, **options)))
    thread.start()
    assert reached.wait(60)
    try:
        for config in CONFIGS.values():
            with pytest.raises(ModelInUseError, match="start it after the call has returned"):
                model.init_continuous_batching(config, few_pages())
        with pytest.raises(ModelInUseError, match="start it after the call has returned"):
            idle.start()
        assert model.config._attn_implementation == "diffkv"
    finally:
        go_on.set()
        thread.join(60)
    assert said == [wanted]
    (answer,) = model.generate_batch([IDS], STOCK, few_pages()).values()
    assert answer.generated_tokens == expected(model, IDS, NEW)


def test_a_manager_that_is_dropped_gives_the_model_back(model: PreTrainedModel) -> None:
    said, attention = expected(model, IDS, NEW), model.config._attn_implementation
    dropped = model.init_continuous_batching(CONFIGS["ours"], few_pages())
    other = model.init_continuous_batching(CONFIGS["ours"], few_pages())
    del dropped
    gc.collect()
    other.start()
    assert other.get_result(other.add_request(IDS), timeout=60).generated_tokens == said
    other.stop()
    assert model.config._attn_implementation == attention and expected(model, IDS, NEW) == said
    del other
    dropped = model.init_continuous_batching(CONFIGS["ours"], few_pages())
    del dropped
    gc.collect()
    assert model.config._attn_implementation == attention and expected(model, IDS, NEW) == said


def test_a_manager_that_never_ran_leaves_the_model_to_another(model: PreTrainedModel) -> None:
    said, attention = expected(model, IDS, NEW), model.config._attn_implementation
    idle, manager = (model.init_continuous_batching(CONFIGS["ours"], few_pages()) for _ in range(2))
    manager.start()
    name = manager.add_request(IDS, streaming=True)
    manager.get_result(name, timeout=60)
    idle.stop()
    output = list(manager.request_id_iter(name))[-1]
    manager.stop()
    assert output.error is None and output.generated_tokens == said
    assert model.config._attn_implementation == attention
