"""Every generation mode gives the same text with a lossless `DiffKVCache` as with a `DynamicCache`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import PAD, ragged_prompts, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.compat import passing
from hf_diffkv.running.models import TINY_LM

pytestmark = pytest.mark.oldest
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3")
LENGTHS = (90, 33, 64)
NEW_TOKENS = 24
LOSSLESS = {"cache_implementation": "diffkv", "cache_config": DiffKVConfig.lossless(window=8).to_dict()}


def can_crop_empty_layers() -> bool:
    try:
        DynamicLayer().crop(-1)
    except TypeError:
        return False
    return True


def said(model: PreTrainedModel, ids: Tensor | None = None, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Generated sequences, with the same seed every time."""
    torch.manual_seed(7)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, **options)


def dense(model: PreTrainedModel, *prompt: Tensor, **options: Any) -> Tensor:
    """Generates with Transformers' own cache and attention."""
    model.set_attn_implementation("eager")
    return said(model, *prompt, **passing(DynamicCache(config=model.config)), **options)


def assert_same_tokens(model: PreTrainedModel, *prompt: Tensor, **options: Any) -> Tensor:
    """Compares the dense cache with a given cache and with one that `generate` makes. Returns the sequences."""
    expected = dense(model, *prompt, **options)
    # low and high are both exact here, so tokens move between tiers losslessly
    two_tiers = {"low": Precision(16, 16, 2, 2), "alpha_high": 1.0}
    cache = DiffKVCache(model.config, DiffKVConfig.lossless(window=8, **two_tiers))
    assert torch.equal(said(model, *prompt, **passing(cache), **options), expected)
    cache.check_integrity()
    assert {"high", "low"} <= {name for name, count in cache.memory().tokens.items() if count}
    model.set_attn_implementation("eager")
    assert torch.equal(said(model, *prompt, **LOSSLESS, **options), expected)
    return expected


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beam search": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "several beams returned": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "chunked prompt": {"prefill_chunk_size": 25},
    "guidance": {"guidance_scale": 1.5},
    "repetition penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(16)
def test_modes(name: str, mode: str) -> None:
    sequences = assert_same_tokens(tiny_model(name, "eager"), *ragged_prompts(LENGTHS), **MODES[mode])
    assert sequences.shape[1] == max(LENGTHS) + NEW_TOKENS


def test_stop_strings() -> None:
    """Transformers passes the tokenizer on to attention."""
    model, tokenizer = tiny_model("llama", "eager"), AutoTokenizer.from_pretrained(TINY_LM)
    prompt = ragged_prompts(LENGTHS)
    written = said(model, *prompt)[:, max(LENGTHS) :]
    stops = [tokenizer.decode(row[8:10]) for row in written]
    options = {"stop_strings": stops, "tokenizer": tokenizer, "pad_token_id": PAD}
    sequences = assert_same_tokens(model, *prompt, **options)
    assert sequences.shape[1] <= max(LENGTHS) + 10


