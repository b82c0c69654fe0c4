"""Captured steps on a GPU give the logits of steps from Python, without a new capture as the cache grows."""

from __future__ import annotations

import pytest
import torch
from test_models_on_gpu import build
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.integration import graphs

# nothing is quantised: what a compiler rounds otherwise moves no code
EXACT = DiffKVConfig(high=Precision(16, 16), low=Precision(16, 16), alpha_high=1.0, alpha_low=0.2, window=16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[graphs.DecodeStep]:
    """The `DecodeStep` of every `generate()` call."""
    found: list[graphs.DecodeStep] = []
    init = graphs.DecodeStep.__init__

    def note(self: graphs.DecodeStep, *args: object) -> None:
        init(self, *args)
        found.append(self)

    monkeypatch.setattr(graphs.DecodeStep, "__init__", note)
    return found


def generate(
    model: PreTrainedModel, config: DiffKVConfig, padded: bool, new: int, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logits and one layer's levels after a prompt of 600 tokens."""
    tokens = torch.randint(
        0, 256, (2, 600), device=model.device, generator=torch.Generator(model.device).manual_seed(1)
    )
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :300] = 0
    cache = DiffKVCache(model.config, config)
    output = model.generate(
        tokens,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    cache.check_integrity()
    return output.sequences, torch.stack(output.logits), cache.levels(2)


def assert_same(got: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=1e-3)
    assert (got[2] != expected[2]).float().mean() < 0.001


@pytest.mark.parametrize("padded", [False, True])
def test_replays_give_the_logits_of_eager_steps(device, made, padded: bool) -> None:
    model = build(torch.bfloat16).to(device)
    config = {"alpha_high": 1.0, "alpha_low": 0.2, "window": 16}
    expected = generate(model, DiffKVConfig(**config, cuda_graphs=False), padded, 300)
    got = generate(model, DiffKVConfig(**config), padded, 300)
    (step,) = made
    assert step.captures == 1 and step.replays == 298 and not step.compiled
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_forward_is_captured_once(device, made, padded: bool) -> None:
    """float32; one graph of the compiler serves every length and every cache."""
    torch._dynamo.reset()
    model = build(torch.float32).to(device)
    expected = generate(model, EXACT, padded, 100)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_same(generate(model, EXACT, padded, 100, compile_config=CompileConfig(fullgraph=True)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [(step.compiled, step.captures, step.replays) for step in made] == [(False, 1, 98)] + [(True, 1, 98)] * 2


@pytest.mark.parametrize("mode, captured", [("default", False), ("default", True), ("reduce-overhead", False)], ids=str)
def test_a_model_the_user_compiled(device, made, mode: str, captured: bool) -> None:
    """A compiler that captures graphs of its own leaves the attention out of them."""
    torch._dynamo.reset()
    model = build(torch.float32).to(device)
    expected = generate(model, EXACT, True, 60)
    model.forward = torch.compile(model.forward, mode=mode)
    config = DiffKVConfig(**{**EXACT.to_dict(), "cuda_graphs": captured})
    assert_same(generate(model, config, True, 60), expected)
    if captured:
        assert made[-1].captures == 1 and made[-1].replays == 58


@pytest.mark.parametrize("compiled", [False, True])
def test_no_replay_waits_between_refreshes(device, compiled: bool) -> None:
    torch._dynamo.reset()
    model = build(torch.bfloat16).to(device)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16))
    asked = (CompileConfig(), type(model).get_compiled_call) if compiled else ()
    step = graphs.DecodeStep(model, cache, 800, *asked)
    tokens = torch.randint(0, 256, (2, 700), device=device)
    mask = torch.ones(2, 740, dtype=torch.int64, device=device)
    checked = 0
    with torch.no_grad():
        model(tokens, attention_mask=mask[:, :700], past_key_values=cache)
        for index in range(40):
            token = tokens[:, index : index + 1].contiguous()
            positions = torch.full((2, 1), 700 + index, device=device)
            quiet = cache.stores.stores[0]._steps_left > 0 and index > 2
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")
            try:
                step(
                    input_ids=token,
                    attention_mask=mask[:, : 701 + index],
                    position_ids=positions,
                    past_key_values=cache,
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
            checked += quiet
    assert checked > 20 and step.replays > 30 and step.compiled == compiled
    cache.check_integrity()
