"""Arguments of the ops that store a prompt with kernels: its new tokens, and the form in which they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..rotation import NO_ROTATION, Rotation


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """New tokens of every request.

    Attributes:
        key, value: key and value states of the model, [batch, heads, tokens, dim].
        rank: number of real tokens before each, int32 [batch, tokens], -1 for padding; None if all are real.
        count: number of real tokens, int64 [batch]; None if `rank` is.
    """

    key: Tensor
    value: Tensor
    rank: Tensor | None = None
    count: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """Form in which a layer stores its new tokens.

    Attributes:
        window: tokens that a window holds, not counting sinks.
        limit: largest magnitude of a stored element; with a rotation, largest norm of a token.
        rotation: rotations of keys and values.
        centers: whether to fix the offset of rows whose first token leaves the window (store/transform.py).
        feedback: matrices that quantised keys are rounded by (ops/rounding), [batch * heads, key_dim, key_dim]; None
            rounds each element to the nearest code.
    """

    window: int
    limit: float
    rotation: Rotation = NO_ROTATION
    centers: bool = False
    feedback: Tensor | None = None
