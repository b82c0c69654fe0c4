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
    """The tokens of one layer that are levelled after a forward of several tokens, in no particular order.

    Attributes:
        row: int64 [n]; a row is one request and KV head.
        mean: float32 [n], mean significance.
        position: int64 [n], index among the request's real tokens.
        level: int8 [n], `HIGH_LEVEL` or `LOW_LEVEL` where it is stored, `WINDOW_LEVEL` where it is exact until now.
    """

    row: Tensor
    mean: Tensor
    position: Tensor
    level: Tensor

    def select(self, chosen: Tensor) -> Tokens:
        """Returns the tokens of a bool [n]."""
        return Tokens(*(part[chosen] for part in self))


class ForwardRows(NamedTuple):
    """The rows of one layer after a forward of several tokens.

    Attributes:
        layer: index of the layer among the model's compressed layers.
        num_layers: number of the model's compressed layers.
        length: int64 [rows], real tokens seen, N.
        outside: int64 [rows], number of them that are neither in the window nor sinks, pruned ones included.
        alpha_high, alpha_low: float32 [rows], the relative thresholds of the rows.
    """

    layer: int
    num_layers: int
    length: Tensor
    outside: Tensor
    alpha_high: Tensor
    alpha_low: Tensor


class Levels(NamedTuple):
    """What a policy decides for `Tokens`.

    Attributes:
        level: int8 [n], `PRUNED_LEVEL`, `LOW_LEVEL` or `HIGH_LEVEL`; above the level a token has, it keeps that.
        alpha_high, alpha_low: float32 [rows], the rows' relative thresholds from now on; None where they stay.
    """

    level: Tensor
    alpha_high: Tensor | None = None
    alpha_low: Tensor | None = None


class StepRows(NamedTuple):
    """All rows while a token of each leaves the window: [layers, batch, heads], or what broadcasts to it.

    Attributes:
        alpha_high, alpha_low: float32, the relative thresholds.
        length: int64 [layers, batch, 1], real tokens seen, N.
        candidate: int64 [layers, batch, 1], position of the token that leaves.
        sinks: int64 [layers, batch, 1], number of first tokens that are sinks.
        high_count, low_count: int32, tokens stored.
        layer: int64 [layers, 1, 1], as in `ForwardRows`.
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
        """int64 [layers, batch, 1], as in `ForwardRows`, without the candidate."""
        return self.candidate - self.sinks


def option(default: Any, *, least: float | None = None, most: float | None = None) -> Any:
    """Makes a field of a policy: an integer or a number, like its default.

    Args:
        least: lower bound of a number.
        most: upper bound of a number.
    """
    return dataclasses.field(default=default, metadata={"least": least, "most": most})


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies. A policy that overrides nothing decides by relative thresholds.

    Raises:
        ValueError: an option outside its range; the message names it.
    """

    # whether `levels` gives each token what its mean alone earns by `relative_thresholds`, and leaves the alphas
    by_thresholds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))

    @property
    def sets_thresholds(self) -> bool:
        """Whether `thresholds` is more than the rows' relative thresholds."""
        return type(self).thresholds is not Policy.thresholds

    def first_alphas(self, alpha_high: Any, alpha_low: Any) -> tuple[Any, Any]:
        """Returns the relative thresholds of an empty layer: one number each, or one per head.

        Args:
            alpha_high, alpha_low: the configuration's thresholds for the layer, in the same forms.
        """
        return 0.0, 0.0

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        """Decides the levels of one layer after a forward of several tokens; by default by relative thresholds."""
        high, low = relative_thresholds(rows)
        return Levels(levels_between(tokens.mean, high[tokens.row], low[tokens.row]))

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Returns the high and low thresholds of Algorithm 1 on mean significance, float32.

        Both broadcast to [layers, batch, heads], and the low one is nowhere above the high one. The host must not read
        anything back.
        """
        return relative_thresholds(rows)


def relative_thresholds(rows: ForwardRows | StepRows) -> tuple[Tensor, Tensor]:
    """alpha_high / N and alpha_low / N, float32."""
    tokens = rows.length.float()
    return rows.alpha_high / tokens, rows.alpha_low / tokens


def mean_significance(score: Tensor, position: Tensor, length: Tensor) -> Tensor:
    """Mean attention from later queries, float32: sum / (N - 1 - position). All arguments broadcast."""
    return score / (length - 1 - position).clamp(min=1).float()


def levels_of(high: Tensor, kept: Tensor) -> Tensor:
    """int8: high where `high`, else low where `kept`, else pruned."""
    return torch.where(high, HIGH_LEVEL, torch.where(kept, LOW_LEVEL, PRUNED_LEVEL)).to(torch.int8)


def levels_between(mean: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """int8: high from the threshold `high` on, low from `low` on, pruned below."""
    return levels_of(mean >= high, mean >= low)


def _checked(field: dataclasses.Field, value: Any) -> Any:
    least, most = (field.metadata[name] for name in ("least", "most"))
    default: Any = field.default
    kind, name = (numbers.Integral, "an integer") if isinstance(default, int) else (numbers.Real, "a number")
    fits = isinstance(value, kind) and not isinstance(value, bool)
    # a comparison with NaN is False
    if not (fits and (least is None or value >= least) and (most is None or value <= most)):
        bounds = f" of at least {least}" if most is None else f" between {least} and {most}"
        raise ValueError(f"policy_options: {field.name}={value!r} must be {name}{bounds}.")
    return type(default)(value)
