"""What each head's keys and values lose at few bits, measured one head at a time on a loaded model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..cache.diffkv_cache import DiffKVCache
from ..cache.resolve import config_of
from ..config import DiffKVConfig, Precision
from ..config.allocation import SENSITIVITY, fields_for
from ..config.diffkv_config import with_calibration
from ..config.sensitivity import KEY_BITS, MEASURED_FIELDS, VALUE_BITS, Sensitivity, mean_of
from ..evaluation.environment import describe_environment
from ..evaluation.errors import EvaluationError
from ..evaluation.records import Record, RunFolder
from ..evaluation.tasks import Document
from ..heads.recognition import mark_of
from ..heads.weights import model_digest
from .documents import DOCUMENT_LENGTH, POSITIONS, digest_of, documents_for
from .replay import Replay, in_float32, watching
from .stored import errors, geometric_mean, stored

# of both keys and values, for which errors are measured
MEASURED_BITS = (2, 3, 4, 5, 6, 8)
# of records of a run
METHOD = "heads"
# rows of a batch, and bytes of its logits, at most
MOST_ROWS, MOST_LOGIT_BYTES = 16, 1 << 29


def measure_heads(
    model: Any,
    tokenizer: Any,
    text: Iterable[str] | str | None = None,
    *,
    length: int = DOCUMENT_LENGTH,
    output: Path | str | None = None,
    quiet: bool = False,
) -> Sensitivity:
    """Runs the model on eight documents of text, recall and copying, once for each head's keys and values.

    A model in half precision computes in float32 meanwhile, which takes twice its memory.

    Args:
        model: a loaded decoder-only model; it is left as it was.
        tokenizer: its tokenizer.
        text: running text, instead of Python's documentation.
        length: tokens of a prompt.
        output: a folder that keeps what was measured of each document; one that is there is gone on with.
        quiet: no progress bar.

    Raises:
        ValueError: a text that is too short, prompts longer than the model takes, a folder of another run.
        UnsupportedModelError: a model that a `DiffKVCache` does not work with.
    """
    config_of(model)
    pieces = [text] if isinstance(text, str) else text
    documents = documents_for(tokenizer, pieces, length)
    layers = DiffKVCache(model).compressed_layers()
    if not layers:
        raise EvaluationError(f"{type(model).__name__} has no layers that are compressed.")
    _check_fit(model, documents)
    records = _Records(model, output)
    with tqdm(total=_work(len(layers)) * len(documents), disable=quiet or None, dynamic_ncols=True) as bar:
        bar.bar_format = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        for document in documents:
            bar.set_description(document.name)
            if records.of(document) is None:
                started = time.perf_counter()
                records.add(document, _measured(model, document, bar), time.perf_counter() - started)
            else:
                # is no measure of the time that others take
                bar.total -= _work(len(layers))
    return _summary(model, documents, [records.of(document) for document in documents])


def config_for(sensitivity: Sensitivity, target_ratio: float, **source: Any) -> DiffKVConfig:
    """A configuration whose heads have the precisions of least predicted loss within a ratio.

    Args:
        target_ratio: as of `DiffKVConfig.with_ratio`, which the result can have other ratios by.
        source: what else its `calibration` is to say.

    Raises:
        ValueError: a ratio that cannot be met.
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


class _Records:
    """What was measured of documents, in a folder or in memory alone."""

    def __init__(self, model: Any, output: Path | str | None) -> None:
        self._environment = describe_environment(model.device)
        settings = {"model": model_digest(model), "dtype": str(model.dtype).removeprefix("torch.")}
        self._folder = None if output is None else RunFolder(Path(output) / METHOD, settings)
        held = [] if self._folder is None else self._folder.records()
        self._found = {(record.document, record.digest): record.details for record in held}

    def of(self, document: Document) -> dict[str, Any] | None:
        return self._found.get((document.name, document.digest))

    def add(self, document: Document, details: dict[str, Any], seconds: float) -> None:
        key = (document.name, document.digest)
        self._found[key] = details
        if self._folder is not None:
            options = {"seconds": seconds, "details": details, "environment": self._environment}
            self._folder.add(Record(METHOD, METHOD, *key, **options))


