"""Measures the loss from storing each head's keys and values at few bits, on a loaded model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cache.diffkv_cache import DiffKVCache
from ..cache.resolve import config_of
from ..config import DiffKVConfig, Precision
from ..config.diffkv_config import with_calibration
from ..config.latent import has_latents
from ..evaluation.errors import EvaluationError
from ..evaluation.tasks import Document
from ..heads.allocation import SENSITIVITY, fields_for
from ..heads.query_moments import QueryMoments
from ..heads.recognition import mark_of
from ..heads.sensitivity import KEY_BITS, MEASURED_FIELDS, VALUE_BITS, Sensitivity, mean_of
from ..heads.weights import model_digest
from .documents import DOCUMENT_LENGTH, POSITIONS, digest_of, documents_for
from .gradients import GRADIENTS, Following
from .kept import Kept
from .progress import Progress
from .queries import QuerySums
from .stored import errors, geometric_mean, stored
from .watched import WatchedLayer, in_float32, run_prompt, watching

# bits of keys and of values at which errors are measured
MEASURED_BITS = (2, 3, 4, 5, 6, 8)
# work of a following token with its gradient, and of a stored token, relative to a token of the prompt
FOLLOWING_WORK, STORING_WORK = 3.0, 0.4


@dataclass(frozen=True)
class Measured:
    """Loss of a model's heads, and second moments of its queries, measured on the same documents."""

    sensitivity: Sensitivity
    queries: QueryMoments


def measure_heads(
    model: Any,
    tokenizer: Any,
    text: Iterable[str] | str | None = None,
    *,
    length: int = DOCUMENT_LENGTH,
    output: Path | str | None = None,
    quiet: bool = False,
) -> Sensitivity:
    """Measures a model's heads on eight documents of text, recall and copying.

    Each document takes a forward pass over its prompt, then a forward and a backward pass over what follows. A
    half-precision model computes in float32 meanwhile, which takes twice its memory.

    Args:
        model: loaded decoder-only model; it is unchanged afterwards.
        tokenizer: tokenizer of the model.
        text: running text; None uses Python's documentation.
        length: number of tokens of a prompt.
        output: folder that keeps the figures of each document; an existing run in it is continued.
        quiet: whether to hide progress.

    Raises:
        ValueError: the text is too short, prompts exceed the model's maximum length, or the folder holds another run.
        UnsupportedModelError: a `DiffKVCache` does not work with the model.
        EvaluationError: the model cannot be differentiated.
    """
    config_of(model)
    pieces = [text] if isinstance(text, str) else text
    return measure(model, documents_for(tokenizer, pieces, length), output, quiet).sensitivity


@torch.no_grad()
def measure(
    model: Any, documents: Sequence[Document], output: Path | str | None = None, quiet: bool = False
) -> Measured:
    """Measures heads on documents from `documents_for`, and query moments at no extra cost."""
    # an explicit configuration, so that nothing is looked up and no hint to calibrate is logged
    layers = len(DiffKVCache(model, DiffKVConfig.lossless()).compressed_layers())
    if not layers:
        raise EvaluationError(f"{type(model).__name__} has no layers to compress.")
    _check_fit(model, documents)
    kept = Kept(model, output)
    sums = QuerySums(documents, kept.sums_path)
    if not all(kept.has(document, layers) and sums.has(document) for document in documents):
        _measure_all(model, documents, layers, kept, sums, quiet)
    return Measured(_summary(model, documents, [kept.layers(each) for each in documents]), sums.moments(model))


def config_for(sensitivity: Sensitivity, target_ratio: float, **source: Any) -> DiffKVConfig:
    """Returns a configuration with the head precisions of lowest predicted loss within a ratio.

    Args:
        target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype; `with_ratio` of the
            result gives configurations for other ratios.
        source: additional entries of the configuration's `calibration`.

    Raises:
        ValueError: the ratio cannot be met.
    """
    fields, block = fields_for({**source, SENSITIVITY: sensitivity.to_dict()}, target_ratio)
    return with_calibration(DiffKVConfig(**MEASURED_FIELDS, **fields), block)


