"""Captured steps on a GPU give the logits of steps from Python, without a new capture as the cache grows."""

from __future__ import annotations

import pytest
import torch
from device_waits import no_waits
from test_models_on_gpu import build
from tiny_models import greedy
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.cache import graphs
from hf_diffkv.compat import passing

PROMPT = 600
# nothing is quantised: what a compiler rounds otherwise moves no code
EXACT = DiffKVConfig(high=Precision(16, 16), low=Precision(16, 16), alpha_high=1.0, alpha_low=0.2, window=16)


def generate(
    model: PreTrainedModel, config: DiffKVConfig, padded: bool, new: int, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logits and one layer's levels after two prompts, of which one may be padded."""
    generator = torch.Generator(model.device).manual_seed(1)
    tokens = torch.randint(0, 256, (2, PROMPT), device=model.device, generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, : PROMPT // 2] = 0
    cache = DiffKVCache(model.config, config)
    output = greedy(model, tokens, mask, new, **passing(cache), **options)
    cache.check_integrity()
    return output.sequences, torch.stack(output.logits), cache.levels(1)


def assert_same(got: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-3)
    assert (got[2] != expected[2]).float().mean() < 0.001


@pytest.mark.parametrize("padded", [False, True])
def test_replays_give_the_logits_of_eager_steps(device, steps, padded: bool, new: int = 300) -> None:
    model = build(torch.bfloat16).to(device)
    config = {"alpha_high": 1.0, "alpha_low": 0.2, "window": 16}
    expected = generate(model, DiffKVConfig(**config, cuda_graphs=False), padded, new)
    got = generate(model, DiffKVConfig(**config), padded, new)
    (step,) = steps
    assert step.captures == 1 and step.replays == new - 2 and not step.compiled
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_forward_is_captured_once(device, steps, padded: bool, new: int = 100) -> None:
    """float32; one graph of the compiler serves every length and every cache."""
    torch._dynamo.reset()
    model = build(torch.float32).to(device)
    expected = generate(model, EXACT, padded, new)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_same(generate(model, EXACT, padded, new, compile_config=CompileConfig(fullgraph=True)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    expected = [(False, 1, new - 2), *[(True, 1, new - 2)] * 2]
    assert [(step.compiled, step.captures, step.replays) for step in steps] == expected


@pytest.mark.parametrize("mode, captured", [("default", False), ("default", True), ("reduce-overhead", False)], ids=str)
def test_a_model_the_user_compiled(device, steps, mode: str, captured: bool, new: int = 60) -> None:
    """A compiler that captures graphs of its own leaves the attention out of them."""
    torch._dynamo.reset()
    model = build(torch.float32).to(device)
    expected = generate(model, EXACT, True, new)
    model.forward = torch.compile(model.forward, mode=mode)
    config = DiffKVConfig(**{**EXACT.to_dict(), "cuda_graphs": captured})
    assert_same(generate(model, config, True, new), expected)
    if captured:
        assert steps[-1].captures == 1 and steps[-1].replays == new - 2


@pytest.mark.parametrize("compiled", [False, True])
def test_no_replay_waits_between_refreshes(device, compiled: bool, steps: int = 40) -> None:
    torch._dynamo.reset()
    model = build(torch.bfloat16).to(device)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16))
    asked = (CompileConfig(), type(model).get_compiled_call) if compiled else ()
    step = graphs.DecodeStep(model, cache, PROMPT + steps + 2, *asked)
    tokens = torch.randint(0, 256, (2, PROMPT), device=device)
    mask = torch.ones(2, PROMPT + steps, dtype=torch.int64, device=device)
    checked = 0
    with torch.no_grad():
        model(tokens, attention_mask=mask[:, :PROMPT], **passing(cache))
        for index in range(steps):
            token = tokens[:, index : index + 1].contiguous()
            positions = torch.full((2, 1), PROMPT + index, device=device)
            quiet = cache.stores.all[0].steps_left > 0 and index > 2
            torch.cuda.synchronize()
            seen = mask[:, : PROMPT + 1 + index]
            with no_waits(quiet):
                step(input_ids=token, attention_mask=seen, position_ids=positions, **passing(cache))
            checked += quiet
    assert checked > steps // 2 and step.replays > 3 * steps // 4 and step.compiled == compiled
    cache.check_integrity()
