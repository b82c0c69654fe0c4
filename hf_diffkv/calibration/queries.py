"""Second moments of a model's queries, by which generated keys are rounded (docs/store.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.diffkv_cache import DiffKVCache
from ..cache.resolve import config_of
from ..config.found import queries_path
from ..evaluation.tasks import Document
from ..heads.recognition import mark_of
from ..heads.weights import model_digest
from ..ops.rounding import second_moment
from ..store.query_moments import QueryMoments
from .documents import DOCUMENT_LENGTH, digest_of, documents_for
from .replay import WatchedLayer, in_float32, run_prompt, watching


def measure_queries(
    model: Any, tokenizer: Any, text: Iterable[str] | str | None = None, *, length: int = DOCUMENT_LENGTH
) -> QueryMoments:
    """Runs the model once on each of the prompts of `measure_heads`.

    Arguments and errors are those of `measure_heads`; `keep_queries` has caches of the model find the result.
    """
    config_of(model)
    # says so of a model that has no use for them
    DiffKVCache(model)
    return moments_on(model, documents_for(tokenizer, [text] if isinstance(text, str) else text, length))


def keep_queries(moments: QueryMoments) -> Path:
    """Writes them to the user's folder, where caches of the model find them. Raises `OSError`."""
    path = queries_path(moments.model_digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    moments.save(path)
    return path


@torch.no_grad()
def moments_on(model: Any, documents: Sequence[Document]) -> QueryMoments:
    """Of the queries of all documents' prompts."""
    digest = model_digest(model)
    with in_float32(model), watching(model):
        watched = (run_prompt(model, document.context)[1] for document in documents)
        found = [[_mean(layer) for layer in layers] for layers in watched]
    together = [sum(layers) for layers in zip(*found)]
    text_config = model.config.get_text_config(decoder=True)
    return QueryMoments.of(text_config.model_type, digest, digest_of(documents), together, mark_of(model))


def moments_in(path: Path, model: Any, documents: Sequence[Document]) -> QueryMoments:
    """Those in a file, if they are of this model and these documents; else they are measured and written there."""
    if path.is_file():
        kept = QueryMoments.load(path)
        if (kept.model_digest, kept.documents_digest) == (model_digest(model), digest_of(documents)):
            return kept
    moments = moments_on(model, documents)
    moments.save(path)
    return moments


def _mean(layer: WatchedLayer) -> Tensor:
    """Of q q^T over the queries of each of the layer's KV heads, float64 [heads, key_dim, key_dim]."""
    heads = layer.keys.shape[1]
    total = sum(second_moment(query, heads).double().cpu() for query in layer.queries)
    return total / sum(query.shape[1] // heads * query.shape[2] for query in layer.queries)
