"""Messages as a chat model reads them: by hand, and against the template's rendering of the whole talk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_jobs import greedy_job
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.running.models import TINY_LM
from hf_diffkv.running.side_by_side import DIFFKV, DYNAMIC, execute
from hf_diffkv.running.talk import Talk, chat_turns

WITH_ROLES = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
# an answer ends with a newline, as tiny-lm has learnt
BARE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}"
NEWLINE = 10
PROMPT = "".join(f"@{name}={number}\n" for name, number in (("oak", 5305), ("elm", 1177), ("ash", 8642))) * 4 + "?oak="


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_LM)


def test_turns_are_what_is_read_before_each_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = WITH_ROLES
    assert chat_turns(tokenizer, ["hello", "more", "(answer)"]) == [
        "<s>user:hello</s>\n<s>assistant:",
        "</s>\n<s>user:more</s>\n<s>assistant:",
        "</s>\n<s>user:(answer)</s>\n<s>assistant:",
    ]


def test_templates_that_do_not_keep_answers_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_turns(tokenizer, ["hello"])
    # the answer's heading is another one as long as there is no answer
    tokenizer.chat_template = WITH_ROLES.removesuffix("{% endif %}") + "<think>{% endif %}"
    assert chat_turns(tokenizer, ["hello"]) == ["<s>user:hello</s>\n<s>assistant:<think>"]
    with pytest.raises(ValueError, match="supports single turns only"):
        chat_turns(tokenizer, ["hello", "more"])
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="supports single turns only"):
        chat_turns(tokenizer, ["hello", "more"])


@pytest.mark.parametrize("cache", [DYNAMIC, DIFFKV])
@pytest.mark.parametrize("max_new_tokens", [3, 9], ids=["answers cut short", "answers that end by themselves"])
def test_a_talk_is_what_the_template_makes_of_it(
    max_new_tokens: int, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LM, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = BARE
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=NEWLINE, pad_token_id=0).save_pretrained(folder)
    messages = [PROMPT, "?ash=", "?elm="]
    config = DiffKVConfig(alpha_high=1.0, window=16).to_dict()
    run = execute(greedy_job(cache, folder, messages, max_new_tokens, config, chat=True, stream=True))
    assert [ids[-1] == NEWLINE for ids in run.generated] == [max_new_tokens == 9] * 3
    answers = [tokenizer.decode(ids).removesuffix("\n") for ids in run.generated]
    assert answers == [number[:max_new_tokens] for number in ("5305", "8642", "1177")]
    talk = [
        {"role": role, "content": content}
        for pair in zip(messages, answers)
        for role, content in zip(("user", "assistant"), pair)
    ]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert PROMPT + run.text == whole.removesuffix("\n") + "\n" * (max_new_tokens == 9)
    assert run.seen_tokens == len(PROMPT + run.text) - 1
    _, echoed, printed = capsys.readouterr().out.partition(f"... {PROMPT[-60:]}\n")
    assert echoed and printed.index(answers[0]) < printed.index("\n> ?ash=\n") < printed.index(answers[1])


def test_a_first_message_that_failed_is_said_again(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = WITH_ROLES
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    talk = Talk(model, tokenizer, DiffKVCache(model), chat=True, system="be brief")
    begin = talk.encode("hello")
    with pytest.raises(ValueError, match="unknown_option"):
        talk.answer("hello", max_new_tokens=2, unknown_option=1)
    assert talk.encode("hello") == begin and not talk.is_ahead
    talk.answer("hello", max_new_tokens=2, do_sample=False)
    assert talk.ids[0, : len(begin)].tolist() == begin and not talk.is_ahead


def test_an_answer_that_does_not_fit(tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    talk = Talk(model, tokenizer, DiffKVCache(model))
    first = talk.answer(PROMPT, max_new_tokens=4, do_sample=False)

    def full(ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if talk.cache.get_seq_length() > before + 6:
            raise MemoryError("max_bytes is full.")
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    before = talk.cache.get_seq_length()
    with pytest.raises(MemoryError):
        talk.answer("?ash=", max_new_tokens=8, do_sample=False, stopping_criteria=[full])
    assert talk.is_ahead
    talk.reset()
    assert not talk.is_ahead
    assert talk.answer(PROMPT, max_new_tokens=4, do_sample=False) == first
