"""Measures, on a loaded model, the loss from storing each head's keys and values at few bits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from .kept import Kept
from .progress import Progress
from .queries import QuerySums
from .replay import Damage, Replay
from .stored import errors, geometric_mean, stored
from .watched import in_float32, watching

# bits of keys and of values at which errors are measured
MEASURED_BITS = (2, 3, 4, 5, 6, 8)
# upper bounds on the tokens of a batch, all rows together, and on the bytes of its logits
MOST_TOKENS, MOST_LOGIT_BYTES = 1024, 1 << 29


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
        joins = None
        for document, (of_prompt, *of_layers) in zip(left, work):
            progress.begin(document.name)
            replay = Replay(model, document.context, document.continuation, document.extra[POSITIONS], joins)
            joins = replay.joins
            if not sums.has(document):
                sums.add(document, replay.layers)
            progress.advance(of_prompt)
            missing = kept.missing(document, layers)
            remaining, started = dict(zip(missing, of_layers)), time.perf_counter()
            for batch in figures_of(replay, missing):
                seconds = (time.perf_counter() - started) / len(batch)
                for layer, figures in batch.items():
                    kept.add(document, layer, figures, seconds)
                progress.advance(sum(remaining[layer] for layer in batch))
                progress.estimate()
                started = time.perf_counter()
            progress.end()


def _work(document: Document, missing: Sequence[int], layers: int, heads: int) -> list[int]:
    """Returns the work in tokens times layers: for the prompt, then for each missing layer with all later ones."""
    following = 2 * heads * len(document.continuation)
    return [len(document.context) * layers, *(following * (layers - layer) for layer in missing)]


def figures_of(replay: Replay, layers: Sequence[int]) -> Iterator[dict[int, dict[str, Any]]]:
    """Measures losses and errors of the heads of compressed layers.

    Yields:
        For each batch of layers its figures by layer, ready for JSON.
    """
    pending: list[DamagedLayer] = []
    for index in layers:
        pending.append(DamagedLayer.of(replay, index))
        parts = sum(layer.parts for layer in pending)
        if not replay.joins or parts + pending[-1].parts > _most_rows(replay):
            yield _measured(replay, pending)
            pending = []
    if pending:
        yield _measured(replay, pending)


@dataclass
class DamagedLayer:
    """A layer whose heads are to be damaged at few bits, one in each row.

    Attributes:
        index: index of the compressed layer.
        keys, values: keys and values stored at few bits, [heads, tokens, dim].
        figures: shape and errors of the layer's heads.
        losses: KL with each head's keys replaced, then with each head's values.
    """

    index: int
    keys: Tensor
    values: Tensor
    figures: dict[str, Any]
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, replay: Replay, index: int) -> DamagedLayer:
        """Stores a layer at each of `MEASURED_BITS`."""
        layer = replay.layers[index]
        damaged = {bits: stored(layer, Precision(bits, bits)) for bits in MEASURED_BITS}
        off = {bits: errors(layer, *tensors) for bits, tensors in damaged.items()}
        figures = {
            "shape": [layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]],
            "key_errors": {str(bits): each[0].tolist() for bits, each in off.items()},
            "value_errors": {str(bits): each[1].tolist() for bits, each in off.items()},
        }
        return cls(index, damaged[KEY_BITS][0], damaged[VALUE_BITS][1], figures)

    @property
    def parts(self) -> int:
        """Number of rows: one for each head's keys, and one for its values."""
        return 2 * self.keys.shape[0]

    def damage(self, replay: Replay, parts: range) -> Damage:
        """Returns the keys and values of the rows of `parts`."""
        heads, layer = self.keys.shape[0], replay.layers[self.index]
        shown = [tensor.repeat(len(parts), 1, 1, 1) for tensor in (layer.keys, layer.values)]
        for row, part in enumerate(parts):
            which, head = divmod(part, heads)
            shown[which][row, head] = (self.keys, self.values)[which][head]
        return Damage(self.index, *shown)

    def result(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        heads = self.keys.shape[0]
        return {**self.figures, "keys": self.losses[:heads], "values": self.losses[heads:]}


def _measured(replay: Replay, layers: Sequence[DamagedLayer]) -> dict[int, dict[str, Any]]:
    """Measures the losses of layers in as few batches as their rows need."""
    most = _most_rows(replay)
    rows = [(layer, part) for layer in layers for part in range(layer.parts)]
    for start in range(0, len(rows), most):
        batch = rows[start : start + most]
        parts = [(layer, [part for other, part in batch if other is layer]) for layer in layers]
        damages = [layer.damage(replay, range(of[0], of[-1] + 1)) for layer, of in parts if of]
        for (layer, _), logits in zip(batch, replay.damaged(damages)):
            layer.losses.append(mean_kl(replay.logits, replay.probabilities, logits))
    return {layer.index: layer.result() for layer in layers}


def _most_rows(replay: Replay) -> int:
    """Returns the rows of a batch at most."""
    positions, tokens = replay.logits.shape
    fit = min(MOST_TOKENS // replay.following.shape[1], MOST_LOGIT_BYTES // (4 * positions * tokens))
    return max(1, fit)


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
        latent=has_latents(model.config.get_text_config(decoder=True)),
    )
