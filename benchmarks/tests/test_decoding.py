"""Generation after what the cache already holds: one forward per token as the reference, dropped tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from small_chat_models import byte_tokenizer, tiny_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv.compat import passed, passing
from hf_diffkv.evaluation.methods import Method, get_method
from hf_diffkv.evaluation.methods.dense import DenseMethod
from hf_diffkv.evaluation.session import Session
from hf_diffkv.running.models import TINY_LM

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


@pytest.fixture
def decoding(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("decoding")


@pytest.fixture
def generate(decoding: ModuleType) -> Callable[..., list[int]]:
    return decoding.generate


@pytest.fixture
def code_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


@pytest.fixture
def tiny_lm() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def greedy(model: Any, cache: Any, parts: list[list[int]], steps: int = STEPS) -> list[int]:
    """Most likely tokens after `parts`, each of which is one forward of the unmodified model."""
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
def test_generate_goes_on_behind_a_context(generate: Any, model: Any, tokenizer: Any, label: str) -> None:
    context, question = ids_of(tokenizer, CONTEXT), ids_of(tokenizer, QUESTIONS[0])
    method = get_method(label)
    alone = Session(model, method)
    with method.attached(model, alone.cache):
        expected = greedy(model, alone.cache, [context, question])
    session = Session(model, method)
    session.forward(context)
    assert generate(session, question, STEPS) == expected
    assert session.ids == [*context, *question, *expected[:-1]]


def test_generate_twice(generate: Any, llama: Any, tokenizer: Any) -> None:
    parts = [ids_of(tokenizer, text) for text in (CONTEXT, QUESTIONS[0])]
    session = Session(llama, get_method("dense"))
    session.forward(parts[0])
    generate(session, parts[1], 3)
    behind = session.branch()
    written = generate(session, ids_of(tokenizer, "More"), 5)
    assert generate(behind, ids_of(tokenizer, "More"), 5) == written
    whole = [*session.ids[:-4]]
    assert greedy(llama, DynamicCache(), [whole], 5) == written


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
def test_forwards_write_what_generate_writes(
    decoding: ModuleType, generate: Any, llama: Any, tokenizer: Any, options: dict[str, Any]
) -> None:
    context, question = ids_of(tokenizer, CONTEXT), ids_of(tokenizer, QUESTIONS[0])
    method = get_method("dense")
    found = []
    for write in (lambda *given: generate(*given[:3], **given[3]), decoding.decode_by_forwards):
        session = Session(llama, method)
        session.forward(context)
        torch.manual_seed(3)
        found.append((write(session, question, 40, options), session.ids))
    assert found[0] == found[1]
    assert len(found[0][0]) > 5


def test_the_end_of_text(generate: Any, llama: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    question = ids_of(tokenizer, QUESTIONS[1])
    written = greedy(llama, DynamicCache(), [question], 20)
    # an end-of-text token in the middle of the output
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [9999, written[7]])
    end = written.index(written[7]) + 1
    for drops in (False, True):
        monkeypatch.setattr(DenseMethod, "drops_tokens", drops, raising=False)
        session = Session(llama, get_method("dense"))
        assert generate(session, question, 20) == written[:end]
        assert session.ids == [*question, *written[: end - 1]]


class Dropping(Method):
    """Keeps the first and the newest tokens of the prompt and does not count the others, as kvpress does."""

    drops_tokens = True
    first, newest = 4, 16

    def new_cache(self, model: Any) -> Any:
        return DynamicCache()

    def attached(self, model: Any, cache: Any) -> Any:
        return _Drop(self, model, prompt=cache.get_seq_length() == 0)


class _Drop:
    """Drops tokens of every layer right after the layer attended to them."""

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
def test_dropped_tokens_keep_the_positions_of_others(generate: Any, model: Any, tokenizer: Any) -> None:
    context, question = ids_of(tokenizer, CONTEXT), ids_of(tokenizer, QUESTIONS[0])
    session = Session(model, Dropping())
    session.forward(context)
    written = generate(session, question, STEPS)
    assert session.cache.get_seq_length() == 20 + len(question) + STEPS - 1
    # one dense forward per token over everything, in which tokens after the context do not see the dropped ones
    ids, size = [*context, *question], len(context)
    for _ in range(STEPS):
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        mask[size:, 4 : size - 16] = False
        logits = model(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    assert written == ids[-STEPS:]


def test_unknown_options_of_forwards(decoding: ModuleType, llama: Any, tokenizer: Any) -> None:
    session = Session(llama, get_method("dense"))
    with pytest.raises(ValueError, match="no field 'temprature'"):
        decoding.decode_by_forwards(session, [5], 2, {"temprature": 0.5})


@pytest.mark.parametrize("label", ["dense", LOSSLESS, "quanto:4"])
def test_generation(generate: Any, label: str, tiny_lm: Any, code_tokenizer: Any) -> None:
    ids = code_tokenizer("def f(x):\n    return x\n\n" * 8).input_ids
    session = Session(tiny_lm, get_method(label))
    written = generate(session, ids, 12)
    assert session.seen == session.cache.get_seq_length() == len(ids) + 11
    if label in ("dense", LOSSLESS):
        expected = list(ids)
        for _ in range(12):
            with torch.no_grad():
                logits = tiny_lm(torch.tensor([expected]), use_cache=False).logits[0, -1]
            expected.append(int(logits.argmax()))
        assert written == expected[len(ids) :]


def test_generation_can_sample(generate: Any, tiny_lm: Any, code_tokenizer: Any) -> None:
    ids = code_tokenizer("def ").input_ids
    torch.manual_seed(0)
    dense = get_method("dense")
    drawn = {tuple(generate(Session(tiny_lm, dense), ids, 8, do_sample=True)) for _ in range(5)}
    assert len(drawn) > 1
