"""Measures, on a loaded model, the loss from storing each head's keys and values at few bits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.diffkv_cache import DiffKVCache
from ..cache.resolve import config_of
from ..config import DiffKVConfig, Precision
from ..config.allocation import SENSITIVITY, fields_for
from ..config.diffkv_config import with_calibration
from ..config.sensitivity import KEY_BITS, MEASURED_FIELDS, VALUE_BITS, Sensitivity, mean_of
from ..evaluation.errors import EvaluationError
from ..evaluation.tasks import Document
from ..heads.recognition import mark_of
from ..heads.weights import model_digest
from ..store.query_moments import QueryMoments
from .documents import DOCUMENT_LENGTH, POSITIONS, digest_of, documents_for
from .kept import Kept
from .progress import Progress
from .queries import QuerySums
from .replay import Replay, check_measurable, in_float32, watching
from .stored import errors, geometric_mean, stored

# bits of keys and of values at which errors are measured
MEASURED_BITS = (2, 3, 4, 5, 6, 8)
# upper bounds on the rows of a batch and on the bytes of its logits
MOST_ROWS, MOST_LOGIT_BYTES = 16, 1 << 29


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

    The model runs once for each head's keys and once for its values. A half-precision model computes in float32
    meanwhile, which takes twice its memory.

    Args:
        model: loaded decoder-only model; it is unchanged afterwards.
        tokenizer: tokenizer of the model.
        text: running text; None takes Python's documentation.
        length: number of tokens of a prompt.
        output: folder that keeps the figures layer by layer, and whose run is continued if there is one.
        quiet: whether to hide progress.

    Raises:
        ValueError: the text is too short, prompts are longer than the model's maximum, or the folder holds another run.
        UnsupportedModelError: a `DiffKVCache` does not work with the model.
    """
    config_of(model)
    check_measurable(model)
    pieces = [text] if isinstance(text, str) else text
    return measure(model, documents_for(tokenizer, pieces, length), output, quiet).sensitivity


@torch.no_grad()
def measure(
    model: Any, documents: Sequence[Document], output: Path | str | None = None, quiet: bool = False
) -> Measured:
    """Measures heads on documents of `documents_for`, and the moments of queries at no extra cost."""
    # an explicit configuration, so that nothing is looked up and no hint to calibrate is logged
    layers = len(DiffKVCache(model, DiffKVConfig.lossless()).compressed_layers())
    if not layers:
        raise EvaluationError(f"{type(model).__name__} has no layers that are compressed.")
    _check_fit(model, documents)
    kept = Kept(model, output)
    sums = QuerySums(documents, kept.sums_path)
    if any(kept.missing(document, layers) or not sums.has(document) for document in documents):
        _measure_all(model, documents, layers, kept, sums, quiet)
    return Measured(_summary(model, documents, [kept.layers(each) for each in documents]), sums.moments(model))


def config_for(sensitivity: Sensitivity, target_ratio: float, **source: Any) -> DiffKVConfig:
    """Returns a configuration with the head precisions of least predicted loss within a ratio.

    Args:
        sensitivity: measured loss of the heads.
        target_ratio: bytes of a stored token over its bytes in the model's dtype, at most; `with_ratio` of the result
            gives configurations for other ratios.
        source: further entries of the configuration's `calibration`.

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
    """Measures the missing layers of all documents."""
    text_config = model.config.get_text_config(decoder=True)
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    left = [document for document in documents if kept.missing(document, layers) or not sums.has(document)]
    work = [_work(document, kept.missing(document, layers), layers, heads) for document in left]
    with Progress(len(documents), sum(map(sum, work)), quiet) as progress, in_float32(model), watching(model):
        progress.resume(len(documents) - len(left), len(kept.layers(left[0])), layers)
        for document, (of_prompt, *of_layers) in zip(left, work):
            progress.begin(document.name)
            positions = document.extra[POSITIONS]
            rows = _rows(heads, len(positions), text_config.vocab_size)
            replay = Replay(model, document.context, document.continuation, positions, rows)
            if not sums.has(document):
                sums.add(document, replay.layers)
            progress.advance(of_prompt)
            for layer, of_layer in zip(kept.missing(document, layers), of_layers):
                started = time.perf_counter()
                figures = layer_figures(replay, layer)
                kept.add(document, layer, figures, time.perf_counter() - started)
                progress.advance(of_layer)
                progress.estimate()
            progress.end()


def _work(document: Document, missing: Sequence[int], layers: int, heads: int) -> list[int]:
    """Returns the work in tokens times layers: for the prompt, then for each missing layer with all later ones."""
    following = 2 * heads * len(document.continuation)
    return [len(document.context) * layers, *(following * (layers - layer) for layer in missing)]


def _rows(heads: int, positions: int, vocabulary: int) -> int:
    """Returns the rows of a batch: one for each head's keys and values if they fit, else equal batches."""
    fit = MOST_LOGIT_BYTES // (4 * positions * vocabulary)
    most = max(1, min(2 * heads, MOST_ROWS, fit))
    return math.ceil(2 * heads / math.ceil(2 * heads / most))


