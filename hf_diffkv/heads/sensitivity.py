"""`Sensitivity`: measured loss of each head at few bits, from which precisions are chosen. Uses no tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..precision import Precision
from ..replacing import save_text
from .mark import Mark
from .recognition import MARK_KEY

# bits at which heads are measured, one at a time
KEY_BITS, VALUE_BITS = 3, 2
# fields of the configuration with which heads are measured, and which their precisions assume
MEASURED_FIELDS = {"adaptive_rounding": True, "metadata_bits": 16, "window": 32}
DIGITS = 4


@dataclass(frozen=True)
class Sensitivity:
    """Loss from storing a single head's keys or values at few bits, and its decrease with more bits.

    Attributes:
        model_type: model type in the model's text configuration.
        model_digest: digest of the weights (`hf_diffkv.heads.weights.model_digest`).
        element_bytes: bytes of an element of the dtype the model was loaded in.
        shapes: number of KV heads, key_dim and value_dim of each compressed layer.
        keys, values: mean KL of the following tokens to the dense cache's, in nats, by compressed layer and KV head, if
            only this head's keys have `KEY_BITS` bits or only its values have `VALUE_BITS`.
        key_errors, value_errors: mean squared error of logits and of values over their mean square, by bits.
        documents: number of documents that the figures are averaged over.
        documents_digest: digest of the documents' tokens.
        mark: mark of the model, by which its copies and relatives are recognised; stored only by `save`.
        latent: whether the model caches latents, with rotary keys as keys, latents as values, and one row per layer.

    Raises:
        ValueError: figures do not match the layers and heads of `shapes`, or are negative or not finite, or
            `element_bytes` is not positive.
    """

    model_type: str
    model_digest: str
    element_bytes: int
    shapes: tuple[tuple[int, int, int], ...]
    keys: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]
    key_errors: Mapping[int, float]
    value_errors: Mapping[int, float]
    documents: int
    documents_digest: str
    mark: Mark | None = None
    latent: bool = False

    def __post_init__(self) -> None:
        if type(self.element_bytes) is not int or self.element_bytes < 1:
            raise ValueError(f"element_bytes={self.element_bytes!r} must be an int of at least 1.")
        heads = [shape[0] for shape in self.shapes]
        for name, figures in (("keys", self.keys), ("values", self.values)):
            if [len(layer) for layer in figures] != heads:
                raise ValueError(f"{name} must have a number for each of {heads} heads of the layers.")
            if not all(0 <= figure < math.inf for layer in figures for figure in layer):
                raise ValueError(f"{name} has a number below 0, or one that is not finite.")
        for name, errors, bits in (
            ("key_errors", self.key_errors, KEY_BITS),
            ("value_errors", self.value_errors, VALUE_BITS),
        ):
            if bits not in errors or not all(0 < error < math.inf for error in errors.values()):
                raise ValueError(f"{name} must have positive numbers by bits, {bits} among them.")

    def loss(self, layer: int, head: int, precision: Precision) -> float:
        """Predicts the KL of one head at a precision, by scaling its measured losses with the errors.

        Raises:
            ValueError: the bits or groups were not measured.
        """
        if (precision.k_groups, precision.v_groups) != (1, 1):
            raise ValueError(f"{precision} has groups, but what heads lose was measured without them.")
        parts = (
            (self.keys[layer][head], self.key_errors, precision.k_bits, KEY_BITS),
            (self.values[layer][head], self.value_errors, precision.v_bits, VALUE_BITS),
        )
        total = 0.0
        for measured, errors, bits, at in parts:
            if bits != 16 and bits not in errors:
                raise ValueError(
                    f"{precision.name}: {bits} bits were not measured; use some of {sorted(errors)} or 16."
                )
            total += 0.0 if bits == 16 else measured * errors[bits] / errors[at]
        return total

    def knows(self, precision: Precision) -> bool:
        """Returns whether the loss at a precision's bits is known because they were measured or are 16."""
        return precision.k_bits in {16, *self.key_errors} and precision.v_bits in {16, *self.value_errors}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, without the mark and rounded to four significant digits."""
        values = asdict(self)
        del values[MARK_KEY]
        if not self.latent:
            del values["latent"]
        for name in ("keys", "values"):
            values[name] = [[_rounded(figure) for figure in layer] for layer in values[name]]
        for name in ("key_errors", "value_errors"):
            values[name] = {str(bits): _rounded(error) for bits, error in sorted(values[name].items())}
        values["shapes"] = [list(shape) for shape in self.shapes]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sensitivity:
        """Builds a sensitivity from the values of `to_dict` or of a file. Raises `ValueError` for other values."""
        try:
            given = dict(values)
            if given.get(MARK_KEY) is not None:
                given[MARK_KEY] = Mark.from_dict(given[MARK_KEY])
            for name in ("shapes", "keys", "values"):
                given[name] = tuple(tuple(layer) for layer in given[name])
            for name in ("key_errors", "value_errors"):
                given[name] = {int(bits): float(error) for bits, error in given[name].items()}
            return cls(**given)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"these are not the losses of a model's heads: {error}.") from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file, with the mark if there is one. Raises `OSError`."""
        values = self.to_dict() | ({} if self.mark is None else {MARK_KEY: self.mark.to_dict()})
        save_text(json.dumps(values, sort_keys=True) + "\n", path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Sensitivity:
        """Reads a file that `save` wrote. Raises `ValueError` for other files, and `OSError`."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def mean_of(rows: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[float, ...], ...]:
    """Averages numbers over documents, for each layer and head."""
    return tuple(
        tuple(sum(figures) / len(rows) for figures in zip(*(document[layer] for document in rows)))
        for layer in range(len(rows[0]))
    )


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
