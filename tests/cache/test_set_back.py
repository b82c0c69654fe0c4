"""`generate()` restores what it sets on a model: its attention, and nothing else."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria

from hf_diffkv import DiffKVCache, DiffKVConfig, HandOverError
from hf_diffkv.compat import passing

sys.path.append(str(Path(__file__).parent.parent / "families"))

LOSSLESS = DiffKVConfig.lossless(window=16)
IDS = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))


def generate(model: PreTrainedModel, ids: Tensor = IDS, **options: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, **options})


def ours(model: PreTrainedModel) -> dict[str, Any]:
    return passing(DiffKVCache(model.config, LOSSLESS))


class Interrupt(StoppingCriteria):
    """Raises after the first token."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        raise self.error


class Meet(StoppingCriteria):
    """Holds a call after its first token until told to continue."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.reached.set()
        assert self.go_on.wait(60)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.oldest
@pytest.mark.parametrize("attention", ["eager", "sdpa", "diffkv"])
@pytest.mark.parametrize("way", ["name", "cache", "assistant"])
def test_a_model_has_its_attention_back(attention: str, way: str) -> None:
    model, assistant = tiny_model("llama", attention), tiny_model("llama", "eager", seed=2)
    options = {"cache_implementation": "diffkv"} if way == "name" else ours(model)
    if way == "assistant":
        options["assistant_model"] = assistant
    generate(model, **options)
    assert model.config._attn_implementation == attention
    assert assistant.config._attn_implementation == "eager"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_also_where_a_call_fails(error: BaseException) -> None:
    model = tiny_model("llama")
    with pytest.raises(type(error)):
        generate(model, **ours(model), stopping_criteria=[Interrupt(error)])
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="no preset"):
        generate(model, cache_implementation="diffkv", cache_config="nothing known")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.oldest
def test_attentions_of_an_eager_model() -> None:
    model = tiny_model("llama", "eager")
    options = {"output_attentions": True, "return_dict_in_generate": True}
    expected = generate(model, **options).attentions
    generate(model, **ours(model))
    found = generate(model, **options).attentions
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_every_part_has_its_own_back() -> None:
    from test_vision import build, prompts

    model, inputs = build("llava"), prompts("llava")
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    config = model.config
    before = [config._attn_implementation, "sdpa", "eager"]
    within = []

    def note(*_: Any) -> None:
        within.append([part._attn_implementation for part in (config, config.text_config, config.vision_config)])

    model.register_forward_pre_hook(note)
    model.generate(**inputs, max_new_tokens=2, do_sample=False, cache_implementation="diffkv")
    assert within == [[before[0], "diffkv", "eager"]] * 2
    note()
    assert within[-1] == before


def test_a_choice_made_meanwhile_stays() -> None:
    class Choose(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] == IDS.shape[1] + 6:
                model.set_attn_implementation("eager")
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    model = tiny_model("llama")
    generate(model, **ours(model), stopping_criteria=[Choose()])
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_two_calls_on_one_model(attention: str, first: str) -> None:
    """Whichever ends first, the other continues with the attention it began with, and the last one restores it."""
    model = tiny_model("llama", attention)
    expected = generate(model)
    meets, texts = {"ours": Meet(), "theirs": Meet()}, {}

    def run(name: str) -> None:
        cache = ours(model) if name == "ours" else passing(DynamicCache(config=model.config))
        texts[name] = generate(model, **cache, stopping_criteria=[meets[name]])

    threads = {name: threading.Thread(target=run, args=[name]) for name in meets}
    for name, thread in threads.items():
        thread.start()
        assert meets[name].reached.wait(60)
    last = "theirs" if first == "ours" else "ours"
    for name, then in ((first, "diffkv"), (last, attention)):
        meets[name].go_on.set()
        threads[name].join(60)
        assert model.config._attn_implementation == then
    assert torch.equal(texts["ours"], expected) and torch.equal(texts["theirs"], expected)


def test_a_call_within_a_call() -> None:
    class Ask(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            generate(model, **ours(model), max_new_tokens=2)
            assert model.config._attn_implementation == "diffkv"
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    model = tiny_model("llama")
    expected = generate(model)
    assert torch.equal(generate(model, **ours(model), stopping_criteria=[Ask()]), expected)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_forward_of_ones_own_after_generate(name: str, tokens: int) -> None:
    """It is told what to do before anything has changed, and then does it."""
    model = tiny_model(name, "eager")
    cache, twin = (DiffKVCache(model.config, LOSSLESS) for _ in range(2))
    text = generate(model, **passing(cache))
    generate(model, **passing(twin))
    new, held = IDS[:, :tokens], cache.get_seq_length()
    for _ in range(2):
        with pytest.raises(HandOverError, match='call model.set_attn_implementation\\("diffkv"\\)|"diffkv"'):
            model(new, **passing(cache))
        assert cache.get_seq_length() == held
    model.set_attn_implementation("diffkv")
    logits = [model(new, **passing(each)).logits for each in (cache, twin)]
    assert torch.equal(*logits)
    whole = model(torch.cat([text[:, :held], new], dim=1), use_cache=False).logits[:, held:]
    torch.testing.assert_close(logits[0], whole, rtol=0, atol=1e-4)


def test_nothing_is_compiled_again_for_the_next_call() -> None:
    torch._dynamo.reset()
    model = tiny_model("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    first = generate(model, **ours(model), max_new_tokens=12)
    generate(model, **ours(model), max_new_tokens=12)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(generate(model, **ours(model), max_new_tokens=12), first)
    assert model.config._attn_implementation == "sdpa"
