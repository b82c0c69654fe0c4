"""Measures how rounding generated keys by query moments affects recall of facts in long generations.

The first tokens of a document are a prompt; all others, including questions and answers of `turns`, are fed one at a
time, as if generated, so that their keys leave the window one by one. Each preset runs with and without the moments of
the model's queries; without them, such keys are rounded to the nearest code. The reference is the dense cache.

    python benchmarks/quality/generated_keys.py --model smollm2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_diffkv.cache import diffkv_cache
from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session
from hf_diffkv.evaluation.tasks import get_task
from hf_diffkv.evaluation.tasks.base import Source, Sums
from hf_diffkv.running.models import load_config, load_model

RESULTS = Path(__file__).resolve().parents[1] / "results" / "quality"
ROUNDINGS = ("nearest code", "for queries")


class Writing(Session):
    """Feeds all tokens after the first `prompt` one at a time."""

    prompt = 500

    def forward(self, ids: Sequence[int], keep: int = 1) -> Tensor:
        read = list(ids[: max(0, self.prompt - self.seen)])
        logits = [super().forward(read, min(keep, len(read)))] if read else []
        logits += [super(Writing, self).forward([token]) for token in ids[len(read) :]]
        return torch.cat(logits)[-keep:]


def measure(model: Any, method: str, rounding: str, task: Any, document: Any, reference: Any) -> tuple[Sums, Any, Any]:
    """Measures one document with one cache."""
    known = diffkv_cache.moments_for
    with patch.object(diffkv_cache, "moments_for", known if rounding == ROUNDINGS[1] else lambda *args: None):
        return task.measure(Writing(model, get_method(method)), document, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default="dictionary,turns")
    parser.add_argument("--methods", default="diffkv,diffkv:small")
    parser.add_argument("--documents", type=int, help="of each task; as many as the task has by itself without")
    parser.add_argument("--output", type=Path, help="folder; one among the results without")
    options = parser.parse_args()
    _, tokenizer = load_config(options.model)
    model = load_model(options.model, dtype="float32", device="cpu")
    folder = options.output or RESULTS / options.model / "generated_keys"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": options.model, "dtype": "float32", "prompt": Writing.prompt, **describe_environment(model.device)}
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    with (folder / "records.jsonl").open("w") as file:
        print(json.dumps(about), file=file)
        for task in map(get_task, options.tasks.split(",")):
            source = Source(tokenizer, options.documents or task.count, task.length)
            for document in tqdm(task.documents(source), desc=task.name):
                reference = task.measure(Session(model, get_method("dense")), document, None)[1]
                for method in options.methods.split(","):
                    for rounding in ROUNDINGS:
                        sums, _, details = measure(model, method, rounding, task, document, reference)
                        names = {"task": task.name, "method": method, "rounding": rounding}
                        row = {**names, "document": document.name, "tokens": document.tokens, **sums}
                        print(json.dumps({**row, "bytes": details["held"].bytes}), file=file, flush=True)
                        found.setdefault((task.name, method, rounding), []).append(sums)
    print("| task | method | generated keys | right | KL |\n|---|---|---|---|---|")
    for names, documents in found.items():
        right, known = (sum(sums["right"][part] for sums in documents) for part in (0, 1))
        kl, positions = (sum(sums["kl"][part] for sums in documents) for part in (0, 1))
        by_document = [sums["kl"][0] / sums["kl"][1] for sums in documents]
        spread = f"{kl / positions:.4f} ({min(by_document):.4f} to {max(by_document):.4f})"
        print(f"| {' | '.join(names)} | {right:.0f} of {known:.0f} | {spread} |")


if __name__ == "__main__":
    main()
