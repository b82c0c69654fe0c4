"""What a model's heads are predicted to lose over bytes: at a precision for each, and at one for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..precision import as_precision
from .allocation import HEAD_LADDER, SENSITIVITY, allocate, ratio_of
from .sensitivity import Sensitivity


@dataclass(frozen=True)
class Loss:
    """Predicted mean KL of following tokens to the dense cache's, in nats.

    Attributes:
        ratio: bytes of a stored token over those in the model's dtype, all compressed layers together, at most.
        each_head: with the precision for each head that `allocate` chooses.
        precision, one_for_all: of the ladder, the one of these bytes, and the loss where all heads have it.
    """

    ratio: float
    each_head: float
    precision: str | None = None
    one_for_all: float | None = None


def loss_curve(calibration: Mapping[str, Any], ratios: Iterable[float] = ()) -> tuple[Loss, ...]:
    """Losses by rising bytes, at the ratios of the ladder's precisions; empty where heads were not measured.

    Args:
        calibration: of a configuration.
        ratios: further ones.

    Raises:
        ValueError: a ratio that the smallest precision does not reach.
    """
    if SENSITIVITY not in calibration:
        return ()
    sensitivity = Sensitivity.from_dict(calibration[SENSITIVITY])
    uniform = {ratio_of(name, calibration): name for name in HEAD_LADDER}
    points = []
    for ratio in sorted({*uniform, *ratios}):
        name, loss = uniform.get(ratio), allocate(sensitivity, ratio).loss
        points.append(Loss(ratio, loss, name, None if name is None else _uniform_loss(sensitivity, name)))
    return tuple(points)


def _uniform_loss(sensitivity: Sensitivity, name: str) -> float:
    precision = as_precision("precision", name)
    return sum(
        sensitivity.loss(layer, head, precision)
        for layer, shape in enumerate(sensitivity.shapes)
        for head in range(shape[0])
    )
