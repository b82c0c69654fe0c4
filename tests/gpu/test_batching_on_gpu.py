"""Continuous batching on a GPU: requests get the text of `generate()`, captured steps included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model, with_plain_experts
from transformers import PreTrainedModel

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    pytest.skip("continuous batching needs Transformers 5.23", allow_module_level=True)
pytest.importorskip("hf_diffkv_serving")

from batching import LOSSLESS, LOSSY, check_empty, chunks, prompts, request_config  # noqa: E402

from hf_diffkv import DiffKVCache, DiffKVConfig  # noqa: E402
from hf_diffkv.compat import passing  # noqa: E402

LENGTHS = (5, 150, 80, 1, 12, 64, 190, 90, 400)


def least_budget(model: PreTrainedModel, config: DiffKVConfig, batching: Any, least: int) -> int:
    """Returns the bytes from `least` on, doubled as often as needed, with which a manager starts on this device."""
    for doublings in range(12):
        try:
            model.init_continuous_batching(request_config(config, least << doublings), batching).warmup()
        except MemoryError:
            continue
        return least << doublings
    raise AssertionError("no manager starts")


def answers(model: PreTrainedModel, given: list[list[int]], config: Any, batching: Any) -> tuple[list, Any]:
    """Returns the texts of all requests, and what captured the steps."""
    manager = model.init_continuous_batching(config, batching)
    names = [manager.add_request(ids) for ids in given]
    manager.start()
    found = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=60)
        assert output is not None, "no answer within a minute"
        if output.is_finished():
            assert output.error is None, output.error
            found[output.request_id] = output.generated_tokens
    processor = manager.batch_processor
    manager.stop()
    check_empty(processor.cache.slots)
    return [found[name] for name in names], processor.captured


def generated(model: PreTrainedModel, given: list[list[int]], config: DiffKVConfig | None) -> list[list[int]]:
    texts = []
    for ids in given:
        options = passing(DiffKVCache(model.config, config)) if config is not None else {}
        tokens = torch.tensor([ids], device=model.device)
        output = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
        texts.append(output[0, len(ids) :].tolist())
    return texts


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("captured", [False, True])
def test_lossless_requests(device, name: str, captured: bool) -> None:
    """float32, prompts in chunks of 64 beside steps."""
    model = with_plain_experts(tiny_model(name, "eager" if name == "gpt_oss" else "sdpa")).to(device)
    given = prompts(LENGTHS)
    want = generated(model, given, None)
    config = request_config(DiffKVConfig.lossless(window=8, cuda_graphs=captured))
    got, steps = answers(model, given, config, chunks())
    assert got == want
    if name == "llama":
        assert (steps is not None and steps.replays > 0) == captured


def test_compressed_requests(device) -> None:
    """Prompts that are not cut into parts."""
    model = tiny_model("llama").to(device)
    given = prompts(LENGTHS)
    want = generated(model, given, LOSSY)
    got, _ = answers(model, given, request_config(LOSSY), chunks(512))
    assert sum(map(list.__eq__, got, want)) >= len(want) - 1


def test_budgets_and_preemption(device) -> None:
    """Only some requests fit at once; each is answered, and lossless ones as if alone."""
    model = tiny_model("llama").to(device)
    given = prompts((70, 60, 75, 50) * 3)
    want = generated(model, given, None)
    max_bytes = least_budget(model, LOSSLESS, chunks(), 300_000)
    got, _ = answers(model, given, request_config(LOSSLESS, max_bytes), chunks())
    assert got == want


def test_requests_until_full(device) -> None:
    model = tiny_model("llama").to(device)
    given = prompts((120, 60, 175, 50) * 2)
    config = DiffKVConfig.preset("balanced", window=16, page_bytes=512, until_full="K8V8", max_bytes=200_000)
    got, _ = answers(model, given, request_config(config, least_budget(model, config, chunks(), 200_000)), chunks())
    assert all(len(text) == 12 for text in got)
