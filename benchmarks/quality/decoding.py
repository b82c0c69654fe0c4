"""Generates text in an evaluation session, including with caches that do not count the tokens they drop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_diffkv.compat import passing
from hf_diffkv.evaluation.session import Session

# default of generate() if neither the model nor the caller sets it
DEFAULT_TOP_K = 50


@torch.no_grad()
def generate(session: Session, ids: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Generates tokens after `ids` and returns them. The last one is not run through the model.

    Args:
        session: session whose cache is used.
        ids: token ids that follow the tokens seen.
        max_new_tokens: maximum number of generated tokens.
        options: options of Transformers' `generate()`, for example for sampling; greedy by default.
    """
    if getattr(session.method, "drops_tokens", False):
        return decode_by_forwards(session, ids, max_new_tokens, options)
    whole = [*session.ids, *ids]
    prompt = torch.tensor([whole], device=session.model.device)
    options = {"do_sample": False, "max_new_tokens": max_new_tokens, **options}
    with session.method.attached(session.model, session.cache):
        written = session.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), **passing(session.cache), **options
        )[0].tolist()
    session.ids = written[: session.cache.get_seq_length()]
    return written[len(whole) :]


def decode_by_forwards(session: Session, ids: Sequence[int], max_new_tokens: int, options: dict[str, Any]) -> list[int]:
    """Generates tokens like `generate()`, one forward per token, for caches that do not count the tokens they drop.

    Args:
        session: session whose cache is used.
        ids: token ids that follow the tokens seen.
        max_new_tokens: maximum number of generated tokens.
        options: `do_sample` and fields of `GenerationConfig`; other fields are the model's.

    Raises:
        ValueError: an option is not a field of `GenerationConfig`.
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
    return written


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
