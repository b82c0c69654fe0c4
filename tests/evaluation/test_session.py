"""One cache over the forwards of a document: against the model without a cache, and against branches of it."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model

from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.methods.base import attends_fully
from hf_diffkv.evaluation.session import Session

EXACT = ["dense", "diffkv:lossless"]
LOSSY = ["diffkv", "diffkv:K4V2+window=16", "quanto:4", "quanto:2", "hqq:4", "fp8"]
PROMPT, OTHER, *TEXTS = (
    torch.randint(3, VOCABULARY, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (150, 140, 5, 1, 9, 4)
)
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@torch.no_grad()
def without_cache(model: Any, ids: list[int], keep: int) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0, -keep:]


@contextmanager
def counted_forwards(model: Any) -> Any:
    counted: list[int] = []
    hook = model.register_forward_pre_hook(lambda *ignored: counted.append(1))
    yield counted
    hook.remove()


def after_prompt(model: Any, label: str) -> Session:
    session = Session(model, get_method(label))
    session.forward(PROMPT)
    return session


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("label", EXACT)
def test_forwards_equal_the_model_without_a_cache(family: str, label: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(family)
    session = Session(model, get_method(label))
    ids: list[int] = []
    for text in (PROMPT, TEXTS[0], TEXTS[1], TEXTS[2]):
        ids += text
        found = session.forward(text, keep=len(text))
        torch.testing.assert_close(found, without_cache(model, ids, len(text)), **TOLERANCE)
        assert session.seen == len(ids)


@pytest.mark.parametrize("label", EXACT)
def test_asked_at_once_equals_the_model_without_a_cache(label: str, llama: Any) -> None:
    for logits, text in zip(after_prompt(llama, label).ask(TEXTS), TEXTS):
        torch.testing.assert_close(logits, without_cache(llama, PROMPT + text, len(text)), **TOLERANCE)


def ask_all(model: Any, label: str, forwards: int) -> list[torch.Tensor]:
    """Asks all texts in `forwards` forwards, compares with branches, and returns the logits."""
    session = after_prompt(model, label)
    separate = [session.branch().forward(text, keep=len(text)) for text in TEXTS]
    with counted_forwards(model) as counted:
        asked = session.ask(TEXTS)
    assert len(counted) == forwards
    torch.testing.assert_close(asked, separate, **TOLERANCE)
    return asked


@pytest.mark.parametrize("label", EXACT + LOSSY)
def test_asked_at_once_equals_branches(label: str, llama: Any) -> None:
    ask_all(llama, label, 1)


@pytest.mark.parametrize("label", [*EXACT, "diffkv", "diffkv:K4V2+window=16"])
def test_sliding_windows_are_asked_one_by_one(label: str, gemma: Any) -> None:
    for found, text in zip(ask_all(gemma, label, len(TEXTS)), TEXTS):
        if label in EXACT:
            torch.testing.assert_close(found, without_cache(gemma, PROMPT + text, len(text)), **TOLERANCE)


def test_an_attention_that_adds_its_mask_is_asked_one_by_one() -> None:
    """Eager attention would add 1 where a mask of truth values says that a token is seen."""
    model = tiny_model("llama", "eager")
    with counted_forwards(model) as forwards:
        asked = after_prompt(model, "dense").ask(TEXTS)
    assert len(forwards) == 1 + len(TEXTS)
    for logits, text in zip(asked, TEXTS):
        torch.testing.assert_close(logits, without_cache(model, PROMPT + text, len(text)), **TOLERANCE)


def test_which_models_attend_to_everything(llama: Any, gemma: Any) -> None:
    assert attends_fully(llama) and not attends_fully(gemma)
    assert attends_fully(tiny_model("mistral")) and not attends_fully(tiny_model("mistral", sliding_window=16))


@pytest.mark.parametrize("label", EXACT + LOSSY)
def test_a_branch_leaves_the_original(label: str, llama: Any) -> None:
    session = after_prompt(llama, label)
    # not what a fork takes to know the owners of its pages
    stored = "payload_bytes" if label.startswith("diffkv") else "bytes"
    held = getattr(session.held(), stored)
    first = session.branch().forward(TEXTS[0], keep=len(TEXTS[0]))
    branch = session.branch()
    # long enough that quantised caches store again what they hold
    branch.forward(OTHER)
    branch.branch().ask(TEXTS)
    assert (branch.seen, branch.cache.get_seq_length()) == (len(PROMPT + OTHER),) * 2
    assert (session.seen, session.cache.get_seq_length()) == (len(PROMPT),) * 2
    assert getattr(session.held(), stored) == held > 0
    assert torch.equal(session.forward(TEXTS[0], keep=len(TEXTS[0])), first)


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
@pytest.mark.parametrize("label", EXACT)
def test_branches_of_other_kinds_of_layers(family: str, label: str) -> None:
    """A sliding window, and the state of a convolution, into which Transformers writes."""
    layers = {} if family == "gemma3_text" else {"layer_types": ["conv", "full_attention"], "head_dim": None}
    model = tiny_model(family, **layers)
    session = after_prompt(model, label)
    session.branch().forward(OTHER)
    found = session.branch().forward(TEXTS[0], keep=len(TEXTS[0]))
    torch.testing.assert_close(found, without_cache(model, PROMPT + TEXTS[0], len(TEXTS[0])), **TOLERANCE)


@pytest.mark.parametrize("label", EXACT + LOSSY)
def test_the_model_is_left_as_it_was(label: str, llama: Any) -> None:
    config, weights = copy.deepcopy(llama.config), copy.deepcopy(llama.state_dict())
    after_prompt(llama, label).ask(TEXTS)
    assert llama.config == config and llama.config._attn_implementation == "sdpa"
    assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())
