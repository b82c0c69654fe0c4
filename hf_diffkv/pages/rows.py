"""A layer's rows: all stored state that ops read or write, and the slots of exact tokens.

The first `sink_slots` slots of a window hold sinks: token i is in slot i. The other R = slots - sink_slots slots form a
ring: token i is in slot sink_slots + i % R. The sinks of a request are the tokens below its `sink_end`, which equals
`sink_slots` unless a mask hid some of them. A window holds the tokens [0, sink_end) and [start, length), with
sink_end <= start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import PageLayout, TierLayout
from .pool import NULL_PAGE, FreeList, PagePool

# page tiers
HIGH, LOW = 0, 1
# token levels: padding has no level, pruned tokens are not stored, window tokens are exact
PADDING_LEVEL, PRUNED_LEVEL, LOW_LEVEL, HIGH_LEVEL, WINDOW_LEVEL = -1, 0, 1, 2, 3
# per-request state besides the page table
ROW_STATE = (
    *("window_key", "window_value", "window_score", "high_count", "low_count"),
    *("length", "window_start", "sink_end", "alpha_high", "alpha_low", "key_offset"),
)


class PageTable:
    """Bidirectional page table; `table` holds page ids, int32 [layers, batch, heads, width].

    High pages are added from the left and low pages from the right, so one narrow row serves any mix. An unused entry
    is the null page, which holds no token. A row is wide enough for all its tokens at the high level plus one partial
    page of each tier, so the two ends never meet.
    """

    def __init__(self, num_layers: int, batch_size: int, num_heads: int, device: torch.device) -> None:
        self.table = torch.zeros(num_layers, batch_size, num_heads, 2, dtype=torch.int32, device=device)

    @property
    def width(self) -> int:
        return self.table.shape[-1]

    def copy(self) -> PageTable:
        """Returns an independent copy."""
        twin = object.__new__(PageTable)
        twin.table = self.table.clone()
        return twin

    def ensure_width(self, tokens: int, capacity: int, high_pages: Tensor) -> None:
        """Widens the rows for `tokens` tokens.

        Args:
            tokens: number of tokens that a row must be able to store.
            capacity: tokens per page in the tier that holds fewer.
            high_pages: number of entries in use on the left of each row, int [layers, batch, heads].
        """
        needed = -(-tokens // capacity) + 2
        width = self.width
        if needed <= width:
            return
        needed = max(needed, width + width // 8)
        is_high = torch.arange(width, device=self.table.device) < high_pages[..., None]
        grown = self.table.new_zeros(*self.table.shape[:-1], needed)
        grown[..., :width] = torch.where(is_high, self.table, NULL_PAGE)
        grown[..., needed - width :] += torch.where(is_high, NULL_PAGE, self.table)
        self.table = grown


def column(tier: int, page: Tensor, width: int) -> Tensor:
    """Returns the table column of a row's `page`-th page of `tier` (HIGH or LOW)."""
    return page if tier == HIGH else width - 1 - page


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Tensors of a layer's rows, all contiguous and updated in place. A row is one request and KV head.

    All layers of a store can also form one record, whose batch is the requests of the first layer, then of the second,
    and so on.

    Attributes:
        layout: layout of the pages.
        pool: page pool. Its `pages`, uint8 [pages, page_bytes], and `free_list` are looked up on every call, because
            they move when the pool grows.
        page_table: page ids, int32 [batch, heads, width], as in `PageTable`.
        high_count, low_count: tokens stored at each level, int32 [batch, heads].
        window_key, window_value: keys and values of exact tokens, [batch, heads, slots, dim] in the model's dtype.
        window_score: significance sums of exact tokens, float32 [batch, heads, slots].
        window_start, length, sink_end: bounds of the windows, int64 [batch]; they hold the tokens [0, sink_end) and
            [window_start, length).
        sink_slots: window slots reserved for sinks.
        key_offset: offset subtracted from keys, [batch, heads, key_dim] in the compute dtype; [batch, heads, 0] without
            one.
        alpha_high, alpha_low: relative thresholds (DiffKV, section 4.2), float32 [batch, heads].
        invalid: flag set to True when a token cannot be stored, bool [].

    Raises:
        ValueError: a tensor does not fit the others.
    """

    layout: PageLayout
    pool: PagePool
    page_table: Tensor
    high_count: Tensor
    low_count: Tensor
    window_key: Tensor
    window_value: Tensor
    window_score: Tensor
    window_start: Tensor
    length: Tensor
    sink_end: Tensor
    sink_slots: int
    key_offset: Tensor
    alpha_high: Tensor
    alpha_low: Tensor
    invalid: Tensor

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return self.page_table.shape[1]

    @property
    def width(self) -> int:
        """Number of entries in a row of the page table."""
        return self.page_table.shape[2]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.batch * self.heads

    @property
    def slots(self) -> int:
        """Number of slots in a window, including sinks."""
        return self.window_key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.window_key.dtype

    @property
    def device(self) -> torch.device:
        return self.window_key.device

    @property
    def counts(self) -> tuple[Tensor, Tensor]:
        """Stored tokens by tier, int32 [batch, heads] each."""
        return self.high_count, self.low_count

    @property
    def tiers(self) -> tuple[TierLayout, TierLayout]:
        """Page layout by tier."""
        return self.layout.high, self.layout.low

    @property
    def pages(self) -> Tensor:
        """Memory of the pages, uint8 [pages, page_bytes]."""
        return self.pool.pages

    @property
    def free_list(self) -> FreeList:
        return self.pool.free_list

    @property
    def offset(self) -> Tensor | None:
        """Offset subtracted from keys, as in `key_offset`; None without one."""
        return self.key_offset if self.key_offset.shape[-1] else None

    def is_whole(self) -> Tensor:
        """Returns a mask of requests with no token outside the window, bool [batch]."""
        return self.window_start == self.sink_end

    def held_tokens(self) -> Tensor:
        """Returns the token in each window slot, -1 for none, int64 [batch, slots]."""
        return held_tokens(self.window_start, self.length, self.sink_end, self.sink_slots, self.slots)

    def held_count(self) -> Tensor:
        """Returns the number of exact tokens of each request, int64 [batch]."""
        return (self.length - self.window_start).clamp(min=0) + torch.minimum(self.length, self.sink_end)

    def slots_of(self, row: Tensor, token: Tensor) -> Tensor:
        """Returns the window slots of exact tokens, given the row and index of each, int64 [n]."""
        return slots_of(token, self.sink_end[row // self.heads], self.sink_slots, self.slots)

    def exact_tokens(self) -> tuple[Tensor, Tensor]:
        """Returns the row and index of each exact token, int64 [n] each, sorted by row, then index."""
        start, end = self.window_start, self.sink_end
        count = self.held_count().repeat_interleave(self.heads)
        row = torch.repeat_interleave(torch.arange(count.numel(), device=self.device), count)
        rank = torch.arange(row.numel(), device=self.device) - (count.cumsum(0) - count)[row]
        request = row // self.heads
        return row, torch.where(rank < end[request], rank, rank + (start - end)[request])

    def __post_init__(self) -> None:
        batch, heads, width = self.page_table.shape
        slots, rows, high = self.slots, (batch, heads), self.layout.high
        offsets = self.key_offset.dtype, (*rows, high.key_dim if self.key_offset.shape[-1] else 0)
        pages = self.pool.pages
        expected = {
            "pages": (torch.uint8, (pages.shape[0], self.layout.page_bytes)),
            "page_table": (torch.int32, (*rows, width)),
            "high_count": (torch.int32, rows),
            "low_count": (torch.int32, rows),
            "window_key": (self.dtype, (*rows, slots, high.key_dim)),
            "window_value": (self.dtype, (*rows, slots, high.value_dim)),
            "window_score": (torch.float32, (*rows, slots)),
            "window_start": (torch.int64, (batch,)),
            "length": (torch.int64, (batch,)),
            "sink_end": (torch.int64, (batch,)),
            "key_offset": offsets,
            "alpha_high": (torch.float32, rows),
            "alpha_low": (torch.float32, rows),
            "invalid": (torch.bool, ()),
        }
        for name, (dtype, shape) in expected.items():
            tensor = pages if name == "pages" else getattr(self, name)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {dtype} {list(shape)}, as it is used in place, not {tensor.dtype} "
                    f"{list(tensor.shape)}."
                )
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, but window_key is on {self.device}.")

    def check_tokens(self, key: Tensor, value: Tensor) -> None:
        """Raises `ValueError` unless keys and values fit these rows in shape and dtype.

        Args:
            key, value: [batch, heads, dim] or [batch, heads, tokens, dim].
        """
        high, tokens = self.layout.high, key.shape[2:-1]
        for name, tensor, dim in (("key", key, high.key_dim), ("value", value, high.value_dim)):
            shape = [self.batch, self.heads, *tokens, dim]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} must be {shape}, not {list(tensor.shape)}.")
        if key.dtype != self.dtype or value.dtype != self.dtype:
            raise ValueError(f"keys and values must be {self.dtype}, not {key.dtype} and {value.dtype}.")


class KeptRows:
    """Records of several layers, created on demand.

    Args:
        layout: layout of the pages.
        sink_slots: window slots reserved for sinks.
        held: pool, page table, `invalid` and the tensors of `ROW_STATE`; all tensors but `invalid` are
            [layers, batch, ...].

    Attributes:
        layers: records by layer; None until `layer` creates them.
    """

    def __init__(self, layout: PageLayout, sink_slots: int, held: tuple[Any, ...]) -> None:
        self.held = held
        pool, table, invalid, *state = held
        self._fixed = {"layout": layout, "pool": pool, "sink_slots": sink_slots, "invalid": invalid}
        self._tensors = {"page_table": table, **dict(zip(ROW_STATE, state))}
        self.layers: list[LayerRows | None] = [None] * table.shape[0]
        self._all: LayerRows | None = None

    def layer(self, layer: int) -> LayerRows:
        """Returns one layer's rows."""
        rows = self.layers[layer]
        if rows is None:
            rows = self.layers[layer] = self._viewed(lambda tensor: tensor[layer])
        return rows

    def all(self) -> LayerRows:
        """Returns the rows of all layers as one record: requests of the first layer, of the second, and so on."""
        if self._all is None:
            self._all = self._viewed(lambda tensor: tensor.view(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
        return self._all

    def _viewed(self, view: Callable[[Tensor], Tensor]) -> LayerRows:
        return LayerRows(**self._fixed, **{name: view(tensor) for name, tensor in self._tensors.items()})


@dataclass(frozen=True, eq=False)
class EarlierTokens:
    """Tokens of a layer that precede all new tokens of a forward and are attended to by each of them.

    Attributes:
        rows: stored tokens; None if there are none.
        stored: length of the longest stored row, window included. A row's tokens are ranked high, low, window, each in
            stored order.
        key, value: exact tokens that follow the stored ones, [batch, kv_heads, tokens, dim]; None without any.
        valid: True for exact tokens that exist, bool [batch, kv_heads, tokens].

    Raises:
        ValueError: only some of `key`, `value` and `valid` are given.
    """

    rows: LayerRows | None = None
    stored: int = 0
    key: Tensor | None = None
    value: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        given = [part is not None for part in (self.key, self.value, self.valid)]
        if any(given) and not all(given):
            raise ValueError("earlier tokens need a key, a value and valid together.")

    @property
    def exact(self) -> int:
        """Number of exact tokens in `key`."""
        return 0 if self.key is None else self.key.shape[2]

    @property
    def tokens(self) -> int:
        """Number of all earlier tokens."""
        return self.stored + self.exact


NO_PAST = EarlierTokens()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the compute dtype for a model of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_pages(pages: Tensor, tier: TierLayout) -> None:
    """Raises `ValueError` unless `pages` is the memory of this tier's pages."""
    if pages.dtype != torch.uint8 or pages.ndim != 2 or pages.shape[1] != tier.page_bytes or not pages.is_contiguous():
        raise ValueError(
            f"pages must be contiguous uint8 [pages, {tier.page_bytes}], not {pages.dtype} {tuple(pages.shape)}."
        )


def check_contents(pages: Tensor, tier: TierLayout, page: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises `ValueError` unless the pages fit (`check_pages`) and each entry of `page` has a key and a value."""
    check_pages(pages, tier)
    count = page.numel()
    if key.shape != (count, tier.key_dim) or value.shape != (count, tier.value_dim):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [{count}, {tier.key_dim}] and "
            f"[{count}, {tier.value_dim}]."
        )


def slots_of(position: Tensor, sink_end: Tensor, sink_slots: int, slots: int) -> Tensor:
    """Returns the window slots of exact tokens, int64.

    Args:
        position: index of each token, int64.
        sink_end: end of the sinks, int64, broadcastable to `position`.
        sink_slots: window slots reserved for sinks.
        slots: slots in a window.
    """
    return torch.where(position < sink_end, position, sink_slots + position % (slots - sink_slots))


def held_tokens(start: Tensor, length: Tensor, sink_end: Tensor, sink_slots: int, slots: int) -> Tensor:
    """Returns the token in each window slot, int64 [..., slots], -1 for none.

    Args:
        start, length, sink_end: bounds of the windows, int64 [...].
        sink_slots: window slots reserved for sinks.
        slots: slots in a window.
    """
    start, length, sink_end = (bound[..., None] for bound in (start, length, sink_end))
    ring = torch.arange(slots - sink_slots, device=length.device)
    # slot s of the ring holds the newest token i < length with i % R == s
    token = length - 1 - (length - 1 - ring) % ring.numel()
    token = torch.where(token >= start, token, -1)
    first = torch.arange(sink_slots, device=length.device)
    return torch.cat([torch.where(first < torch.minimum(length, sink_end), first, -1), token], dim=-1)
