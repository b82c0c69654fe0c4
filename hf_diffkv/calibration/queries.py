"""Measures second moments of a model's queries, used to round generated keys (docs/store.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..cache.diffkv_cache import DiffKVCache
from ..cache.resolve import config_of
from ..config import DiffKVConfig
from ..evaluation.tasks import Document
from ..heads.lookup import queries_path
from ..heads.query_moments import QueryMoments
from ..heads.recognition import mark_of
from ..heads.weights import model_digest
from ..ops.table import ops_for
from ..replacing import save_tensors
from .documents import DOCUMENT_LENGTH, digest_of, documents_for
from .watched import WatchedLayer, in_float32, run_prompt, watching

# metadata key in a file of sums, for the digests of its documents
SUMMED = "documents"


def measure_queries(
    model: Any, tokenizer: Any, text: Iterable[str] | str | None = None, *, length: int = DOCUMENT_LENGTH
) -> QueryMoments:
    """Measures query moments by running the model once on each prompt of `measure_heads`.

    Arguments and errors are as for `measure_heads`. `keep_queries` puts the result where the model's caches find it.
    """
    config_of(model)
    # raises for an unsupported model; an explicit configuration avoids a lookup
    DiffKVCache(model, DiffKVConfig.lossless())
    return moments_on(model, documents_for(tokenizer, [text] if isinstance(text, str) else text, length))


def keep_queries(moments: QueryMoments) -> Path:
    """Writes moments to the user's folder, where the model's caches find them. Raises `ValueError` and `OSError`."""
    if not isinstance(moments, QueryMoments):
        raise ValueError(f"moments is a {type(moments).__name__}; pass what measure_queries returned.")
    path = queries_path(moments.model_digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    moments.save(path)
    return path


class QuerySums:
    """Sums, over documents, of the second moments of a model's queries.

    Args:
        documents: all documents to sum over.
        path: file that keeps this model's sums; None keeps them only in memory. Sums in a damaged file, or of other
            documents, are discarded.
    """

    def __init__(self, documents: Sequence[Document], path: Path | None = None) -> None:
        self._documents, self._path = documents, path
        self._done: list[str] = []
        self._sums: list[Tensor] = []
        if path is not None and path.is_file():
            done, found = _read(path)
            if set(done) <= {document.digest for document in documents}:
                self._done, self._sums = done, found

    def has(self, document: Document) -> bool:
        return document.digest in self._done

    def add(self, document: Document, layers: Sequence[WatchedLayer]) -> None:
        """Adds the moments of a document's prompt, as the layers saw it."""
        means = [_mean(layer) for layer in layers]
        self._sums = [total + mean for total, mean in zip(self._sums, means)] if self._done else means
        self._done.append(document.digest)
        if self._path is not None:
            tensors = {str(layer): total.contiguous() for layer, total in enumerate(self._sums)}
            save_tensors(tensors, self._path, {SUMMED: json.dumps(self._done)})

    def moments(self, model: Any) -> QueryMoments:
        """Returns the moments over all documents, each of which must have been added."""
        text_config = model.config.get_text_config(decoder=True)
        return QueryMoments.of(
            text_config.model_type, model_digest(model), digest_of(self._documents), self._sums, mark_of(model)
        )


@torch.no_grad()
def moments_on(model: Any, documents: Sequence[Document]) -> QueryMoments:
    """Measures second moments over the queries of all prompts."""
    sums = QuerySums(documents)
    with in_float32(model), watching(model):
        for document in documents:
            sums.add(document, run_prompt(model, document.context)[1])
    return sums.moments(model)


def _read(path: Path) -> tuple[list[str], list[Tensor]]:
    """Returns the digests of the documents and the sums in a file, none if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            done = json.loads(file.metadata()[SUMMED])
            return done, [file.get_tensor(str(layer)).clone() for layer in range(len(file.keys()))]
    except (SafetensorError, KeyError, TypeError, ValueError):
        return [], []


def _mean(layer: WatchedLayer) -> Tensor:
    """Returns the mean of q q^T over the queries of each KV head, float64 [heads, key_dim, key_dim]."""
    heads = layer.keys.shape[1]
    total = sum(
        ops_for(query.device, query.dtype).second_moment(query, heads).double().cpu() for query in layer.queries
    )
    return total / sum(query.shape[1] // heads * query.shape[2] for query in layer.queries)
