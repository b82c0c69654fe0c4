"""What a policy is: significance and lengths in, levels and thresholds out.

A policy is a file of this folder with one frozen dataclass that extends `Policy`. The file's name is the policy's name,
the fields, made with `option`, are its options.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
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
        value_norm: float32 [n], L2 norm of the value; None unless the policy's `needs_value_norm`.
    """

    row: Tensor
    mean: Tensor
    position: Tensor
    level: Tensor
    value_norm: Tensor | None = None

    def select(self, chosen: Tensor) -> Tokens:
        """Those of a bool [n]."""
        norm = None if self.value_norm is None else self.value_norm[chosen]
        return Tokens(self.row[chosen], self.mean[chosen], self.position[chosen], self.level[chosen], norm)


class ForwardRows(NamedTuple):
    """The rows of one layer after a forward of several tokens.

    Attributes:
        layer, num_layers: index of the layer among the model's compressed layers, and how many there are.
        head: int64 [rows], index of the KV head in the model.
        length: int64 [rows], real tokens seen, N.
        outside: int64 [rows], how many of them are neither in the window nor sinks, pruned ones included.
        alpha_high, alpha_low: float32 [rows], the relative thresholds of the rows.
    """

    layer: int
    num_layers: int
    head: Tensor
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
        sinks: int64 [layers, batch, 1], as many first tokens are sinks.
        high_count, low_count: int32, tokens stored.
        layer: int64 [layers, 1, 1] and head: int64 [heads], as in `ForwardRows`.
        least_mean: gives the least mean significance of each row's high tokens, float32, +inf where there are none.
    """

    alpha_high: Tensor
    alpha_low: Tensor
    length: Tensor
    candidate: Tensor
    sinks: Tensor
    high_count: Tensor
    low_count: Tensor
    layer: Tensor
    head: Tensor
    least_mean: Callable[[], Tensor]

    @property
    def outside(self) -> Tensor:
        """int64 [layers, batch, 1], as in `ForwardRows`, without the candidate."""
        return self.candidate - self.sinks


def option(default: Any, *, least: float | None = None, most: float | None = None, among: tuple = ()) -> Any:
    """A field of a policy: a whole number, a number, a bool or a string, as its default is.

    Args:
        least, most: bounds of numbers. among: what strings are allowed.
    """
    return dataclasses.field(default=default, metadata={"least": least, "most": most, "among": among})


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies. Everything has a default: of a policy that says nothing else, relative thresholds decide.

    Raises:
        ValueError: an option outside its range; the message names it.
    """

    # last queries of a prompt that give significance, where `DiffKVConfig.observation_window` says nothing
    observation_window: ClassVar[int | None] = None
    # whether any token is ever low
    two_levels: ClassVar[bool] = True
    # whether `levels` gives each token what its mean alone earns by `relative_thresholds`, and leaves the alphas
    by_thresholds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field, getattr(self, field.name)))

    @property
    def by_alphas(self) -> bool:
        """Whether `thresholds` goes by alpha_high and alpha_low; where not, what it gives is raised to alpha / N."""
        return True

    @property
    def adapts(self) -> bool:
        """Whether `adapted` is to be called."""
        return False

    @property
    def needs_value_norm(self) -> bool:
        """Whether `levels` reads `Tokens.value_norm`."""
        return False

    def first_alphas(self, alpha_high: Any, alpha_low: Any) -> tuple[Any, Any]:
        """Relative thresholds of a layer that is still empty: one number, or one per head.

        Args:
            alpha_high, alpha_low: what the user's configuration says for the layer, in the same forms.
        """
        return 0.0, 0.0

    def has_low(self, alpha_high: Tensor, alpha_low: Tensor) -> Tensor:
        """bool, of the arguments' shape: where generated tokens may reach the low level before the next prompt."""
        return alpha_low < alpha_high

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        """Levels after a forward of several tokens, in one layer: by default those of the relative thresholds."""
        high, low = relative_thresholds(rows)
        return Levels(levels_between(tokens.mean, high[tokens.row], low[tokens.row]))

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Thresholds of Algorithm 1 on mean significance, float32 that broadcasts to [layers, batch, heads]: high, low.

        The low one is nowhere above the high one. Nothing may be read back to the host.
        """
        return relative_thresholds(rows)

    def adapted(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """alpha_high and alpha_low after the candidate went its way; they become those of rows that had one."""
        raise NotImplementedError


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


def keep_high(kept: Tensor) -> Levels:
    """Everything that is `kept` (bool [n]) is high, the rest is pruned."""
    return Levels(torch.where(kept, HIGH_LEVEL, PRUNED_LEVEL).to(torch.int8))


def _checked(field: dataclasses.Field, value: Any) -> Any:
    least, most, among = (field.metadata[name] for name in ("least", "most", "among"))
    default: Any = field.default
    if isinstance(default, str):
        if value not in among:
            raise ValueError(f"policy_options: {field.name}={value!r} is unknown; use one of {list(among)}.")
        return value
    kind, name = (numbers.Integral, "an integer") if isinstance(default, int) else (numbers.Real, "a number")
    fits = isinstance(value, kind) and not isinstance(value, bool)
    # a comparison with NaN is False
    if not (fits and (least is None or value >= least) and (most is None or value <= most)):
        bounds = f" of at least {least}" if most is None else f" between {least} and {most}"
        raise ValueError(f"policy_options: {field.name}={value!r} must be {name}{bounds}.")
    return type(default)(value)
