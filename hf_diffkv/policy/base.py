"""The base class of policies: significance and lengths in, levels and thresholds out.

A policy is a frozen dataclass that extends `Policy`; its fields, made with `option`, are the policy's options.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..pages import HIGH_LEVEL, LOW_LEVEL, PRUNED_LEVEL


class Tokens(NamedTuple):
    """Tokens of one layer whose levels are decided after a forward of several tokens, in no particular order.

    Attributes:
        row: row of each token, int64 [n]; a row is one request and KV head.
        mean: mean significance, float32 [n].
        position: index among the request's real tokens, int64 [n].
        level: current level, int8 [n]: `HIGH_LEVEL` or `LOW_LEVEL` for stored tokens, `WINDOW_LEVEL` for exact ones.
    """

    row: Tensor
    mean: Tensor
    position: Tensor
    level: Tensor

    def select(self, chosen: Tensor) -> Tokens:
        """Returns the tokens that `chosen`, bool [n], marks."""
        return Tokens(*(part[chosen] for part in self))


class ForwardRows(NamedTuple):
    """The rows of one layer after a forward of several tokens.

    Attributes:
        layer: index of the layer among the model's compressed layers.
        num_layers: number of the model's compressed layers.
        length: real tokens seen, N, int64 [rows].
        outside: real tokens seen that are neither in the window nor sinks, pruned ones included, int64 [rows].
        alpha_high, alpha_low: relative thresholds, float32 [rows].
    """

    layer: int
    num_layers: int
    length: Tensor
    outside: Tensor
    alpha_high: Tensor
    alpha_low: Tensor


class Levels(NamedTuple):
    """A policy's decision for `Tokens`.

    Attributes:
        level: new level, int8 [n]: `PRUNED_LEVEL`, `LOW_LEVEL` or `HIGH_LEVEL`. A token is never promoted: it keeps its
            current level if the new one is higher.
        alpha_high, alpha_low: new relative thresholds, float32 [rows]; None leaves them unchanged.
    """

    level: Tensor
    alpha_high: Tensor | None = None
    alpha_low: Tensor | None = None


class StepRows(NamedTuple):
    """All rows in a decode step, in which one token of each leaves the window.

    All tensors are [layers, batch, heads] or broadcast to it.

    Attributes:
        alpha_high, alpha_low: relative thresholds, float32.
        length: real tokens seen, N, int64 [layers, batch, 1].
        candidate: position of the token that leaves the window, int64 [layers, batch, 1].
        sinks: number of leading tokens that are sinks, int64 [layers, batch, 1].
        high_count, low_count: tokens stored at each level, int32.
        layer: index of the layer among the model's compressed layers, int64 [layers, 1, 1].
    """

    alpha_high: Tensor
    alpha_low: Tensor
    length: Tensor
    candidate: Tensor
    sinks: Tensor
    high_count: Tensor
    low_count: Tensor
    layer: Tensor

    @property
    def outside(self) -> Tensor:
        """Real tokens neither in the window nor sinks, without the candidate, int64 [layers, batch, 1]."""
        return self.candidate - self.sinks


def option(default: Any, *, least: float | None = None, most: float | None = None) -> Any:
    """Creates a field of a policy: an integer if its default is one, otherwise a number.

    Args:
        default: default value.
        least: lower bound, inclusive; None for none.
        most: upper bound, inclusive; None for none.
    """
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base class of all policies. A policy that overrides nothing decides by relative thresholds.

    Raises:
        ValueError: an option is outside its range; the message names it.
    """

    # whether `levels` compares each token's mean with `relative_thresholds` alone and leaves the alphas unchanged
    by_thresholds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))

    @property
    def sets_thresholds(self) -> bool:
        """Whether the policy overrides `thresholds`."""
        return type(self).thresholds is not Policy.thresholds

    def first_alphas(self, alpha_high: Any, alpha_low: Any) -> tuple[Any, Any]:
        """Returns the relative thresholds of an empty layer, one number or one per head.

        Args:
            alpha_high, alpha_low: thresholds of the layer in the configuration, one number or one per head.
        """
        return 0.0, 0.0

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        """Decides the levels of one layer's tokens after a forward of several tokens.

        The default decides by relative thresholds.
        """
        high, low = relative_thresholds(rows)
        return Levels(levels_between(tokens.mean, high[tokens.row], low[tokens.row]))

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Returns the high and the low threshold of Algorithm 1 on mean significance, float32.

        Both broadcast to [layers, batch, heads]. The low one must never exceed the high one. The implementation must
        not read anything back to the host.
        """
        return relative_thresholds(rows)


def relative_thresholds(rows: ForwardRows | StepRows) -> tuple[Tensor, Tensor]:
    """Returns alpha_high / N and alpha_low / N, float32."""
    tokens = rows.length.float()
    return rows.alpha_high / tokens, rows.alpha_low / tokens


def mean_significance(score: Tensor, position: Tensor, length: Tensor) -> Tensor:
    """Returns the mean attention from later queries, sum / (N - 1 - position), float32.

    Args:
        score: sum of the attention received, float32.
        position: index among the request's real tokens, int, broadcastable to `score`.
        length: real tokens seen, N, int, broadcastable to `score`.
    """
    return score / (length - 1 - position).clamp(min=1).float()


def levels_of(high: Tensor, kept: Tensor) -> Tensor:
    """Returns levels, int8: high where `high`, otherwise low where `kept`, otherwise pruned."""
    return torch.where(high, HIGH_LEVEL, torch.where(kept, LOW_LEVEL, PRUNED_LEVEL)).to(torch.int8)


def levels_between(mean: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Returns levels, int8: high if the mean is at least `high`, low if it is at least `low`, otherwise pruned."""
    return levels_of(mean >= high, mean >= low)


def _checked(field: dataclasses.Field, value: Any) -> Any:
    least, most = (field.metadata[name] for name in ("least", "most"))
    default: Any = field.default
    kind, name = (numbers.Integral, "an integer") if isinstance(default, int) else (numbers.Real, "a number")
    fits = isinstance(value, kind) and not isinstance(value, bool)
    # NaN fails every comparison and is refused
    if not (fits and (least is None or value >= least) and (most is None or value <= most)):
        bounds = f" of at least {least}" if most is None else f" between {least} and {most}"
        raise ValueError(f"policy_options: {field.name}={value!r} must be {name}{bounds}.")
    return type(default)(value)
