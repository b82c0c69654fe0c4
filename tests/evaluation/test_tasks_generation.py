"""Generation behind what is in the cache already: one forward per token as the yardstick, batches, dropped tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_chat_models import byte_tokenizer, tiny_chat_model
from transformers import DynamicCache

from hf_diffkv.compat import passed, passing
from hf_diffkv.evaluation.methods import Method, get_method
from hf_diffkv.evaluation.methods.dense import DenseMethod
from hf_diffkv.evaluation.session import Batch, Session, decode_by_forwards

CONTEXT = "A text that comes first, long enough to be compressed. " * 3
QUESTIONS = ["What does it say?", "Why? And why is the second question longer than the first?", "So?"]
STEPS = 12
LOSSLESS = "diffkv:lossless"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    return tiny_chat_model(request.param, tokenizer)


@pytest.fixture(scope="module")
def llama(tokenizer: Any) -> Any:
    return tiny_chat_model("llama", tokenizer)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def greedy(model: Any, cache: Any, parts: list[list[int]], steps: int = STEPS) -> list[int]:
    """Likeliest tokens behind `parts`, each of which is one forward of the model as it is."""
    start, written = 0, []
    queue = list(parts)
    while len(written) < steps:
        ids = queue.pop(0)
        positions = torch.arange(start, start + len(ids))[None]
        logits = model(torch.tensor([ids]), position_ids=positions, **passing(cache)).logits[0, -1]
        start += len(ids)
        if not queue:
            written.append(int(logits.argmax()))
            if written[-1] == model.config.eos_token_id:
                break
            queue = [[written[-1]]]
    return written


@pytest.mark.parametrize("label", ["dense", LOSSLESS, "diffkv", "diffkv:3/0.5", "quanto:4"])
def test_generate_goes_on_behind_a_context(model: Any, tokenizer: Any, label: str) -> None:
    context, question = ids_of(tokenizer, CONTEXT), ids_of(tokenizer, QUESTIONS[0])
    method = get_method(label)
    alone = Session(model, method)
    with method.attached(model, alone.cache):
        expected = greedy(model, alone.cache, [context, question])
    session = Session(model, method, tokenizer)
    session.forward(context)
    text = session.generate(question, STEPS)
    assert text == tokenizer.decode(expected, skip_special_tokens=True)
    assert session.ids == [*context, *question, *expected[:-1]]


def test_generate_twice(llama: Any, tokenizer: Any) -> None:
    parts = [ids_of(tokenizer, text) for text in (CONTEXT, QUESTIONS[0])]
    session = Session(llama, get_method("dense"), tokenizer)
    session.forward(parts[0])
    session.generate(parts[1], 3)
    behind = session.branch()
    text = session.generate(ids_of(tokenizer, "More"), 5)
    assert behind.generate(ids_of(tokenizer, "More"), 5) == text
    whole = [*session.ids[:-4]]
    assert tokenizer.decode(greedy(llama, DynamicCache(), [whole], 5), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.5},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "top_k": 0, "min_p": 0.05},
    ],
)
def test_forwards_write_what_generate_writes(llama: Any, tokenizer: Any, options: dict[str, Any]) -> None:
    context, question = ids_of(tokenizer, CONTEXT), ids_of(tokenizer, QUESTIONS[0])
    method = get_method("dense")
    texts = []
    for write in (lambda s, *a: s.generate(*a[:2], **a[2]), decode_by_forwards):
        session = Session(llama, method, tokenizer)
        session.forward(context)
        torch.manual_seed(3)
        texts.append((write(session, question, 40, options), session.ids))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 5


def test_the_end_of_text(llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    question = ids_of(tokenizer, QUESTIONS[1])
    written = greedy(llama, DynamicCache(), [question], 20)
    # an end of text in the middle of what the model writes
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [9999, written[7]])
    end = written.index(written[7]) + 1
    for drops in (False, True):
        monkeypatch.setattr(DenseMethod, "drops_tokens", drops)
        session = Session(llama, get_method("dense"), tokenizer)
        assert session.generate(question, 20) == tokenizer.decode(written[:end], skip_special_tokens=True)
        assert session.ids == [*question, *written[: end - 1]]


class Dropping(Method):
    """Keeps the first and the newest tokens of the prompt and counts no others, as kvpress does."""

    drops_tokens = True
    first, newest = 4, 16

    def new_cache(self, model: Any) -> Any:
        return DynamicCache()

    def attached(self, model: Any, cache: Any) -> Any:
        return _Drop(self, model, prompt=cache.get_seq_length() == 0)


class _Drop:
    """Drops tokens of every layer right after it attended to them."""

    def __init__(self, method: Dropping, model: Any, prompt: bool) -> None:
        self.method, self.model, self.prompt, self.handles = method, model, prompt, []

    def __enter__(self) -> None:
        if self.prompt:
            layers = self.model.model.layers
            self.handles = [layer.self_attn.register_forward_hook(self._drop, with_kwargs=True) for layer in layers]

    def __exit__(self, *ignored: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _drop(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = passed(kwargs).layers[module.layer_idx]
        kept = [*range(self.method.first), *range(-self.method.newest, 0)]
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


@torch.no_grad()
def test_dropped_tokens_keep_the_positions_of_others(model: Any, tokenizer: Any) -> None:
    context, question = ids_of(tokenizer, CONTEXT), ids_of(tokenizer, QUESTIONS[0])
    session = Session(model, Dropping(), tokenizer)
    session.forward(context)
    text = session.generate(question, STEPS)
    assert session.cache.get_seq_length() == 20 + len(question) + STEPS - 1
    # one dense forward per token over everything, in which what follows the context does not see what was dropped
    ids, size = [*context, *question], len(context)
    for _ in range(STEPS):
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        mask[size:, 4 : size - 16] = False
        logits = model(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    assert text == tokenizer.decode(ids[-STEPS:], skip_special_tokens=True)


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("label", ["dense", LOSSLESS])
def test_a_batch_writes_what_its_documents_write_alone(
    model: Any, tokenizer: Any, label: str, context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    contexts = [ids_of(tokenizer, CONTEXT[: 60 + 35 * index]) for index in range(3)]
    questions = [ids_of(tokenizer, question) for question in QUESTIONS]
    method = get_method(label)
    assert method.batches
    alone, held = [], []
    for first, question in zip(contexts, questions):
        session = Session(model, method, tokenizer)
        if context:
            session.forward(first)
        alone.append(session.generate(question, STEPS))
        held.append(session.held())
    batch = Batch(model, method, tokenizer)
    if context:
        batch.forward(contexts)
    assert batch.generate(questions, STEPS) == alone
    if label == "dense":
        assert batch.held() == held
    else:
        # pages are shared out by tokens
        for mine, theirs in zip(batch.held(), held):
            assert mine.payload_bytes == pytest.approx(theirs.payload_bytes, rel=0.01)
        assert sum(mine.bytes for mine in batch.held()) == pytest.approx(method.held(batch.cache).bytes, abs=3)


def test_documents_of_a_batch_end_by_themselves(llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [ids_of(tokenizer, question) for question in QUESTIONS]
    written = [greedy(llama, DynamicCache(), [question], 20) for question in questions]
    end = written[0][5]
    assert written[0].index(end) == 5 and end not in written[1]
    monkeypatch.setattr(llama.generation_config, "eos_token_id", end)
    method = get_method("dense")
    sessions = [Session(llama, method, tokenizer) for _ in questions]
    alone = [session.generate(question, 20) for session, question in zip(sessions, questions)]
    for pad in (tokenizer.pad_token_id, end):
        batch = Batch(llama, method, tokenizer)
        batch.pad = pad
        assert batch.generate(questions, 20) == alone
        assert batch.held() == [session.held() for session in sessions]
    # a compressed cache holds what a document gets behind its end, but not the padding
    lossless = get_method(LOSSLESS)
    batch = Batch(llama, lossless, tokenizer)
    assert batch.generate(questions, 20) == alone
    stored = sum(map(len, questions)) + 3 * 19
    assert sum(held.bytes for held in batch.held()) == pytest.approx(
        lossless.held(batch.cache).bytes * sum(session.seen for session in sessions) / stored, abs=3
    )
    assert sessions[0].seen == len(questions[0]) + 5


def test_unknown_options_of_forwards(llama: Any, tokenizer: Any) -> None:
    session = Session(llama, get_method("dense"), tokenizer)
    with pytest.raises(ValueError, match="no field 'temprature'"):
        decode_by_forwards(session, [5], 2, {"temprature": 0.5})
