"""One layer's rows: everything that ops read or write of what is stored, and where exact tokens stand in it.

The first `sink_slots` slots of a window hold sinks, token i in slot i, the others are a ring of R = slots - sink_slots
slots, token i in slot sink_slots + i % R. Which tokens are sinks is said for every request: those below `sink_end`,
which is `sink_slots` unless a mask hid some of them. A window holds the tokens [0, sink_end) and [start, length),
with sink_end <= start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .layout import PageLayout, TierLayout
from .pool import NULL_PAGE, FreeList, PagePool

# tiers of pages
HIGH, LOW = 0, 1
# levels of tokens: padding has none, pruned ones are gone, the window's are exact
PADDING_LEVEL, PRUNED_LEVEL, LOW_LEVEL, HIGH_LEVEL, WINDOW_LEVEL = -1, 0, 1, 2, 3
# what has an entry for each request, beside its part of the page table
ROW_STATE = (
    *("window_key", "window_value", "window_score", "high_count", "low_count"),
    *("length", "window_start", "sink_end", "alpha_high", "alpha_low", "key_offset"),
)


class PageTable:
    """The bidirectional page table, `table`: int32 [layers, batch, heads, width] of page ids.

    High pages grow from the left, low pages from the right, so one narrow row serves any mix. An unused entry is the
    null page, which holds no token. A row is wide enough for all its tokens at the high level plus one partial page
    of each tier, so the two ends never meet.
    """

    def __init__(self, num_layers: int, batch_size: int, num_heads: int, device: torch.device) -> None:
        self.table = torch.zeros(num_layers, batch_size, num_heads, 2, dtype=torch.int32, device=device)

    @property
    def width(self) -> int:
        return self.table.shape[-1]

    def copy(self) -> PageTable:
        """The same entries, to be changed independently."""
        twin = object.__new__(PageTable)
        twin.table = self.table.clone()
        return twin

    def ensure_width(self, tokens: int, capacity: int, high_pages: Tensor) -> None:
        """Makes rows wide enough for `tokens` tokens, at least `capacity` of which fit into a page.

        Args:
            high_pages: int [layers, batch, heads], how many entries on the left are in use.
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
    """Column of a row's `page`-th page of `tier` (HIGH or LOW)."""
    return page if tier == HIGH else width - 1 - page


