"""A model's mark, which identifies it even after quantisation, merging of adapters or fine-tuning.

A mark consists of the model's type, its head shapes, and samples of its normalisation weights. Quantised copies keep
these weights, and fine-tuning barely changes them. Separately trained models have unrelated ones.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .weights import SAMPLES, samples_of

# largest distances between marks from rounding alone, and from fine-tuning (measurements: docs/calibration.md)
SAME, RELATIVE = 0.005, 0.2
# a weight whose spread is below this share of its norm counts as constant, as all do in an untrained model
FLAT = 1 / 64
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Mark:
    """Samples of a model's normalisation weights.

    Attributes:
        kind: digest of the model's type, its head shapes, and the names and shapes of these weights, 16 hexadecimal
            digits.
        samples: little-endian bfloat16 [weights, SAMPLES], in the order of the weights' names.

    Raises:
        ValueError: the samples have the wrong size.
    """

    kind: str
    samples: bytes

    def __post_init__(self) -> None:
        if not self.samples or len(self.samples) % (SAMPLES * ELEMENT_BYTES):
            raise ValueError(f"the samples of a mark must be {SAMPLES} for each weight.")

    @classmethod
    def of(cls, model_config: Any, norms: Mapping[str, Any]) -> Mark | None:
        """Computes the mark of a model.

        Args:
            norms: normalisation weights by name (`heads.weights.norms_of`), with data.

        Returns:
            The mark; None if fewer than half of these weights vary, too few to tell models apart.
        """
        import torch

        if not norms:
            return None
        names = sorted(norms)
        samples = torch.stack([samples_of(norms[name], SAMPLES) for name in names]).to(torch.bfloat16)
        if not samples.isfinite().all() or 2 * int(_varies(samples.float()).sum()) < len(names):
            return None
        shapes = [[name, *norms[name].shape] for name in names]
        text = json.dumps([*_heads_of(model_config.get_text_config(decoder=True)), shapes])
        kind = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(kind, samples.view(torch.int16).numpy().astype("<i2").tobytes())

    def distance(self, other: Mark) -> float:
        """Returns the distance between two marks.

        It is 0 for equal marks, about 1.4 for separately trained models, and infinite for different kinds. It is the
        root mean square, over all weights, of |a - b| / s, with s the larger of both norms about the mean. An angle
        would not do, as it is always small if all weights are positive, as in most models.
        """
        if self == other:
            return 0.0
        if self.kind != other.kind or len(self.samples) != len(other.samples):
            return math.inf
        own, others = self._tensor(), other._tensor()
        counts = _varies(own) | _varies(others)
        spread = _spread(own).maximum(_spread(others))
        shares = ((own - others).norm(dim=1) / spread)[counts]
        return float(shares.square().mean().sqrt())

    def to_dict(self) -> dict[str, str]:
        """Returns plain values for JSON."""
        return {"kind": self.kind, "samples": base64.b64encode(self.samples).decode()}

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Mark:
        """Builds a mark from the values of `to_dict`. Raises `ValueError` for other values."""
        try:
            return cls(values["kind"], base64.b64decode(values["samples"], validate=True))
        except (KeyError, TypeError, binascii.Error) as error:
            raise ValueError(f"this is not the mark of a model: {error}.") from error

    def _tensor(self) -> Any:
        """Returns the samples as float32 [weights, SAMPLES]."""
        import numpy
        import torch

        bits = numpy.frombuffer(self.samples, "<i2").astype("i2")
        return torch.from_numpy(bits).view(torch.bfloat16).float().reshape(-1, SAMPLES)


def _spread(samples: Any) -> Any:
    return (samples - samples.mean(dim=1, keepdim=True)).norm(dim=1)


def _varies(samples: Any) -> Any:
    """Returns which weights are not constant, bool [weights]."""
    return _spread(samples) > FLAT * samples.norm(dim=1)


def _heads_of(text_config: Any) -> list[Any]:
    """Returns a model's type, number of layers and head shapes."""
    query_heads = getattr(text_config, "num_attention_heads", None)
    heads = getattr(text_config, "num_key_value_heads", None) or query_heads
    dim = getattr(text_config, "head_dim", None)
    if dim is None and query_heads:
        dim = text_config.hidden_size // query_heads
    found = [text_config.model_type, getattr(text_config, "num_hidden_layers", None), query_heads, heads, dim]
    # some configurations have lists or values of custom classes
    return [value if isinstance(value, (int, str, type(None))) else str(value) for value in found]
