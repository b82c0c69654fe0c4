"""What the ops that store a prompt by kernels take beside a layer's rows: its new tokens, and how they are held."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .rotation import Rotation


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """New tokens of every request.

    Attributes:
        key, value: of the model, [batch, heads, tokens, dim].
        rank: int32 [batch, tokens], how many real tokens come before each, -1 for padding; None where all are real.
        count: int64 [batch], real tokens; None with `rank`.
    """

    key: Tensor
    value: Tensor
    rank: Tensor | None = None
    count: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """How a layer holds its new tokens.

    Attributes:
        window: tokens that a window holds beside sinks.
        limit: magnitude up to which elements, as they are held, can be stored; rotated tokens by their norms.
        rotation: of keys and values on their way; None leaves channels as they are.
        centers: whether offsets are fixed where a row's first token leaves its window (store/forms.py).
        feedback: [batch * heads, key_dim, key_dim] that quantised keys are rounded with (ops/rounding); None rounds
            each element for itself.
    """

    window: int
    limit: float
    rotation: Rotation | None = None
    centers: bool = False
    feedback: Tensor | None = None

    @property
    def key_rotation(self) -> Tensor | None:
        """As `rotate` takes it."""
        return None if self.rotation is None else self.rotation.key

    @property
    def value_rotation(self) -> Tensor | None:
        """As `rotate` takes it."""
        return None if self.rotation is None else self.rotation.value