def layer_figures(replay: Replay, index: int) -> dict[str, Any]:
    """Measures losses and errors of the heads of a compressed layer, ready for JSON."""
    layer = replay.layers[index]
    damaged = {bits: stored(layer, Precision(bits, bits)) for bits in MEASURED_BITS}
    off = {bits: errors(layer, *tensors) for bits, tensors in damaged.items()}
    heads = layer.keys.shape[1]
    losses = _losses(replay, index, damaged[KEY_BITS][0], damaged[VALUE_BITS][1])
    return {
        "shape": [heads, layer.keys.shape[3], layer.values.shape[3]],
        "keys": losses[:heads],
        "values": losses[heads:],
        "key_errors": {str(bits): figures[0].tolist() for bits, figures in off.items()},
        "value_errors": {str(bits): figures[1].tolist() for bits, figures in off.items()},
    }


def _losses(replay: Replay, index: int, keys: Tensor, values: Tensor) -> list[float]:
    """Returns the KL with each single head's keys, then values, replaced by the given ones, [heads, tokens, dim]."""
    layer, found = replay.layers[index], []
    heads = keys.shape[0]
    for start in range(0, 2 * heads, replay.rows):
        parts = range(start, min(start + replay.rows, 2 * heads))
        exact = (layer.keys, layer.values)
        shown = [tensor.repeat(replay.rows, 1, 1, 1) for tensor in exact]
        for row, part in enumerate(parts):
            which, head = divmod(part, heads)
            shown[which][row, head] = (keys, values)[which][head]
        logits = replay.damaged(index, *shown)
        found += [mean_kl(replay.logits, replay.probabilities, logits[row]) for row, _ in enumerate(parts)]
    return found


def mean_kl(exact: Tensor, probabilities: Tensor, logits: Tensor) -> float:
    """Returns the mean KL, in nats, from the distribution of `exact` to that of `logits`, [positions, vocabulary] each.

    With d the difference of the logits less its mean under `probabilities`, the distribution of `exact`, KL is the log
    of the mean of exp(d) under `probabilities`. This form avoids cancellation for small losses.
    """
    change = logits - exact
    change = change - (probabilities * change).sum(-1, keepdim=True)
    return float(torch.log1p((probabilities * (torch.expm1(change) - change)).sum(-1)).mean())


def _summary(model: Any, documents: Sequence[Document], found: Sequence[dict[int, dict[str, Any]]]) -> Sensitivity:
    """Averages figures by layer over documents."""

    def curve(name: str) -> dict[int, float]:
        def of_document(layers: dict[int, dict[str, Any]], bits: int) -> float:
            each = [figure for figures in layers.values() for figure in figures[name][str(bits)]]
            return geometric_mean(torch.tensor(each))

        each = {bits: [math.log(of_document(layers, bits)) for layers in found] for bits in MEASURED_BITS}
        return {bits: math.exp(sum(logs) / len(logs)) for bits, logs in each.items()}

    def losses(name: str) -> tuple[tuple[float, ...], ...]:
        return mean_of([[figures[name] for figures in layers.values()] for layers in found])

    return Sensitivity(
        model_type=model.config.get_text_config(decoder=True).model_type,
        model_digest=model_digest(model),
        element_bytes=model.dtype.itemsize,
        shapes=tuple(tuple(figures["shape"]) for figures in found[0].values()),
        keys=losses("keys"),
        values=losses("values"),
        key_errors=curve("key_errors"),
        value_errors=curve("value_errors"),
        documents=len(documents),
        documents_digest=digest_of(documents),
        mark=mark_of(model),
    )
