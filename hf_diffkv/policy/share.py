"""A fixed share of each head's tokens is high, by rank: exact at prompts, followed by a threshold while generating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..pages import LOW_LEVEL
from .base import ForwardRows, Levels, Policy, StepRows, Tokens, levels_of, option
from .ranking import HASHES, least_in_rows, rank_in_rows, share_of, token_hash

# an error of 1 is so large a part of the tokens, and a token
BAND = 0.02
# what an error of 1 does to the logarithm of a threshold: at once, and at every step that it lasts
AT_ONCE, PER_STEP = 4.0, 0.1
LARGEST_ERROR = 2.0
LEAST_ALPHA, GREATEST_ALPHA = 1e-6, 1e6


@dataclass(frozen=True)
class Share(Policy):
    """`prune` of a head's tokens outside the window are pruned, of the others `share` are high and the rest low.

    After a prompt the numbers are exact: the most significant are high, the least significant pruned. Stored low tokens
    cannot rise in a later turn; the most significant others take the high places then. While generating, each row's
    thresholds are controlled by its counts: both rise while there are too many tokens above them and fall while there
    are too few, in proportion to the error and to its sum over the steps; Algorithm 1 does the rest.

    Args:
        share: of the tokens that are kept.
        prune: of all tokens outside the window.
        by: what ranks them. "contribution" is significance times the norm of the value, at prompts; while generating,
            significance alone, as norms are not stored. "random" draws tokens (by seed, layer, head and position), and
            generated ones with these shares as probabilities.
        seed: for "random".
    """

    share: float = option(0.25, least=0, most=1)
    prune: float = option(0.0, least=0, most=1)
    by: str = option("significance", among=("significance", "contribution", "random"))
    seed: int = option(0, least=0)

    @property
    def by_alphas(self) -> bool:
        return self.by != "random"

    @property
    def adapts(self) -> bool:
        return self.by != "random"

    @property
    def needs_value_norm(self) -> bool:
        return self.by == "contribution"

    def first_alphas(self, alpha_high: Any, alpha_low: Any) -> tuple[Any, Any]:
        return 1.0, 0.1 if self.prune else 0.0

    def has_low(self, alpha_high: Tensor, alpha_low: Tensor) -> Tensor:
        return torch.ones_like(alpha_high, dtype=torch.bool)

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        count = rows.length.numel()
        key = self._key(tokens, rows)
        rank, present = rank_in_rows(tokens.row, key, tokens.position, count)
        kept = rank < (rows.outside - share_of(rows.outside, self.prune))[tokens.row]
        may_rise = kept & (tokens.level != LOW_LEVEL)
        first, _ = rank_in_rows(tokens.row[may_rise], key[may_rise], tokens.position[may_rise], count)
        quota = share_of(torch.bincount(tokens.row[kept], minlength=count), self.share)
        high = torch.zeros_like(kept)
        high[may_rise] = first < quota[tokens.row[may_rise]]
        alpha_high = _relative_cut(tokens, rows, high, rows.alpha_high)
        alpha_low = _relative_cut(tokens, rows, kept, rows.alpha_low) if self.prune else None
        return Levels(levels_of(high, kept), alpha_high, alpha_low)

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        if self.by == "random":
            return self._drawn(rows)
        tokens = rows.length.float()
        high_error, low_error = self._errors(rows)
        low = rows.alpha_low / tokens
        low = low * torch.exp(AT_ONCE * low_error) if self.prune else low
        if self.share == 1:
            return low, low
        high = rows.alpha_high * torch.exp(AT_ONCE * high_error) / tokens
        high = torch.full_like(high, torch.inf) if self.share == 0 else high
        return high, torch.minimum(low, high)

    def adapted(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        high, low = (
            (alpha * torch.exp(PER_STEP * error)).clamp(LEAST_ALPHA, GREATEST_ALPHA)
            for alpha, error in zip((rows.alpha_high, rows.alpha_low), self._errors(rows))
        )
        return high, low if self.prune else rows.alpha_low

    def _errors(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """By how much there are too many high tokens, and too many at all, float32 [layers, batch, heads]."""
        kept = (rows.high_count + rows.low_count).float()
        wanted = (1 - self.prune) * rows.outside.float()
        high, every = (
            ((have - want) / (BAND * of + 1)).clamp(-LARGEST_ERROR, LARGEST_ERROR)
            for have, want, of in ((rows.high_count, self.share * kept, kept), (kept, wanted, wanted))
        )
        return high, every

    def _key(self, tokens: Tokens, rows: ForwardRows) -> Tensor:
        """What ranks tokens, [n]."""
        if self.by == "random":
            return token_hash(self.seed, rows.layer, rows.head[tokens.row], tokens.position)
        return tokens.mean * cast(Tensor, tokens.value_norm) if self.by == "contribution" else tokens.mean

    def _drawn(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """The greatest hashes are high and the least are pruned, as at prompts."""
        drawn = token_hash(self.seed, rows.layer, rows.head, rows.candidate)
        from_high, from_low = HASHES * (1 - self.share * (1 - self.prune)), HASHES * self.prune
        high, low = (torch.where(drawn >= start, 0.0, torch.inf) for start in (from_high, from_low))
        return high, low


def _relative_cut(tokens: Tokens, rows: ForwardRows, above: Tensor, otherwise: Tensor) -> Tensor:
    """Relative significance of the least significant token `above` (bool [n]), float32 [rows]."""
    cut = least_in_rows(tokens.mean, tokens.row, above, rows.length.numel()) * rows.length
    return torch.where(cut.isfinite(), cut.clamp(LEAST_ALPHA, GREATEST_ALPHA), otherwise)
