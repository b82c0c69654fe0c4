"""Generation where `generate()` does not do: one forward per token, each with its position."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class Forwards(Protocol):
    """A model with a cache that has seen `ids`, and the tokenizer for what it writes (`Session`)."""

    model: Any
    tokenizer: Any
    ids: list[int]

    def forward(self, ids: Sequence[int], keep: int = 1) -> Tensor:
        """Runs the model on further tokens; logits [keep, vocabulary] of the last ones."""


# what generate() takes where neither the model nor the caller says
DEFAULT_TOP_K = 50


def decode_by_forwards(session: Forwards, ids: Sequence[int], max_new_tokens: int, options: dict[str, Any]) -> str:
    """The text that `generate()` would write with a cache that counts the tokens it forgets.

    Args:
        ids: token ids that follow what the cache has seen.
        options: `do_sample` and fields of `GenerationConfig`; further ones are those of the model.
    """
    config = copy.copy(session.model.generation_config)
    for name, value in options.items():
        if not hasattr(config, name):
            raise ValueError(f"no field {name!r} in GenerationConfig.")
        setattr(config, name, value)
    sample = options.get("do_sample", False)
    process, ends = _processors(config, sample), _ends(config)
    logits = session.forward(ids)[-1]
    written: list[int] = []
    while len(written) < max_new_tokens:
        seen = torch.tensor([session.ids], device=logits.device)
        scores = process(seen, logits[None].float())
        token = int(torch.multinomial(scores.softmax(-1), 1) if sample else scores.argmax(-1))
        written.append(token)
        if token in ends:
            break
        if len(written) < max_new_tokens:
            logits = session.forward([token])[-1]
    return session.tokenizer.decode(written, skip_special_tokens=True)


def _processors(config: GenerationConfig, sample: bool) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if not sample:
        return found
    if config.temperature not in (None, 1.0):
        found.append(TemperatureLogitsWarper(config.temperature))
    top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
    if top_k:
        found.append(TopKLogitsWarper(top_k))
    if config.top_p not in (None, 1.0):
        found.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        found.append(MinPLogitsWarper(config.min_p))
    return found


def _ends(config: GenerationConfig) -> set[int]:
    ends = config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
