"""Cases: prompts as token ids, with the data needed to score an answer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError

# end markers of chat models, as far as a vocabulary has them
END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")


@dataclass(frozen=True)
class Source:
    """Options for making cases.

    Attributes:
        tokenizer: tokenizer of the model, which has a chat template.
        path: folder or Hub id of the tokenizer.
        tasks: names of the tasks.
        samples: number of cases of each task; None takes all, if the number is finite.
        length: number of tokens of the context, as counted by the suite; None takes the suite's default.
    """

    tokenizer: Any
    path: str
    tasks: tuple[str, ...]
    samples: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class Case:
    """A prompt to be continued greedily.

    Attributes:
        task, name: names of the task and of the case within it.
        ids: token ids that the answer follows.
        limit: maximum number of generated tokens.
        ends: token ids at which the answer ends.
        reference: data for scoring, ready for JSON.
        earlier: token ids of earlier turns, which the cache already holds when it reads `ids`.
        solution: a correct answer, if the suite writes one; not part of the digest.
    """

    task: str
    name: str
    ids: tuple[int, ...]
    limit: int
    ends: tuple[int, ...]
    reference: dict[str, Any] = field(default_factory=dict)
    earlier: tuple[int, ...] = ()
    solution: str = ""

    @property
    def digest(self) -> str:
        """Digest of everything but the names and the solution."""
        content = [self.earlier, self.ids, self.limit, self.ends, self.reference]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole prompt."""
        return len(self.earlier) + len(self.ids)


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Returns the token ids of a text that may spell out special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def encode_turns(tokenizer: Any, whole: str, before: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Encodes a prompt in two parts.

    Args:
        tokenizer: tokenizer of the model.
        whole: text of all turns.
        before: text of the earlier turns, which consecutive prompts may share.

    Returns:
        Token ids of the last turns and of the earlier ones: `ids` and `earlier` of a case.

    Raises:
        ValueError: the whole text does not begin with the earlier turns.
    """
    if not whole.startswith(before):
        raise ValueError("the chat template writes earlier turns differently when another one follows.")
    return encode(tokenizer, whole[len(before) :]), _encode_once(tokenizer, before)


@functools.lru_cache(maxsize=1)
def _encode_once(tokenizer: Any, text: str) -> tuple[int, ...]:
    return encode(tokenizer, text)


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    prefix: str = "",
    asked: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Writes turns with the model's chat template.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: turns with `role` and `content`.
        prefix: beginning of the answer, directly after the template opens the assistant's turn.
        asked: whether the assistant's turn is opened at the end.
        tools: functions that the model may call.

    Raises:
        EvaluationError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise EvaluationError("the model has no chat template, which these tasks need; choose a chat model.")
    given = {} if tools is None else {"tools": list(tools)}
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asked, **given)
    return text + prefix


def ends_of(tokenizer: Any, *marks: str) -> tuple[int, ...]:
    """Returns the ids that end an answer: the tokenizer's end, `END_MARKS`, and `marks` that are one token."""
    vocabulary = tokenizer.get_added_vocab()
    found = {vocabulary[mark] for mark in END_MARKS if mark in vocabulary}
    found |= {ids[0] for ids in (encode(tokenizer, mark) for mark in marks) if len(ids) == 1}
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def answer_text(tokenizer: Any, case: Case, ids: Sequence[int]) -> str:
    """Returns the text of generated ids without the token that ended them."""
    ids = list(ids)
    if ids and ids[-1] in case.ends:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=True)


def write_cases(path: Path, cases: Iterable[Case]) -> None:
    """Writes cases as JSON lines, with their digests, for engines that run elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for case in cases:
            file.write(json.dumps({**asdict(case), "digest": case.digest}) + "\n")
