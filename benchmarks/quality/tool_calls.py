"""Loss of tool calls after long conversations: KL of accepted calls, token by token.

The conversations come from `field.py bfcl --tasks bfcl_turns`. The dense cache reads the functions and earlier turns of
each group of questions once, and passes them to every cache as in `field_tasks/shared_prompts.py`. Each question is
then read with a call that the leaderboard accepts, and the predictions of the call's tokens are compared with the dense
cache's. This distinguishes methods with fewer questions than scores need, and also works on questions that the model
gets wrong.

    python benchmarks/quality/tool_calls.py --model qwen2.5-coder-0.5b --output build/tool_calls.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from field_tasks import bfcl
from field_tasks.cases import Case, Source, encode
from field_tasks.shared_prompts import hand_over, read_prompt
from long_text import compared, without_attention

from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.running.models import load_config, load_model

METHODS = "diffkv:lossless,diffkv:balanced+head_precisions=null,diffkv:quality,diffkv,diffkv:small,quanto:4"
QUESTIONS = 30


def measure(model: Any, tokenizer: Any, questions: int, length: int | None, labels: list[str]) -> Iterator[dict]:
    """Yields a row for each method and question.

    Args:
        model: model with Transformers' own attention.
        tokenizer: tokenizer of the model, whose chat template takes tools.
        questions: number of questions.
        length: minimum number of tokens of the functions and turns; None is the task's default.
        labels: methods besides the dense cache.
    """
    groups: dict[tuple[int, ...], list[Case]] = {}
    for case in bfcl.cases(Source(tokenizer, "", ("bfcl_turns",), questions, length)):
        groups.setdefault(case.earlier, []).append(case)
    for earlier, cases in groups.items():
        prompt = read_prompt(model, earlier)
        calls = [encode(tokenizer, case.solution) for case in cases]
        begun = hand_over(model, get_method("dense"), prompt)
        dense_bytes = begun.held().bytes
        exact = [_predictions(begun.branch(), case.ids, call) for case, call in zip(cases, calls)]
        for label in labels:
            with without_attention():
                begun = hand_over(model, get_method(label), prompt)
            held = begun.held()
            for case, call, dense in zip(cases, calls, exact):
                row = {"question": case.name, "method": label, "tokens": len(call)}
                row |= {"bytes": held.bytes, "dense_bytes": dense_bytes}
                yield {**row, **compared(_predictions(begun.branch(), case.ids, call), dense)}


def _predictions(session: Any, question: tuple[int, ...], call: tuple[int, ...]) -> torch.Tensor:
    """Returns the logits that predict a call's tokens, [tokens, vocabulary]."""
    return session.forward((*question, *call), keep=len(call) + 1)[:-1]


def run() -> None:
    """Writes the rows of `measure` to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens of functions and earlier turns (default: 4,096)")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    _, tokenizer = load_config(options.model)
    model = load_model(options.model)
    given = {name: value for name, value in vars(options).items() if name != "output"}
    head = {**given, "environment": describe_environment(model.device)}
    rows = []
    with torch.no_grad():
        for row in measure(model, tokenizer, options.questions, options.length, options.methods.split(",")):
            rows.append(row)
            print(json.dumps(row), flush=True)
            options.output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run()
