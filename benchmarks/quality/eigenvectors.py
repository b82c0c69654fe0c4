"""Measures the gain from rotating keys and values by the eigenvectors of each head's moments, at equal bytes.

A fixed orthogonal matrix for each layer and KV head is wrapped around `DiffKVCache`: keys, values and queries are
rotated before the cache and outputs after it, so that the model's results and its reference are unchanged. The cache
then centres, rotates by Hadamard and rounds as usual. The query moments are those shipped, also rotated; keys and
values come from the documents used to calibrate heads.

    python benchmarks/quality/eigenvectors.py --documents 6 --output benchmarks/results/quality/smollm2/eigenvectors
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers.cache_utils import Cache

from hf_diffkv.cache import diffkv_cache
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.cache.resolve import moments_for
from hf_diffkv.calibration.documents import documents_for
from hf_diffkv.calibration.watched import WatchedLayer
from hf_diffkv.compat import passing
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session
from hf_diffkv.evaluation.tasks import get_task
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.heads.query_moments import QueryMoments, moment_of
from hf_diffkv.running.models import load_config, load_model

METHODS = "diffkv,diffkv:small,diffkv:small+K4V3"
SINKS = 4


@dataclass(frozen=True)
class Turn:
    """Orthogonal matrices [heads, dim, dim] of each layer for keys and for values; None rotates nothing."""

    name: str
    keys: Sequence[Tensor] | None = None
    values: Sequence[Tensor] | None = None


def eigenvectors(moments: Sequence[Tensor]) -> list[Tensor]:
    """Returns the eigenvectors of each moment as columns, in order of decreasing eigenvalue."""
    return [torch.linalg.eigh(moment.double())[1].flip(-1).float() for moment in moments]


def random_matrices(moments: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.linalg.qr(torch.randn(moment.shape, generator=generator))[0] for moment in moments]


@torch.no_grad()
def second_moments(model: Any, tokenizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each layer's second moments of centred keys and of values, [heads, head_dim, head_dim].

    They are means over the calibration prompts, without the first `SINKS` tokens.
    """
    layers = model.config.num_hidden_layers
    found: list[list[Tensor]] = [[], []]
    for document in tqdm(documents_for(tokenizer), desc="moments"):
        watched = [WatchedLayer() for _ in range(layers)]
        model(torch.tensor([document.context]), **passing(Cache(layers=watched)), logits_to_keep=1)
        keys = torch.stack([layer.keys[0, :, SINKS:] for layer in watched])
        values = torch.stack([layer.values[0, :, SINKS:] for layer in watched])
        for kept, x in zip(found, (keys - keys.mean(2, keepdim=True), values)):
            kept.append(x.mT @ x / x.shape[2])
    keys, values = (list(torch.stack(kept).mean(0)) for kept in found)
    return keys, values


@contextmanager
def turned(turn: Turn, moments: QueryMoments) -> Iterator[None]:
    """Makes caches hold rotated keys and values within the block."""
    update, attend = DiffKVLayer.update, DiffKVLayer.attend

    def update_turned(
        self: DiffKVLayer, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        key = key if turn.keys is None else key @ turn.keys[self.index]
        value = value if turn.values is None else value @ turn.values[self.index]
        return update(self, key, value, *args, **kwargs)

    def attend_turned(self: DiffKVLayer, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        heads = self.store.num_heads
        if turn.keys is not None:
            query = (query.unflatten(1, (heads, -1)) @ turn.keys[self.index][:, None]).flatten(1, 2)
        output = attend(self, query, *args, **kwargs)
        if turn.values is not None:
            output = (output.unflatten(1, (heads, -1)) @ turn.values[self.index].mT[:, None]).flatten(1, 2)
        return output

    if turn.keys is not None:
        matrices = [matrix.double() for matrix in turn.keys]
        whole = [matrix.mT @ moment_of(part) @ matrix for matrix, part in zip(matrices, moments.triangles)]
        moments = QueryMoments.of(moments.model_type, moments.model_digest, moments.documents_digest, whole)
    with (
        patch.object(DiffKVLayer, "update", update_turned),
        patch.object(DiffKVLayer, "attend", attend_turned),
        patch.object(diffkv_cache, "moments_for", lambda *args: moments),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", default="dictionary,text")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--documents", type=int, default=6, help="of each task (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    _, tokenizer = load_config(options.model)
    model = load_model(options.model, dtype="float32", device="cpu")
    moments = moments_for(model, DiffKVConfig.for_model(model))
    key_moments, value_moments = second_moments(model, tokenizer)
    by_query = eigenvectors([moment_of(part) for part in moments.triangles])
    by_key, by_value = eigenvectors(key_moments), eigenvectors(value_moments)
    turns = (
        Turn("as they are"),
        Turn("random", random_matrices(key_moments, 1), random_matrices(value_moments, 2)),
        Turn("values by values", values=by_value),
        Turn("keys by queries", by_query),
        Turn("keys by keys", by_key),
        Turn("keys by queries, values by values", by_query, by_value),
    )
    options.output.mkdir(parents=True, exist_ok=True)
    about = {"model": options.model, "dtype": "float32", **describe_environment(model.device)}
    totals: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    with (options.output / "records.jsonl").open("w") as file:
        file.write(json.dumps(about) + "\n")
        for task in map(get_task, options.tasks.split(",")):
            for document in tqdm(task.documents(Source(tokenizer, options.documents, task.length)), desc=task.name):
                reference = task.measure(Session(model, get_method("dense")), document, None)[1]
                for name, turn in product(options.methods.split(","), turns):
                    with turned(turn, moments):
                        sums, _, details = task.measure(Session(model, get_method(name)), document, reference)
                    row = {"method": name, "turn": turn.name, "task": task.name, "document": document.name}
                    file.write(json.dumps({**row, **sums, "bytes": details["held"].bytes}) + "\n")
                    totals.setdefault((task.name, name, turn.name), []).append(sums["kl"])
    for names, found in totals.items():
        kl, positions = map(sum, zip(*found))
        print(f"| {' | '.join(names)} | {kl / positions:.5f} |")


if __name__ == "__main__":
    main()
