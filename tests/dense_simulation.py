"""Dense simulation of DiffKV for one layer: the oracle the cache is tested against.

It keeps every token it has seen in plain dense tensors, together with a level per token, and applies the compression
rules by overwriting keys and values with their quantised-and-decoded versions. It has no pages, tables or kernels and
shares no code with the package, so that a mistake there cannot hide here. It runs on the CPU, wherever the inputs are.

Shapes: B rows, Hq query heads, H KV heads, G = Hq / H, Q new columns, S columns seen so far (padding included), D and
Dv head dims.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from simulated_storage import (
    SimPrecision,
    adapted_round_trip,
    inner_cells,
    inset_of,
    merged_cells,
    nearest_score,
    rotation,
    round_trip,
)
from torch import Tensor

PADDING, PRUNED, LOW, HIGH, WINDOW = -1, 0, 1, 2, 3


def level_of(mean: Tensor, threshold_low: Tensor, threshold_high: Tensor) -> Tensor:
    """The prompt rule: the level that a mean significance earns."""
    level = torch.where(mean >= threshold_high, HIGH, LOW)
    return torch.where(mean < threshold_low, PRUNED, level).to(torch.int8)


def algorithm_one(
    levels: Tensor, mean: Tensor, candidate: int, threshold_low: Tensor, threshold_high: Tensor
) -> list[tuple[int, int]]:
    """Level changes (token, new level), in order, when `candidate` leaves the window of one KV head.

    levels and mean are [S], oldest token first; the thresholds are scalars.
    """
    level = int(level_of(mean[candidate], threshold_low, threshold_high))
    changes = [(candidate, level)]
    if level == PRUNED:
        return changes
    # The newcomer competes as well: with a mean above its threshold it can be least, but then nothing happens.
    tier = levels == level
    tier[candidate] = True
    members = tier.nonzero().flatten()
    least = mean[members].min()
    victim = int(members[mean[members] == least][0])  # the oldest of equals
    earned = int(level_of(least, threshold_low, threshold_high))
    if earned < level:
        changes.append((victim, earned))
    return changes


@dataclass(frozen=True)
class Head:
    """All tokens of one KV head in one row of a batch.

    index: place among the row's real tokens [S], -1 for padding. level, mean: [S]. alpha_high,
    alpha_low: scalars that a rule may overwrite in place. sinks: number of first tokens that are sinks.
    """

    head: int
    n: int
    index: Tensor
    level: Tensor
    mean: Tensor
    alpha_high: Tensor
    alpha_low: Tensor
    sinks: int = 0

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """Low and high threshold on the mean, in float32."""
        n = torch.tensor(self.n, dtype=torch.float32)
        return self.alpha_low / n, self.alpha_high / n


class Rule:
    """Rule for the level of a token. This one is DiffKV's: alpha / N, and Algorithm 1."""

    def first(self, alpha_high: float | list[float], alpha_low: float | list[float]) -> tuple:
        """Returns alpha_high and alpha_low before any token, from those of the configuration."""
        return alpha_high, alpha_low

    def prompt(self, head: Head, members: Tensor, outside: int) -> Tensor:
        """Levels int8 [S], valid only for `members` (bool [S]), which are stored or leave the window.

        outside: real tokens that are then outside the window, including pruned ones.
        """
        return level_of(head.mean, *head.thresholds())

    def step(self, head: Head, candidate: int) -> list[tuple[int, int]]:
        """Level changes, in order, when `candidate` leaves the window."""
        return algorithm_one(head.level, head.mean, candidate, *head.thresholds())