def _work(layers: int) -> int:
    """How many layers run in all, from each on."""
    return layers * (layers + 1) // 2


@torch.no_grad()
def _measured(model: Any, document: Document, bar: tqdm) -> dict[str, Any]:
    """Losses by layer and head, shapes, and errors by bits, ready for JSON."""
    with in_float32(model), watching(model):
        text_config = model.config.get_text_config(decoder=True)
        positions = document.extra[POSITIONS]
        rows = _rows(text_config, len(positions))
        replay = Replay(model, document.context, document.continuation, positions, rows)
        found: dict[str, Any] = {"keys": [], "values": [], "shapes": []}
        off: dict[str, dict[int, list[Tensor]]] = {
            name: {bits: [] for bits in MEASURED_BITS} for name in ("keys", "values")
        }
        for index, layer in enumerate(replay.layers):
            damaged = {bits: stored(layer, Precision(bits, bits)) for bits in MEASURED_BITS}
            for bits, tensors in damaged.items():
                for name, figures in zip(("keys", "values"), errors(layer, *tensors)):
                    off[name][bits].append(figures)
            losses = _losses(replay, index, damaged[KEY_BITS][0], damaged[VALUE_BITS][1])
            heads = layer.keys.shape[1]
            found["shapes"].append([heads, layer.keys.shape[3], layer.values.shape[3]])
            found["keys"].append(losses[:heads])
            found["values"].append(losses[heads:])
            bar.update(len(replay.layers) - index)
    for name, figures in off.items():
        found[f"{name}_errors"] = {str(bits): geometric_mean(torch.cat(each)) for bits, each in figures.items()}
    return found


def _rows(text_config: Any, positions: int) -> int:
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    fit = MOST_LOGIT_BYTES // (4 * positions * text_config.vocab_size)
    return max(1, min(2 * heads, MOST_ROWS, fit))


def _losses(replay: Replay, index: int, keys: Tensor, values: Tensor) -> list[float]:
    """KL where one head's keys, then one head's values, are those given: [heads, tokens, dim]."""
    layer, found = replay.layers[index], []
    heads = keys.shape[0]
    probabilities = replay.logits.softmax(-1)
    for start in range(0, 2 * heads, replay.rows):
        parts = range(start, min(start + replay.rows, 2 * heads))
        exact = (layer.keys, layer.values)
        shown = [tensor.repeat(replay.rows, 1, 1, 1) for tensor in exact]
        for row, part in enumerate(parts):
            which, head = divmod(part, heads)
            shown[which][row, head] = (keys, values)[which][head]
        logits = replay.damaged(index, *shown)
        found += [mean_kl(replay.logits, probabilities, logits[row]) for row, _ in enumerate(parts)]
    return found


def mean_kl(exact: Tensor, probabilities: Tensor, logits: Tensor) -> float:
    """Mean KL, in nats, from the distribution of logits `exact` to that of `logits`, [positions, vocabulary] each.

    The log of the mean of exp(d) over `probabilities`, those of `exact`, for what logits differ by, d, less its mean:
    small losses are not what is left of large numbers then.
    """
    change = logits - exact
    change = change - (probabilities * change).sum(-1, keepdim=True)
    return float(torch.log1p((probabilities * (torch.expm1(change) - change)).sum(-1)).mean())


def _summary(model: Any, documents: Sequence[Document], measured: Sequence[dict[str, Any]]) -> Sensitivity:
    def curve(name: str) -> dict[int, float]:
        logs = {bits: [math.log(each[f"{name}_errors"][str(bits)]) for each in measured] for bits in MEASURED_BITS}
        return {bits: math.exp(sum(figures) / len(figures)) for bits, figures in logs.items()}

    return Sensitivity(
        model_type=model.config.get_text_config(decoder=True).model_type,
        model_digest=model_digest(model),
        element_bytes=model.dtype.itemsize,
        shapes=tuple(tuple(shape) for shape in measured[0]["shapes"]),
        keys=mean_of([each["keys"] for each in measured]),
        values=mean_of([each["values"] for each in measured]),
        key_errors=curve("keys"),
        value_errors=curve("values"),
        documents=len(documents),
        documents_digest=digest_of(documents),
        mark=mark_of(model),
    )
