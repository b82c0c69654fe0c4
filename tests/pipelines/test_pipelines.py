"""Text-generation pipelines with DiffKV, on text that tiny-lm understands."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

EXAMPLES = Path(__file__).parents[2] / "examples"
RECALL = (EXAMPLES / "prompts" / "recall.txt").read_text()
PROMPTS = [RECALL[:500] + "?oak=", RECALL[:230]]
LENGTH = {"max_new_tokens": 12, "do_sample": False}
# pruning hard enough that tiny-lm writes something else
FIELDS = {"alpha_high": 1.5, "alpha_low": 0.3, "window": 16}
# a question is followed by its answer at once: "?oak=" and "5305\n"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def loaded() -> PreTrainedModel:
    # in bfloat16 rounding alone would decide what is written once the model is unsure
    return AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-lm", dtype=torch.float32)


@pytest.fixture
def model(loaded: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """tiny-lm as it was loaded."""
    defaults = copy.deepcopy(loaded.generation_config)
    yield loaded
    loaded.generation_config = defaults
    loaded.set_attn_implementation("sdpa")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "tiny-lm")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def diffkv(fields: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": "diffkv", "cache_config": fields}


def texts(found: list[list[dict[str, Any]]]) -> list[str]:
    return [row[0]["generated_text"] for row in found]


def generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Any) -> list[str]:
    """Returns the text that `generate()` itself appends to `PROMPTS` with `cache`, in one padded batch."""
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, **LENGTH, **passing(cache))
    return tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def ask(route: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]) -> list[str]:
    """Returns the text that a pipeline appends to `PROMPTS` if it gets the cache by `route`."""
    at_start: dict[str, Any] = {}
    at_call: dict[str, Any] = {}
    chosen = diffkv(fields)
    if route == "call":
        at_call = {**LENGTH, **chosen}
    elif route == "construction":
        at_start, at_call = chosen, LENGTH
    elif route == "generation_config at call":
        at_call = {"generation_config": GenerationConfig(**LENGTH, **chosen)}
    elif route == "generation_config at construction":
        at_start = {"generation_config": GenerationConfig(**LENGTH, **chosen)}
    elif route == "model.generation_config":
        model.generation_config.update(**chosen)
        at_call = LENGTH
    else:
        at_call = {**LENGTH, **passing(DiffKVCache(model.config, **fields))}
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, **at_start)
    return texts(generator(PROMPTS, batch_size=2, return_full_text=False, **at_call))


ROUTES = [
    "call",
    "construction",
    "generation_config at call",
    "generation_config at construction",
    "model.generation_config",
    "a cache",
]


@pytest.mark.oldest
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.sampled(100)
def test_all_ways_to_choose_the_cache(route: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    exact = generated(model, tokenizer, DynamicCache(config=model.config))
    assert exact[0].startswith("5305")
    pruned = generated(model, tokenizer, DiffKVCache(model.config, **FIELDS))
    assert pruned != exact, "compression changed nothing, so the comparison below proves nothing"
    assert ask(route, model, tokenizer, FIELDS) == pruned
    assert ask(route, model, tokenizer, DiffKVConfig.lossless().to_dict()) == exact


@pytest.mark.parametrize("fields", [FIELDS, DiffKVConfig.lossless().to_dict()], ids=["pruned", "lossless"])
@pytest.mark.sampled(100)
def test_a_model_saved_with_the_choice(
    fields: dict[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    expected = generated(model, tokenizer, DiffKVCache(model.config, **fields))
    model.generation_config.update(**diffkv(fields))
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    generator.save_pretrained(tmp_path)
    reloaded = pipeline("text-generation", model=str(tmp_path))
    assert reloaded.model.config._attn_implementation == "sdpa"
    assert texts(reloaded(PROMPTS, batch_size=2, return_full_text=False, **LENGTH)) == expected


def test_a_saved_choice_needs_the_package(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model.generation_config.update(**diffkv(FIELDS))
    pipeline("text-generation", model=model, tokenizer=tokenizer).save_pretrained(tmp_path)
    hf_diffkv.unregister()
    try:
        with pytest.raises(ValueError, match="diffkv"):
            pipeline("text-generation", model=str(tmp_path))
    finally:
        hf_diffkv.register()


# chats


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


@pytest.mark.oldest
def test_chats_in_a_batch(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    chats = [chat(RECALL[:420] + "?red=", "3160", "?oak="), chat(PROMPTS[1])]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    exact = generator(chats, batch_size=2, **LENGTH)
    assert model.config._attn_implementation == "sdpa"
    assert exact[0][0]["generated_text"][-1]["role"] == "assistant"
    assert generator(chats, batch_size=2, **LENGTH, **diffkv(DiffKVConfig.lossless().to_dict())) == exact
    assert model.config._attn_implementation == "sdpa"
    assert generator(chats, batch_size=2, **LENGTH, **diffkv(FIELDS)) != exact


def talk(generator: Pipeline, turns: list[str], cache: Any) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    options = {} if cache is None else passing(cache)
    for turn in turns:
        messages = [*messages, {"role": "user", "content": turn}]
        messages = generator(messages, max_new_tokens=4, do_sample=False, **options)[0]["generated_text"]
    return messages


def test_a_chat_on_one_cache(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    turns = [RECALL[:600] + "?oak=", "?sky=", "?red="]
    exact = talk(generator, turns, None)
    assert [message["content"] for message in exact[1::2]] == ["5305", "0400", "3160"]
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    assert talk(generator, turns, cache) == exact
    text = tokenizer.apply_chat_template(exact[:-1], tokenize=False, add_generation_prompt=True)
    assert cache.get_seq_length() == len(text) + 3  # the last token is never fed


def test_another_prompt_on_a_used_cache(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    first = generator(PROMPTS[0], **passing(cache), **LENGTH)
    seen = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"the cache holds {seen} tokens .* has {len(PROMPTS[1])}.*reset"):
        generator(PROMPTS[1], **passing(cache), **LENGTH)
    with pytest.raises(ValueError, match=f"the cache holds {seen} tokens"):  # one by one
        generator(PROMPTS, **passing(cache), **LENGTH)
    assert cache.get_seq_length() == seen
    cache.reset()
    assert generator(PROMPTS[0], **passing(cache), **LENGTH) == first


# streaming


def test_text_streamer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture
) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    found = generator(PROMPTS[0], streamer=streamer, return_full_text=False, **LENGTH, **diffkv(FIELDS))
    assert capsys.readouterr().out == found[0]["generated_text"] + "\n"


@pytest.mark.oldest
def test_text_iterator_streamer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    plain = generator(PROMPTS[0], return_full_text=False, **LENGTH, **diffkv(FIELDS))[0]["generated_text"]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"streamer": streamer, **LENGTH, **diffkv(FIELDS)}
    thread = Thread(target=generator, args=(PROMPTS[0],), kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == plain


@pytest.mark.oldest
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 20, 30])
@pytest.mark.sampled(100)
def test_generate_refuses_a_prompt_that_is_too_short_to_continue(
    length: int, padded: bool, model: PreTrainedModel
) -> None:
    ids = torch.tensor([list(RECALL[:30].encode())] * 2)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 0] = 0
    cache = DiffKVCache(model.config)
    output = model.generate(ids, attention_mask=mask, **passing(cache), max_new_tokens=3, do_sample=False)
    mask = torch.cat([mask, mask.new_ones(2, 4)], 1)
    held = cache.memory()
    with pytest.raises(ValueError, match="the cache holds 32 tokens"):
        model.generate(ids[:, :length], attention_mask=mask[:, :length], **passing(cache), max_new_tokens=3)
    assert cache.memory() == held
    more = torch.cat([output, ids[:, :1]], 1)
    by_all = model.generate(more, attention_mask=mask, **passing(copy.deepcopy(cache)), **LENGTH)
    by_new = model.generate(more[:, -2:], attention_mask=mask, **passing(cache), **LENGTH)
    assert torch.equal(by_all[:, -14:], by_new)