class LayerSimulation:
    """One layer of DiffKV over all rows of a batch."""

    def __init__(
        self,
        batch_size: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        high: SimPrecision,
        low: SimPrecision,
        alpha_high: float | list[float],
        alpha_low: float | list[float],
        window: int = 64,
        sinks: int = 0,
        observation_window: int | None = None,
        dtype: torch.dtype = torch.float32,
        value_dim: int | None = None,
        rotate: bool = False,
        center: bool = False,
        rule: Rule | None = None,
        metadata_bits: int = 32,
        adaptive_rounding: bool = False,
        model_moment: Tensor | None = None,
    ) -> None:
        if window < 1 or (observation_window is not None and observation_window < 1):
            raise ValueError("window and observation_window start at 1")
        self.high, self.low = high, low
        self.narrow = metadata_bits == 16
        self._adapts = adaptive_rounding
        # [H, D, D] of R q, for which generated tokens are rounded undamped; None rounds them to the nearest code
        self._model_moment = model_moment
        # [B, H, D, D] and [1, H, D, D] of R q: of the last forward, and of all rows and prompts so far
        self._moment = torch.zeros(batch_size, num_key_value_heads, head_dim, head_dim, dtype=torch.float64)
        self._prompts = self._moment[:1]
        self._is_prompt = True
        # whether tokens are being lowered from one precision to another
        self._lowers = False
        # called with the sums where those of stored tokens are rounded at random; returns them rounded
        self.round_sums: Callable[[Tensor], Tensor] = lambda sums: sums
        self.rule = rule or Rule()
        alpha_high, alpha_low = self.rule.first(alpha_high, alpha_low)
        shape = (batch_size, num_key_value_heads)
        self.alpha_high = torch.as_tensor(alpha_high, dtype=torch.float32).expand(shape).clone()
        self.alpha_low = torch.as_tensor(alpha_low, dtype=torch.float32).expand(shape).clone()
        # whether a head's tokens may be stored at the high level first and at the low one later
        finite = (self.alpha_high > 0) & (self.alpha_high < torch.inf)
        selects = rule is not None or bool((finite | (self.alpha_low > 0)).any())
        self._demotes = selects and high != low
        self._is_inset = self.narrow and rotate
        if not ((self.alpha_low >= 0) & (self.alpha_low <= self.alpha_high)).all():
            raise ValueError("thresholds need 0 <= alpha_low <= alpha_high")
        self.window, self._all_sinks = window, sinks
        self._sinks = torch.full((batch_size,), sinks)  # tokens of each row with a smaller index are sinks
        self.observation_window = observation_window
        self.dtype = dtype
        self._transforms = rotate or center
        # whether queries and outputs have the model's dtype in the stored form; native steps round neither there
        self.rounds_rotated = True
        # rotating there and back must return the same numbers
        self.compute_dtype = torch.float64 if dtype == torch.float64 or self._transforms else torch.float32
        dims = (head_dim, value_dim or head_dim)
        self._rotations = [rotation(dim) if rotate else torch.eye(dim, dtype=torch.float64) for dim in dims]
        self._centers = center
        self._offset = torch.zeros(batch_size, num_key_value_heads, head_dim, dtype=torch.float64)  # R mu

        empty = (batch_size, num_key_value_heads, 0)
        self._keys = torch.zeros(*empty, head_dim, dtype=self.compute_dtype)
        self._values = torch.zeros(*empty, value_dim or head_dim, dtype=self.compute_dtype)
        self._levels = torch.zeros(empty, dtype=torch.int8)
        self._sums = torch.zeros(empty, dtype=torch.float32)
        self._index = torch.zeros(batch_size, 0, dtype=torch.int64)  # place among the row's real tokens, -1 for padding
        self._count = torch.zeros(batch_size, dtype=torch.int64)  # real tokens of each row, N

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Appends, attends, updates the sums and compresses.

        query [B, Hq, Q, D], key [B, H, Q, D], value [B, H, Q, Dv], valid [B, Q] bool (False is padding), sinks [Hq].
        Returns the output [B, Hq, Q, Dv] in the query's dtype; rows of padding queries are zero.
        """
        self.begin(key, value, valid)
        output = self.read(query, scaling, softcap, sinks)
        self.finish()
        return output

    def begin(self, key: Tensor, value: Tensor, valid: Tensor | None = None) -> None:
        """Appends new tokens; `read` and `finish` follow. Arguments as in `forward`."""
        rows, _, columns, _ = key.shape
        self._valid = torch.ones(rows, columns, dtype=torch.bool) if valid is None else valid.detach().cpu().bool()
        self._is_prompt = columns > 1 or self._levels.shape[-1] == 0
        self._has_past = bool(self._count.any())
        self._append(key.detach().cpu(), value.detach().cpu(), self._valid)
        if self._transforms:
            new = slice(self._keys.shape[2] - columns, None)
            # a first prompt is attended to as it is, later tokens in their stored form
            self._exact = self._keys[:, :, new].clone(), self._values[:, :, new].clone()
            if self._has_past:
                self._keep_new(columns)
        self._received = torch.zeros(self._sums.shape, dtype=self.compute_dtype)
        dim = key.shape[3]
        self._moment = torch.zeros(rows, key.shape[1], dim, dim, dtype=torch.float64)  # of R q

    def read(
        self, query: Tensor, scaling: float | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attends with one layer's queries of the newest n <= Q tokens, and returns their output.

        All layers that read the same tokens are one group: a token gets the maximum over the heads of all of them.
        """
        sinks = None if sinks is None else sinks.detach().cpu().to(self.compute_dtype)
        valid = self._valid[:, self._valid.shape[1] - query.shape[2] :]
        turned = (query.detach().cpu().double() * valid[:, None, :, None]) @ self._rotations[0].T
        turned = turned.unflatten(1, (self._keys.shape[1], -1)).flatten(2, 3)
        self._moment += turned.mT @ turned
        given, rounded = query.detach().cpu().to(self.compute_dtype), self._transforms and self._has_past
        rounded &= self.rounds_rotated
        if softcap is not None or sinks is not None:
            self._centers = False
        if rounded:
            given = self._from_kept(self._to_kept(given, 0), 0)
        probabilities = self._attend(given, valid, scaling, softcap, sinks)
        self._received = torch.maximum(self._received, self._significance(probabilities))
        # Taken before compression: a step reads what was stored when it began.
        output = (probabilities @ self._values.unsqueeze(2)).flatten(1, 2)
        if rounded:
            output = self._from_kept(self._to_kept(output, 1), 1)
        return output.to(dtype=query.dtype, device=query.device)

    def finish(self) -> None:
        """Updates the sums and compresses."""
        self._sums += self._received.to(torch.float32)
        if self._is_prompt:
            self._prompts = self._prompts + self._moment.sum(0, keepdim=True)
            if self._transforms:
                self._fix_offsets(*self._exact)
            self._compress_prompt()
            self._sums = self.round_sums(self._sums)
        else:
            self._sums = self.round_sums(self._sums)
            if self._transforms:
                self._fix_offsets()
            self._compress_generation()

    def hide(self, shown: Tensor) -> None:
        """Turns real tokens that are not shown (bool [B, S]) into padding; the means of the others stay."""
        shown = shown & (self._index >= 0)
        index = torch.where(shown, shown.cumsum(-1) - 1, -1)
        count = shown.sum(-1)
        before, after = self._count[:, None] - 1 - self._index, count[:, None] - 1 - index
        share = after.clamp(min=0).float() / before.clamp(min=1).float()
        self._sums = torch.where(shown[:, None], self._sums * share[:, None], 0)
        self._keys, self._values = (torch.where(shown[:, None, :, None], x, 0) for x in (self._keys, self._values))
        self._levels = torch.where(shown[:, None], self._levels, PADDING)
        self._sinks = torch.minimum(self._sinks, (shown & (self._index < self._sinks[:, None])).sum(-1))
        self._index, self._count = index, count
        # if everything is exact, the first tokens are sinks again
        left = ((index >= 0)[:, None] & (self._levels < WINDOW)).any(-1).any(-1)
        self._sinks = torch.where(left, self._sinks, self._all_sinks)

    def lower(self, row: int, head: int) -> None:
        """Stores all high tokens of one head at the low level, from their current values, and later ones too."""
        self.alpha_high[row, head] = torch.inf
        last = self._moment, self._is_prompt
        # rounded for the queries of all prompts of all rows, unless the model's own are known
        self._moment, self._is_prompt = self._prompts.expand_as(self._moment), self._model_moment is None
        self._lowers = True
        self._store(row, head, (self._levels[row, head] == HIGH).nonzero().flatten(), LOW)
        self._lowers = False
        self._moment, self._is_prompt = last

    def begin_stage(self, low: SimPrecision) -> None:
        """Makes the low precision the high one, and sets a new low one; no token may be high."""
        if (self._levels == HIGH).any():
            raise ValueError("tokens are left at the high level")
        self.high, self.low = self.low, low
        self._levels = torch.where(self._levels == LOW, HIGH, self._levels).to(torch.int8)
        self.alpha_high.zero_()

    def levels(self) -> Tensor:
        """int8 [B, H, S]: -1 padding, 0 pruned, 1 low, 2 high, 3 window."""
        return self._levels.clone()

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded keys [B, H, S, D], values [B, H, S, Dv], zero where nothing is stored, and the mask of what is."""
        return self._keys.clone(), self._values.clone(), self._levels > PRUNED

    def sums(self) -> Tensor:
        """float32 [B, H, S] significance sums, 0 where nothing is stored."""
        return self._sums.clone()

    def _append(self, key: Tensor, value: Tensor, valid: Tensor) -> None:
        if key.dtype != self.dtype or value.dtype != self.dtype:
            raise ValueError(f"expected {self.dtype} keys and values, got {key.dtype} and {value.dtype}")
        # Padding may hold anything, even NaN, which a probability of zero would not silence.
        key, value = (torch.where(valid[:, None, :, None], x, 0).to(self.compute_dtype) for x in (key, value))
        if not (key.isfinite().all() and value.isfinite().all()):
            raise ValueError("keys and values must be finite")
        level = torch.where(valid, WINDOW, PADDING).to(torch.int8)[:, None].expand(key.shape[:3])
        index = torch.where(valid, self._count[:, None] + valid.cumsum(-1) - 1, -1)
        self._keys = torch.cat([self._keys, key], dim=2)
        self._values = torch.cat([self._values, value], dim=2)
        self._levels = torch.cat([self._levels, level], dim=2)
        self._sums = torch.cat([self._sums, torch.zeros(level.shape)], dim=2)
        self._index = torch.cat([self._index, index], dim=1)
        self._count = self._count + valid.sum(-1)

    def _to_kept(self, x: Tensor, which: int, offset: Tensor | None = None) -> Tensor:
        """R x minus the offset in the model's dtype, as keys (`which` 0) or values (1) are kept; x: [..., D]."""
        kept = x @ self._rotations[which].T
        kept = kept if offset is None else kept - offset
        return kept.to(torch.promote_types(self.dtype, torch.float32)).to(self.dtype)

    def _from_kept(self, x: Tensor, which: int, offset: Tensor | None = None) -> Tensor:
        """The inverse of `_to_kept`."""
        x = x.to(torch.float64)
        return (x if offset is None else x + offset) @ self._rotations[which]

    def _keep_new(self, columns: int) -> None:
        """Converts the newest tokens to their stored form."""
        key, value = self._exact
        offset = self._offset[:, :, None]
        there = self._valid[:, None, :, None]
        first = self._keys.shape[2] - columns
        self._keys[:, :, first:] = torch.where(there, self._from_kept(self._to_kept(key, 0, offset), 0, offset), 0)
        self._values[:, :, first:] = torch.where(there, self._from_kept(self._to_kept(value, 1), 1), 0)

    def _fix_offsets(self, key: Tensor | None = None, value: Tensor | None = None) -> None:
        """Sets the offset of rows that are about to lose their first token from the window to their mean key.

        key, value: of the newest tokens if several come at once: converted only now, without an offset before.
        """
        columns = 0 if key is None else key.shape[2]
        old = self._offset.clone()
        before = self._keys.shape[2] - columns
        for row in range(self._levels.shape[0]):
            real = self._index[row] >= 0
            left = ((self._levels[row] >= PRUNED) & (self._levels[row] < WINDOW)).any()
            if not self._centers or left or self._count[row] - self._sinks[row] <= self.window:
                continue
            for head in range(self._levels.shape[1]):
                keys = self._keys[row, head].clone()
                if columns:
                    keys[before:] = key[row, head]
                mean = (keys[real] @ self._rotations[0].T).mean(0)
                self._offset[row, head] = mean.to(torch.promote_types(self.dtype, torch.float32))
                kept = self._to_kept(keys[:before][real[:before]], 0, old[row, head]).to(torch.float64)
                kept = kept + old[row, head]
                kept = self._to_kept(kept @ self._rotations[0], 0, self._offset[row, head])
                self._keys[row, head, :before][real[:before]] = self._from_kept(kept, 0, self._offset[row, head])
        if columns:
            self._keep_new(columns)

    def _attend(
        self, query: Tensor, valid: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention probabilities [B, H, G, Q, S]; zero for padding queries and for keys a query does not see."""
        heads = self._keys.shape[1]
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        grouped = query.unflatten(1, (heads, -1))  # query head h reads KV head h // G
        scores = grouped @ self._keys.unsqueeze(2).transpose(-1, -2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_column, query_column = self._columns(query.shape[2])
        visible = (key_column <= query_column) & (self._levels > PRUNED)[:, :, None, None]  # [B, H, 1, Q, S]
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            # The sink is a raw logit: neither scaled nor capped. It takes probability and gives nothing back.
            column = sinks.reshape(1, heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        return torch.where(valid[:, None, None, :, None], probabilities, 0)

    def _significance(self, probabilities: Tensor) -> Tensor:
        """Returns the attention that this forward's queries, or the newest of them, add to the sums, [B, H, S]."""
        valid, there = self._valid, probabilities.shape[-2]
        missing = valid.shape[1] - there
        probabilities = torch.nn.functional.pad(probabilities, (0, 0, missing, 0))
        key_column, query_column = self._columns(valid.shape[1])
        is_later = query_column > key_column  # [Q, S]; a token's own query never counts
        observed = valid & (torch.arange(valid.shape[1]) >= missing)
        if self.observation_window is not None:
            queries_from_here = valid.flip(-1).cumsum(-1).flip(-1)
            observed = observed & (queries_from_here <= self.observation_window)
        counted = is_later & observed[:, :, None]  # [B, Q, S]
        total = torch.where(counted[:, None, None], probabilities, 0).sum(-2)  # [B, H, G, S]
        later = (is_later & valid[:, :, None]).sum(1).to(total.dtype)
        seen = counted.sum(1).to(total.dtype)
        # The sum stands for all later queries, including unobserved ones, so that sum / (N - 1 - i) remains a mean.
        # The ratio comes first: it is exactly 1 where nothing was left out.
        share = torch.where(seen > 0, later / seen.clamp(min=1), 0)
        return (total * share[:, None, None]).amax(2)

    def _columns(self, new: int) -> tuple[Tensor, Tensor]:
        """Columns of the keys, [S], and of the queries of the last `new` ones, [Q, 1]."""
        seen = self._levels.shape[-1]
        return torch.arange(seen), torch.arange(seen - new, seen)[:, None]

    def _head(self, row: int, head: int) -> Head:
        """Returns the current state of one row's head that a rule may know."""
        n = self._count[row]
        later = (n - 1 - self._index[row]).clamp(min=1).to(torch.float32)
        return Head(
            head,
            int(n),
            self._index[row],
            self._levels[row, head],
            self._sums[row, head] / later,
            self.alpha_high[row, head],
            self.alpha_low[row, head],
            int(self._sinks[row]),
        )

    def _compress_prompt(self) -> None:
        """Levels what leaves the window, and downgrades stored tokens that no longer earn their level."""
        rows, heads = self._levels.shape[:2]
        for row in range(rows):
            # a token that left the window stays outside, even if tokens after it are hidden
            in_window = self._index[row] >= (self._count[row] - self.window).clamp(min=0)
            in_window |= (self._index[row] >= 0) & (self._index[row] < self._sinks[row])
            for head in range(heads):
                levels = self._levels[row, head]
                outside = ~in_window | (levels != WINDOW)
                members = outside & (levels > PRUNED)
                seen = int((outside & (self._index[row] >= 0)).sum())
                earned = self.rule.prompt(self._head(row, head), members, seen)
                # The minimum with the present level rules out upgrades.
                target = torch.where(members, torch.minimum(levels, earned), levels)
                for level in (PRUNED, LOW, HIGH):
                    self._store(row, head, ((target == level) & (levels != level)).nonzero().flatten(), level)

    def _compress_generation(self) -> None:
        """Sends the oldest tokens beyond the window, one by one, through Algorithm 1."""
        rows, heads = self._levels.shape[:2]
        for row in range(rows):
            for head in range(heads):
                in_window = self._levels[row, head] == WINDOW
                in_window = (in_window & (self._index[row] >= self._sinks[row])).nonzero().flatten().tolist()
                for candidate in in_window[: max(len(in_window) - self.window, 0)]:
                    for token, level in self.rule.step(self._head(row, head), candidate):
                        self._store(row, head, torch.tensor([token]), level)

    def _inset(self, precision: SimPrecision, dim: int, level: int) -> tuple[float, float]:
        """How values are quantised at a level: parts of the range at each end, and shrinkage."""
        demoted = level == LOW and self._demotes and self.high.v_bits <= precision.v_bits
        return inset_of(precision.v_bits, dim // precision.v_groups) if self._is_inset and not demoted else (0.0, 1.0)

    def _store(self, row: int, head: int, tokens: Tensor, level: int) -> None:
        """Moves tokens of one head to a level, starting from their current values."""
        if tokens.numel() == 0:
            return
        keys, values = self._keys[row, head], self._values[row, head]
        if level == PRUNED:
            keys[tokens], values[tokens] = 0, 0
            self._sums[row, head, tokens] = 0
        else:
            precision = self.high if level == HIGH else self.low
            offset = self._offset[row, head]
            kept = (keys[tokens], values[tokens])
            if self._transforms:
                # no further rounding to the model's dtype: they have it, or were dequantised
                kept = kept[0] @ self._rotations[0].T - offset, kept[1] @ self._rotations[1].T
                kept = tuple(x.to(torch.promote_types(self.dtype, torch.float32)) for x in kept)
            if self._lowers:
                high, low = self.high, self.low
                bits, groups = (high.v_bits, low.v_bits), (high.v_groups, low.v_groups)
                inset = self._inset(low, kept[1].shape[1], LOW)
                key = inner_cells(kept[0], (high.k_bits, low.k_bits), (high.k_groups, low.k_groups))
                value = inner_cells(kept[1], bits, groups)
                if inset[0] and 0 <= bits[0] - bits[1] < 3 and groups[0] == groups[1]:
                    value = merged_cells(kept[1], bits, groups[0], inset)
                elif inset[0]:
                    value = kept[1]
                kept = key, value
            moment, damping = self._moment[row, head], 0.1
            if not self._is_prompt:
                moment, damping = None if self._model_moment is None else self._model_moment[head], 0.0
            if self._adapts and precision.k_bits <= 6 and moment is not None and moment.any():
                stored = (precision.k_bits, precision.k_groups, self.narrow, damping)
                kept_keys = adapted_round_trip(kept[0], moment, *stored)
            else:
                kept_keys = round_trip(kept[0], precision.k_bits, precision.k_groups, self.dtype, self.narrow)
            inset = self._inset(precision, kept[1].shape[1], level)
            stored = (precision.v_bits, precision.v_groups, self.dtype, self.narrow, inset)
            kept_values = round_trip(kept[1], *stored)
            if self.narrow:
                self._sums[row, head, tokens] = nearest_score(self._sums[row, head, tokens])
            if self._transforms:
                kept_keys, kept_values = self._from_kept(kept_keys, 0, offset), self._from_kept(kept_values, 1)
            keys[tokens], values[tokens] = kept_keys, kept_values
        self._levels[row, head, tokens] = level