def _check_fit(model: Any, documents: Sequence[Document]) -> None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(document.tokens for document in documents)
    if most is not None and longest > most:
        raise EvaluationError(
            f"documents have {longest} tokens but the model's max_position_embeddings is {most}; lower length."
        )


def _measure_all(
    model: Any, documents: Sequence[Document], layers: int, kept: Kept, sums: QuerySums, quiet: bool
) -> None:
    """Measures the missing documents."""
    left = [document for document in documents if not kept.has(document, layers) or not sums.has(document)]
    with (
        Progress(len(documents), sum(map(_work, left)), quiet) as progress,
        in_float32(model),
        watching(model),
    ):
        progress.resume(len(documents) - len(left))
        for document in left:
            progress.begin(document.name)
            _measure_one(model, document, layers, kept, sums, progress)
            progress.end()


def _measure_one(model: Any, document: Document, layers: int, kept: Kept, sums: QuerySums, progress: Progress) -> None:
    """Measures what is missing for one document, whose tensors are freed on return."""
    started = time.perf_counter()
    cached, watched = run_prompt(model, document.context)
    progress.advance(len(document.context))
    progress.estimate()
    if not sums.has(document):
        sums.add(document, watched)
    if not kept.has(document, layers):
        following = Following(model, cached, document.continuation, document.extra[POSITIONS])
        progress.advance(_of_following(document))
        figures = [_figures_of(following, index, layer) for index, layer in enumerate(watched)]
        progress.advance(_of_stores(document))
        kept.add(document, figures, time.perf_counter() - started)


def _work(document: Document) -> float:
    """Returns the work of a document, in tokens of a prompt."""
    return len(document.context) + _of_following(document) + _of_stores(document)


def _of_following(document: Document) -> float:
    return FOLLOWING_WORK * GRADIENTS * len(document.continuation)


def _of_stores(document: Document) -> float:
    return STORING_WORK * len(document.context)


def _figures_of(following: Following, index: int, layer: WatchedLayer) -> dict[str, Any]:
    """Measures losses and errors of a layer's heads, ready for JSON."""
    damaged = {bits: stored(layer, Precision(bits, bits)) for bits in MEASURED_BITS}
    off = {bits: errors(layer, *tensors) for bits, tensors in damaged.items()}
    keys, values = following.losses(index, damaged[KEY_BITS][0], damaged[VALUE_BITS][1])
    return {
        "shape": [layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]],
        "key_errors": {str(bits): each[0].tolist() for bits, each in off.items()},
        "value_errors": {str(bits): each[1].tolist() for bits, each in off.items()},
        "keys": keys,
        "values": values,
    }


def _summary(model: Any, documents: Sequence[Document], found: Sequence[list[dict[str, Any]]]) -> Sensitivity:
    """Averages the figures of all layers over documents."""

    def curve(name: str) -> dict[int, float]:
        def of_document(layers: list[dict[str, Any]], bits: int) -> float:
            each = [figure for figures in layers for figure in figures[name][str(bits)]]
            return geometric_mean(torch.tensor(each))

        each = {bits: [math.log(of_document(layers, bits)) for layers in found] for bits in MEASURED_BITS}
        return {bits: math.exp(sum(logs) / len(logs)) for bits, logs in each.items()}

    def losses(name: str) -> tuple[tuple[float, ...], ...]:
        return mean_of([[figures[name] for figures in layers] for layers in found])

    return Sensitivity(
        model_type=model.config.get_text_config(decoder=True).model_type,
        model_digest=model_digest(model),
        element_bytes=model.dtype.itemsize,
        shapes=tuple(tuple(figures["shape"]) for figures in found[0]),
        keys=losses("keys"),
        values=losses("values"),
        key_errors=curve("key_errors"),
        value_errors=curve("value_errors"),
        documents=len(documents),
        documents_digest=digest_of(documents),
        mark=mark_of(model),
        latent=has_latents(model.config.get_text_config(decoder=True)),
    )