@pytest.mark.parametrize("mode", ["greedy", "beam search", "sampling"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(16)
def test_requests_that_finish_early(name: str, mode: str) -> None:
    """Left-padded requests stop at different steps; the others continue alongside their padding."""
    options = {**MODES[mode], "eos_token_id": list(range(3, 14))}
    sequences = assert_same_tokens(tiny_model(name, "eager"), *ragged_prompts(LENGTHS), **options)
    new = sequences[:, max(LENGTHS) :]
    if mode == "beam search":  # a beam that ends competes with those that go on
        return
    assert len({int((row != PAD).sum()) for row in new}) > 1, "all requests stopped together"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(100)
def test_inputs_embeds(name: str) -> None:
    model = tiny_model(name, "eager")
    ids, mask = ragged_prompts(LENGTHS)
    embeds = model.get_input_embeddings()(ids).detach()
    new = assert_same_tokens(model, None, mask, inputs_embeds=embeds)
    assert torch.equal(new, said(model, ids, mask, **LOSSLESS)[:, max(LENGTHS) :])


class Collected(BaseStreamer):
    """Collects what it is given."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4}], ids=["greedy", "lookup"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(4)
def test_streaming(name: str, options: dict[str, Any]) -> None:
    model = tiny_model(name, "eager")
    ids, mask = repeated_prompt()
    streamer = Collected()
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    sequences = said(model, ids, mask, **passing(cache), streamer=streamer, **options)
    expected = dense(model, ids, mask)
    assert torch.equal(sequences, expected)
    assert streamer.ended and len(streamer.parts) > 2
    assert torch.equal(torch.cat(streamer.parts), expected[0])


class StopsAt(StoppingCriteria):
    """Ends a request when its newest token is one of `stops`."""

    def __init__(self, stops: Tensor) -> None:
        self.stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.stops)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(100)
def test_custom_stopping_criteria(name: str) -> None:
    model = tiny_model(name, "eager")
    free = said(model, *ragged_prompts(LENGTHS), **LOSSLESS)[:, max(LENGTHS) :]
    criteria = StoppingCriteriaList([StopsAt(free[:, [2, 6]].flatten())])
    sequences = assert_same_tokens(model, *ragged_prompts(LENGTHS), stopping_criteria=criteria)
    assert sequences.shape[1] < max(LENGTHS) + NEW_TOKENS


def repeated_prompt() -> tuple[Tensor, Tensor]:
    """A repetitive text, so that prompt lookup suggests tokens."""
    ids = ragged_prompts((12,), seed=2)[0].repeat(1, 6)
    return ids, torch.ones_like(ids)


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(accepted, rejected) tokens of every crop of a cache that held recorded tokens."""
    seen: list[tuple[int, int]] = []
    crop = DiffKVCache.crop

    def spy(self: DiffKVCache, tokens_to_remove: int) -> None:
        held = [store.recorded[0].tokens for store in self.stores.all if store.recorded[0] is not None]
        crop(self, tokens_to_remove)
        if held:
            seen.append((held[0] + tokens_to_remove, -tokens_to_remove))

    monkeypatch.setattr(DiffKVCache, "crop", spy)
    yield seen


def assert_both_happened(crops: list[tuple[int, int]]) -> None:
    """Checks that some drafts were rejected and others accepted (the first token of a forward is never a draft)."""
    assert any(rejected > 0 for _, rejected in crops), crops
    assert any(1 < accepted < 40 for accepted, _ in crops), crops


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(100)
def test_prompt_lookup(name: str, sample: bool, crops: list[tuple[int, int]]) -> None:
    options = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 40, "do_sample": sample, "temperature": 0.05}
    options = options if sample else {**options, "temperature": None}
    assert_same_tokens(tiny_model(name, "eager"), *repeated_prompt(), **options)
    assert_both_happened(crops)


def dense_or_skip(model: PreTrainedModel, *prompt: Tensor, **options: Any) -> Tensor:
    try:
        return dense(model, *prompt, **options)
    except RuntimeError as error:
        # sliding windows with eager attention, on 5.17
        pytest.skip(f"this release of transformers cannot do it with its own caches: {error}")


def noisy(name: str, share: float = 0.05) -> PreTrainedModel:
    """The tiny model with slightly perturbed weights, which mostly agrees with the original."""
    model, generator = tiny_model(name, "eager"), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(share * noise * parameter.abs().mean())
    return model


@pytest.mark.parametrize("where", ["main", "assistant", "both"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(100)
def test_assisted_decoding(name: str, where: str, crops: list[tuple[int, int]]) -> None:
    model, assistant = tiny_model(name, "eager"), noisy(name)
    ids, mask = ragged_prompts((60,))
    options = {"max_new_tokens": 40}
    plain = dense(model, ids, mask, **options)
    options["assistant_model"] = assistant
    expected = dense_or_skip(model, ids, mask, **options)
    assert torch.equal(expected, plain)
    assert not crops

    if where in ("assistant", "both"):
        assistant.generation_config.update(**LOSSLESS)
    caches = passing(DynamicCache(config=model.config)) if where == "assistant" else LOSSLESS
    assert torch.equal(said(model, ids, mask, **caches, **options), expected)
    assert_both_happened(crops)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_assisted_sampling(name: str, crops: list[tuple[int, int]]) -> None:
    model, assistant = tiny_model(name, "eager"), noisy(name, 0.3)
    ids, mask = ragged_prompts((60,))
    # the assistant gets no mask, so Transformers takes every sampled padding id for padding
    options = {"assistant_model": assistant, "do_sample": True, "max_new_tokens": 40, "suppress_tokens": [PAD]}
    expected = dense_or_skip(model, ids, mask, **options)
    assistant.generation_config.update(**LOSSLESS)
    assert torch.equal(said(model, ids, mask, **LOSSLESS, **options), expected)
    assert_both_happened(crops)


# gpt_oss does not support it
@pytest.mark.skipif(not can_crop_empty_layers(), reason="older releases of Transformers fail so with any cache")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.sampled(100)
def test_early_exit(name: str, crops: list[tuple[int, int]]) -> None:
    """The model's own first layers write the drafts."""
    model = tiny_model(name, "eager")
    ids, mask = repeated_prompt()
    expected = dense(model, ids, mask)
    for caches in (passing(DiffKVCache(model.config, DiffKVConfig.lossless(window=8))), LOSSLESS):
        crops.clear()
        assert torch.equal(said(model, ids, mask, assistant_early_exit=1, **caches), expected)
        assert any(rejected > 0 for _, rejected in crops), crops


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(100)
def test_two_turns(name: str) -> None:
    """The second call of `generate` continues with the first call's cache."""
    model = tiny_model(name, "eager")
    ids, mask = ragged_prompts(LENGTHS)
    more, more_mask = ragged_prompts((5, 9, 1), seed=4)

    def talk(cache: Any) -> Tensor:
        first = said(model, ids, mask, **passing(cache))
        seen = torch.cat([mask, torch.ones(3, NEW_TOKENS, dtype=mask.dtype), more_mask], 1)
        return said(model, torch.cat([first, more], 1), seen, **passing(cache))

    model.set_attn_implementation("eager")
    expected = talk(DynamicCache(config=model.config))
    assert torch.equal(talk(DiffKVCache(model.config, DiffKVConfig.lossless(window=8))), expected)


@pytest.mark.parametrize("how", ["lookup", "assistant"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.sampled(100)
def test_assisted_turns(name: str, how: str) -> None:
    """A second call continues with the cache, with the whole text passed again."""
    model, assistant = tiny_model(name, "eager"), noisy(name)
    ids, mask = repeated_prompt()
    options = {"prompt_lookup_num_tokens": 4} if how == "lookup" else {"assistant_model": assistant}
    cache = DiffKVCache(model.config, DiffKVConfig.lossless(window=8))
    text = torch.cat([said(model, ids, mask, **passing(cache), **options), ids[:, :9]], 1)
    expected = dense(model, text, torch.ones_like(text))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="do not begin with the tokens"):
        said(model, text.roll(1), torch.ones_like(text), **passing(cache), **options)
    assert torch.equal(said(model, text, torch.ones_like(text), **passing(cache), **options), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of some pairs and words, whose tokens change when more text follows."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer, pairs.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<pad>", "<eos>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    pairs.train_from_iterator(["@sky=1234 the sea was calm and 12 34 56 78 90 11 22 33 44 55"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_assistant_with_another_tokenizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text can change further back than the tokens of the last round, which is all that `crop` takes back."""
    over: list[int] = []
    start_over = DiffKVCache.start_over
    monkeypatch.setattr(
        DiffKVCache, "start_over", lambda cache: (over.append(cache.get_seq_length()), start_over(cache))[1]
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32), pair_tokenizer()
    characters = AutoTokenizer.from_pretrained(TINY_LM)
    ids = characters("@sky=1234 @tin=2222 the sea was calm ?sky=", return_tensors="pt").input_ids
    expected = dense(model, ids, torch.ones_like(ids), max_new_tokens=30)
    assistant = tiny_model(name, "eager", vocab_size=len(tokenizer))
    assistant.generation_config.update(**LOSSLESS)
    options = {"assistant_model": assistant, "tokenizer": characters, "assistant_tokenizer": tokenizer}
    assert torch.equal(said(model, ids, torch.ones_like(ids), **LOSSLESS, **options, max_new_tokens=30), expected)
    assert over, "all text was taken back by crop"