@dataclass(frozen=True, eq=False)
class LayerRows:
    """The tensors of a layer's rows; a row is one request and KV head. All are contiguous and changed in place.

    The layers of a store together are one record, too: its requests are then those of the first layer, of the second...

    Attributes:
        layout: of the pages.
        pool: has `pages`, uint8 [pages, page_bytes], and `free_list`; both are asked for at every call, as they move
            when the pool grows.
        page_table: int32 [batch, heads, width], as in `PageTable`.
        high_count, low_count: int32 [batch, heads], tokens stored at each level.
        window_key, window_value: [batch, heads, slots, dim] in the model's dtype.
        window_score: float32 [batch, heads, slots], their significance sums.
        window_start, length, sink_end: int64 [batch]; windows hold the tokens [0, sink_end) and [window_start, length).
        sink_slots: slots of a window that sinks have.
        key_offset: [batch, heads, key_dim] in the dtype of the computation, what keys are held less by; or
            [batch, heads, 0] where they are held as they are.
        alpha_high, alpha_low: float32 [batch, heads], relative thresholds (DiffKV, section 4.2).
        invalid: bool [], becomes True where a token cannot be stored.

    Raises:
        ValueError: a tensor that does not fit the others.
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
        """KV heads."""
        return self.page_table.shape[1]

    @property
    def width(self) -> int:
        """Entries of a row of the page table."""
        return self.page_table.shape[2]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.batch * self.heads

    @property
    def slots(self) -> int:
        """Of a window, those of sinks included."""
        return self.window_key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self.window_key.dtype

    @property
    def device(self) -> torch.device:
        return self.window_key.device

    @property
    def counts(self) -> tuple[Tensor, Tensor]:
        """int32 [batch, heads] by tier."""
        return self.high_count, self.low_count

    @property
    def tiers(self) -> tuple[TierLayout, TierLayout]:
        """The layout by tier."""
        return self.layout.high, self.layout.low

    @property
    def pages(self) -> Tensor:
        """uint8 [pages, page_bytes]."""
        return self.pool.pages

    @property
    def free_list(self) -> FreeList:
        return self.pool.free_list

    @property
    def offset(self) -> Tensor | None:
        """`key_offset`; None where keys are held as they are."""
        return self.key_offset if self.key_offset.shape[-1] else None

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
        """Raises `ValueError` unless keys and values, [batch, heads, dim] or [batch, heads, tokens, dim], are of these
        rows."""
        high, tokens = self.layout.high, key.shape[2:-1]
        for name, tensor, dim in (("key", key, high.key_dim), ("value", value, high.value_dim)):
            shape = [self.batch, self.heads, *tokens, dim]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} must be {shape}, not {list(tensor.shape)}.")
        if key.dtype != self.dtype or value.dtype != self.dtype:
            raise ValueError(f"keys and values must be {self.dtype}, not {key.dtype} and {value.dtype}.")


class KeptRows:
    """The records of several layers, made when they are asked for.

    Args:
        layout, sink_slots: as in `LayerRows`.
        held: pool, page table, `invalid` and the tensors of `ROW_STATE`: [layers, batch, ...], but for `invalid`.
    """

    def __init__(self, layout: PageLayout, sink_slots: int, held: tuple[Any, ...]) -> None:
        self._held = held
        pool, table, invalid, *state = held
        self._fixed = {"layout": layout, "pool": pool, "sink_slots": sink_slots, "invalid": invalid}
        self._tensors = {"page_table": table, **dict(zip(ROW_STATE, state))}
        self._layers: list[LayerRows | None] = [None] * table.shape[0]
        self._all: LayerRows | None = None

    def holds(self, held: tuple[Any, ...]) -> bool:
        """Whether these are of the very same objects."""
        return all(map(is_, held, self._held))

    def layer(self, layer: int) -> LayerRows:
        """One layer's rows."""
        rows = self._layers[layer]
        if rows is None:
            rows = self._layers[layer] = self._viewed(lambda tensor: tensor[layer])
        return rows

    def all(self) -> LayerRows:
        """Those of all layers: requests of the first layer, of the second, and so on."""
        if self._all is None:
            self._all = self._viewed(lambda tensor: tensor.view(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:]))
        return self._all

    def _viewed(self, view: Callable[[Tensor], Tensor]) -> LayerRows:
        return LayerRows(**self._fixed, **{name: view(tensor) for name, tensor in self._tensors.items()})


@dataclass(frozen=True, eq=False)
class EarlierTokens:
    """Tokens of a layer that are all before the new ones of a forward, and attended by every one of them.

    Attributes:
        rows: what is stored; None where nothing is.
        stored: tokens of its longest row, window included. A row's tokens rank high, low, window, each in stored order.
        key, value: [batch, kv_heads, tokens, dim], exact tokens behind what is stored; None without any.
        valid: bool [batch, kv_heads, tokens], which of them exist.

    Raises:
        ValueError: only some of the last three are given.
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
        """Tokens of `key`."""
        return 0 if self.key is None else self.key.shape[2]

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.stored + self.exact


NO_PAST = EarlierTokens()


def slots_of(position: Tensor, sink_end: Tensor | None, sink_slots: int, slots: int) -> Tensor:
    """Slots int64 of tokens; all tensors int64 that broadcast, `sink_end` None without sinks."""
    slot = sink_slots + position % (slots - sink_slots)
    return slot if sink_end is None else torch.where(position < sink_end, position, slot)


def held_tokens(start: Tensor, length: Tensor, sink_end: Tensor | None, sink_slots: int, slots: int) -> Tensor:
    """The token in each slot, int64 [..., slots], -1 where there is none; start, length, sink_end: int64 [...]."""
    start, length = start[..., None], length[..., None]
    ring = torch.arange(slots - sink_slots, device=length.device)
    # slot s of the ring holds the newest token i < length with i % R == s
    token = length - 1 - (length - 1 - ring) % ring.numel()
    token = torch.where(token >= start, token, -1)
    if sink_end is None:
        return token
    first = torch.arange(sink_slots, device=length.device)
    return torch.cat([torch.where(first < torch.minimum(length, sink_end[..., None]), first, -1), token], dim=-1)


def held_count(start: Tensor, length: Tensor, sink_end: Tensor | None) -> Tensor:
    """Tokens in each window, int64, of int64 tensors that broadcast."""
    ring = (length - start).clamp(min=0)
    return ring if sink_end is None else ring + torch.minimum(length, sink_end)
