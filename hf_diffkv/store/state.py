"""What is held for one device: pages, tables, counts, windows, and the host's knowledge of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor

from ..config import DiffKVConfig
from ..memory import HIGH, LOW, NULL_PAGE, PageLayout, PagePool, PageTable
from ..memory.free_list import FREE
from ..memory.layout import NARROW_POSITIONS
from ..ops.backend import REFERENCE, choose
from ..ops.quantize import compute_dtype
from ..ops.rotation import rotation_matrix
from ..ops.tiles import Bounds, build_tiles
from ..policy import Policy, make_policy
from ..policy.diffkv import DiffKV
from .compaction import compact_round
from .enter import enters_at_once
from .look import pages_of, read_together
from .padding import Padding
from .window import center_rows, is_whole

if TYPE_CHECKING:
    from ..ops.decode_attention.scratch import Scratch
    from .enter import Forward
    from .native import NativeCalls
    from .record import Recorded

# Generated tokens between two looks at the device; the host works with upper bounds in between.
REFRESH_STEPS = 8
# fp16 metadata holds a range of twice this
FP16_RANGE = 32752.0

LayerThreshold = Union[float, tuple[float, ...]]


# tensors with a row for each (layer, request); everything a request is, beside its pages
ROW_STATE = (
    "window_key",
    "window_value",
    "window_score",
    "high_count",
    "low_count",
    "length",
    "window_start",
    "sink_end",
    "alpha_high",
    "alpha_low",
    "key_offset",
)
# with thresholds of zero it keeps everything high
PROTECTION = DiffKV()


class Store:
    """Pages and windows of `num_layers` layers on one device.

    A token of a request has an index among the request's real tokens (padding never counts). The exact ones are the
    sinks, below `sink_end`, and those from `window_start` on; ops/window.py. Rows are (layer, request, head).

    Args:
        config: the user's choices.
        num_layers: compressed layers that live here.
        batch_size, num_heads: requests and KV heads on this device.
        key_dim, value_dim: elements of one head.
        dtype, device: of the model's keys and values.
        total_layers: compressed layers of the model; None takes `num_layers`.
        first_head: index in the model of the first head here.
        max_positions: no request is to have more tokens, padding included; None where that is not known.

    Raises:
        ValueError: a precision that does not fit the head.
        MemoryError: `max_bytes` cannot hold the windows.
    """

    def __init__(
        self,
        config: DiffKVConfig,
        num_layers: int,
        batch_size: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        total_layers: int | None = None,
        first_head: int = 0,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.policy = make_policy(config.policy, config.policy_options)
        self.num_layers, self.batch_size, self.num_heads = num_layers, batch_size, num_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        # as tensors name it: "cuda" is cuda:0
        self.dtype, self.device = dtype, torch.empty(0, device=device).device
        self.layout = PageLayout.of(config, key_dim, value_dim, dtype.itemsize, max_positions)
        self.sink_slots, self.window_slots = config.sinks, config.sinks + config.window + config.compaction_interval
        # index of each layer and head in the model, among its compressed layers
        self.total_layers = num_layers if total_layers is None else total_layers
        self.layers = list(range(num_layers))
        self.layer_index = torch.arange(num_layers, device=device)
        self.head_index = torch.arange(first_head, first_head + num_heads, device=device)
        shape = (num_layers, batch_size, num_heads)
        self.alpha_high = torch.zeros(shape, device=device)
        self.alpha_low = torch.zeros(shape, device=device)
        self.window_key = torch.zeros(*shape, self.window_slots, key_dim, dtype=dtype, device=device)
        self.window_value = torch.zeros(*shape, self.window_slots, value_dim, dtype=dtype, device=device)
        self.window_score = torch.zeros(*shape, self.window_slots, device=device)
        self.high_count = torch.zeros(shape, dtype=torch.int32, device=device)
        self.low_count = torch.zeros(shape, dtype=torch.int32, device=device)
        # what the keys of a row are held less by, rotated
        centered = key_dim if config.center else 0
        self.key_offset = torch.zeros(*shape, centered, dtype=compute_dtype(dtype), device=device)
        # layers that are not centred, as their attention does not depend on differences of logits alone
        self.uncentered: set[int] = set()
        # whether the first tokens of some row may leave the window before the next refresh
        self.centers_soon = False
        self.length = torch.zeros(num_layers, batch_size, dtype=torch.int64, device=device)
        self.sink_end = torch.full_like(self.length, self.sink_slots)
        self.window_start = self.sink_end.clone()
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.invalid = torch.zeros((), dtype=torch.bool, device=device)
        self.changed_past = torch.zeros((), dtype=torch.bool, device=device)
        self.table = PageTable(num_layers, batch_size, num_heads, device)
        self.pool = PagePool(self.layout.page_bytes, device)
        self.padding = Padding(batch_size, device)
        self.seen = 0
        self.recording = False
        self.recorded: list[Recorded | None] = [None] * num_layers
        # what the host knows of the layers in a forward of several tokens, see enter.py
        self.forward: Forward | None = None
        # bytes other stores of the cache hold on this device, and their layers still to come in this forward
        self.taken = 0
        self.layers_later = 0
        self.tightening = 0.0  # the most that `max_bytes` has tightened the thresholds of any layer by
        self.steps_since_compaction = 0
        self.compaction_due = False
        self._high_bound = np.zeros(shape, dtype=np.int64)
        self._low_bound = np.zeros(shape, dtype=np.int64)
        self._steps_left = 0
        self._bounds: list[Bounds] = []
        self.all_bounds: Bounds | None = None
        self.scratch: Scratch | None = None
        # where native code finds everything, see native.py
        self.native_calls: NativeCalls | None = None
        # tokens per row that tables and buffers are made for beforehand, so that they stay in place until then
        self.room = 0
        # the stores that share all memory with this one, itself included (see fork.py)
        self.twins: weakref.WeakSet[Store] | None = None
        self.finalizer: weakref.finalize | None = None
        self.update_limit()

    @property
    def bytes(self) -> int:
        """Bytes the device holds for this store; what it shares with forks counts in equal parts."""
        return (self.pool.bytes + self._bytes_beside_pool()) // (1 if self.twins is None else len(self.twins))

    def _bytes_beside_pool(self) -> int:
        tensors = sum(t.numel() * t.element_size() for t in self._tensors())
        return tensors + self.padding.bytes + sum(r.bytes for r in self.recorded if r is not None)

    @property
    def max_bytes(self) -> int | None:
        """What the other stores of the device leave of the budget; None is unlimited."""
        limit = self.config.max_bytes
        return None if limit is None else limit - self.taken

    @property
    def key_rotation(self) -> Tensor | None:
        """Of keys and queries, [key_dim, key_dim]; None where they are held as they are."""
        return self._rotation(self.key_dim)

    @property
    def value_rotation(self) -> Tensor | None:
        """Of values, [value_dim, value_dim], likewise."""
        return self._rotation(self.value_dim)

    def _rotation(self, dim: int) -> Tensor | None:
        return rotation_matrix(dim, self.key_offset.dtype, self.device) if self.config.rotate else None

    def owned_pages(self) -> Tensor:
        """int32 [n], the pages in the table."""
        table = self.table.table
        return table[table != NULL_PAGE]

    def private_pages(self) -> tuple[PagePool, PageTable]:
        """A pool with copies of the pages in the table and nothing else, and the table for it."""
        pages = self.owned_pages().long()
        pool = PagePool(self.pool.page_bytes, self.device, self.pool.max_pages)
        pool.ensure_free(pages.numel())
        _, fresh = pool.free_list.take(torch.tensor([pages.numel()], device=self.device))
        pool.pages[fresh] = self.pool.pages[pages]
        table = self.table.copy()
        table.table[table.table != NULL_PAGE] = fresh.to(torch.int32)
        return pool, table

    def __getstate__(self) -> dict:
        """For copies and pickles: a fork takes along pages of its own."""
        state = dict(self.__dict__, native_calls=None)
        if self.twins is not None:
            pool, table = self.private_pages()
            state |= {"pool": pool, "table": table, "twins": None, "finalizer": None, "_steps_left": 0}
        return state

    @property
    def rows_per_layer(self) -> int:
        """Requests times KV heads."""
        return self.batch_size * self.num_heads

    def _tensors(self) -> list[Tensor]:
        tensors = [self.window_key, self.window_value, self.window_score, self.high_count, self.low_count]
        tensors += [self.length, self.window_start, self.sink_end, self.table.table, self.alpha_high, self.alpha_low]
        tensors += [self.layer_index, self.head_index, self.invalid, self.changed_past, self.key_offset]
        bounds = [*self._bounds, self.all_bounds] if self.all_bounds is not None else []
        if self.scratch is not None:
            tensors += [t for t in vars(self.scratch).values() if isinstance(t, Tensor)]
        return tensors + [self.flag, *(t for bound in bounds for t in bound.tensors())]

    def backend(self) -> str:
        """What runs the ops on this store, one of `ops.backend.BACKENDS`."""
        return choose(self.device, self.dtype, self.layout.high, self.layout.low)

    def check_budget(self, more: int) -> None:
        """Raises `MemoryError` unless `more` bytes outside the pool fit into the budget; sets the pool's limit."""
        self.update_limit(more)
        if self.config.max_bytes is not None and more > 0 and self.bytes + more > self.max_bytes:
            raise MemoryError(
                f"{more} more bytes do not fit into max_bytes={self.config.max_bytes}; raise max_bytes, or use fewer "
                "sequences."
            )

    def update_limit(self, more: int = 0) -> None:
        """Says how many pages fit beside everything else that is held, and `more` bytes to come.

        Raises:
            MemoryError: none does.
        """
        max_bytes = self.max_bytes
        if max_bytes is None:
            return
        # what may still be added until the limit is looked at again
        growth = self.padding.bytes // 8 + self.batch_size * (REFRESH_STEPS + 1) + self.config.max_bytes // 32
        growth += self.pool.granularity
        other = self._bytes_beside_pool() + growth + more
        pages = (max_bytes - other) // (self.layout.page_bytes + 8)
        if pages < 1:
            raise MemoryError(
                f"max_bytes={self.config.max_bytes} cannot even hold the windows and tables of this cache ({other} "
                "bytes); raise max_bytes, or lower window, sinks or the batch size."
            )
        self.pool.max_pages = int(pages)

    def place_layer(self, layer: int, index: int) -> None:
        """Says that `layer` is the model's compressed layer `index`."""
        self.layers[layer] = index
        self.layer_index[layer] = index

    def is_protected(self, layer: int) -> bool:
        """Whether the policy has no say in `layer`, which is high but for what `max_bytes` takes."""
        count = self.config.protected_layers
        return not count <= self.layers[layer] < self.total_layers - count

    def policy_of(self, layer: int) -> Policy:
        """What levels the tokens of `layer`."""
        return PROTECTION if self.is_protected(layer) else self.policy

    @property
    def observation_window(self) -> int | None:
        """How many of a prompt's last queries significance is taken from; None is all, or that there is none."""
        if not self.layout.selects:
            return None
        chosen = self.config.observation_window
        return self.policy.observation_window if chosen is None else chosen

    def set_thresholds(self, layer: int, alpha_high: LayerThreshold, alpha_low: LayerThreshold) -> None:
        """Sets thresholds for a layer that is still empty: one number, or one per head (else `ValueError`).

        A layer that keeps all tokens high, whatever they receive, has zeros.
        """
        for name, value in (("alpha_high", alpha_high), ("alpha_low", alpha_low)):
            if isinstance(value, tuple) and len(value) != self.num_heads:
                raise ValueError(
                    f"{name} has {len(value)} entries per layer but layers have {self.num_heads} KV heads here; give "
                    f"{self.num_heads}, or under tensor parallelism call cache.attach(model) first."
                )
        fixed = self.is_protected(layer) or not self.layout.selects
        alphas = (0.0, 0.0) if fixed else self.policy.first_alphas(alpha_high, alpha_low)
        for target, value in zip((self.alpha_high, self.alpha_low), alphas):
            target[layer] = torch.tensor(value, dtype=torch.float32)

    @property
    def value_limit(self) -> float:
        """Largest magnitude of elements, as they are held, that can be stored."""
        bits = (self.config.high, self.config.low)
        limit = torch.finfo(self.dtype).max
        if not all(p.k_bits == 16 and p.v_bits == 16 for p in bits):
            limit = min(FP16_RANGE, limit)
        # the mean that is taken off keys is no larger than they are
        return limit / 2 if self.config.center else limit

    def begin(self, tokens: int) -> None:
        """Starts a forward of `tokens` new tokens: runs the compaction that is due and makes room.

        Raises:
            ValueError: the tokens would be more than positions can count, or see `check_values`.
            MemoryError: there is no room; the cache is as it was.
        """
        self.check_positions(tokens)
        self.settle()
        self.forward = None
        if tokens > 1 and not enters_at_once(self):
            self.check_values()
        if tokens == 1 and self.seen > 0 and not self.recording:
            self.prepare_step()
        self.seen += tokens

    def check_positions(self, tokens: int) -> None:
        """Raises `ValueError` if pages cannot hold the positions of so many more tokens."""
        if self.layout.high.position_bytes == 2 and self.seen + tokens > NARROW_POSITIONS:
            raise ValueError(
                f"{self.seen + tokens} tokens are beyond the model's max_position_embeddings and have positions that "
                "16 bits cannot hold; use DiffKVConfig(metadata_bits=32)."
            )

    @property
    def look_due(self) -> bool:
        """Whether the next generated token makes the host look at the device, and so may raise."""
        return self._steps_left == 0

    def prepare_step(self) -> None:
        """Makes room for one generated token per request. Raises as `begin` does."""
        self.refresh_if_due()
        self.count_step()

    def refresh_if_due(self) -> None:
        """Looks at the device where the host's bounds do not cover another step. Raises as `begin` does."""
        if self.look_due:
            self.refresh()

    def count_step(self) -> None:
        """Notes that a step runs for which there is room."""
        self._steps_left -= 1
        self.steps_since_compaction += 1
        self.compaction_due = self.compacts_after_step(0)

    def compacts_after_step(self, steps: int = 1) -> bool:
        """Whether a compaction is due once `steps` more steps have run."""
        return self.steps_since_compaction + steps >= self.config.compaction_interval

    def addresses(self) -> tuple:
        """Where everything is that a decode step reads or writes: a captured step is valid while this is the same."""
        held = [self.pool.free_list.ring, self.pool.free_list.state, self.table.table]
        held += [getattr(self, name) for name in ROW_STATE]
        held += [self.flag, self.invalid]
        held += [] if self.scratch is None else [t for t in vars(self.scratch).values() if isinstance(t, Tensor)]
        return (self.pool.address, *((tensor.data_ptr(), tensor.shape) for tensor in held))

    def scratch_fits(self) -> bool:
        """Whether the buffers between the kernels serve the next step."""
        return self.scratch is not None and self.scratch.max_tokens >= self.bounds(0).max_tokens

    def settle(self) -> None:
        """Runs the compaction of the last step, if it is still to be done."""
        if not self.compaction_due:
            return
        self.compact()
        self.compaction_done()

    def compact(self) -> None:
        """The device's part of a compaction: as many rounds as tokens left the windows."""
        if self.centers_soon:
            center_rows(self)
        for _ in range(self.config.compaction_interval):
            compact_round(self)

    def compaction_done(self, done: bool = True) -> None:
        """Notes that the compaction that was due has run, if `done`."""
        if done:
            self.compaction_due = False
            self.steps_since_compaction = 0

    def refresh(self) -> None:
        """Makes room for the next `REFRESH_STEPS` steps. Reads the device once, and once more where the pool grows."""
        lookahead = REFRESH_STEPS + self.config.compaction_interval
        self._high_bound, self._low_bound, has_low, first_leave, free = self._look(lookahead)
        self.centers_soon = first_leave and self.config.center and len(self.uncentered) < self.num_layers
        high, low = self.layout.high.capacity, self.layout.low.capacity
        pages_now = pages_of(self._high_bound, high) + pages_of(self._low_bound, low)
        low_growth = np.where(has_low, lookahead, 0)
        pages_then = pages_of(self._high_bound + lookahead, high), pages_of(self._low_bound + low_growth, low)
        self._bound_rows(lookahead)
        self.ensure_width(max(int((self._high_bound + self._low_bound).max()) + lookahead, self.room))
        if self.room > 0:
            self.pool.free_list.reserve(self.table.table.numel())
        self.update_limit()
        self._ensure_free(int((pages_then[HIGH] + pages_then[LOW] - pages_now).sum()), free)
        self._steps_left = REFRESH_STEPS

    def _bound_rows(self, lookahead: int) -> None:
        """Notes how long rows are until `lookahead` more tokens have left their windows."""
        longest = int((self._high_bound + self._low_bound).max()) + lookahead + self.window_slots
        if self.backend() != REFERENCE:
            self.all_bounds = Bounds(longest)
            self._bounds = [self.all_bounds] * self.num_layers
        else:
            self.all_bounds = self._tile(slice(None), longest, lookahead)
            self._bounds = [self._tile(layer, longest, lookahead) for layer in range(self.num_layers)]

    def _look(self, lookahead: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool, int]:
        """All the host wants to know, in one copy: high and low counts, where low ones may come, bool, free pages.

        The first three are [layers, batch, heads]. The single bool is whether the first token of some row can leave
        its window within `lookahead` tokens. Raises as `check_values` does.
        """
        has_low = self.policy.has_low(self.alpha_high, self.alpha_low)
        first_leave = (is_whole(self) & (self.length - self.window_start > self.config.window - lookahead)).any()
        parts = (self.high_count, self.low_count, has_low, first_leave, self.pool.free_list.state[FREE])
        high, low, has_low, leave, free, *flags = read_together(*parts, *self.flags())
        self.raise_for(*map(bool, flags))
        return high, low, has_low.astype(bool), bool(leave), int(free)

    def _ensure_free(self, pages: int, free: int) -> None:
        try:
            self.pool.ensure_free(pages, free)
        except MemoryError:
            if self.config.max_bytes is None:
                raise
            # the budget works on stores, so it can only be loaded here
            from .budget import make_room

            make_room(self, pages)
            self.refresh()

    def _tile(self, layers: slice | int, longest: int, lookahead: int) -> Bounds:
        tiers = ((self._high_bound, self.layout.high.capacity), (self._low_bound, self.layout.low.capacity))
        tiles = (build_tiles(counts[layers].ravel(), lookahead, capacity, self.device) for counts, capacity in tiers)
        return Bounds(longest, tuple(tiles))

    def bounds(self, layer: int) -> Bounds:
        """What the host knows of one layer's rows, valid until the next refresh."""
        return self._bounds[layer]

    def ensure_width(self, tokens: int) -> None:
        """Makes table rows wide enough for `tokens` stored tokens."""
        high = self.layout.high.capacity
        high_pages = (self.high_count + (high - 1)) // high
        self.table.ensure_width(tokens, min(high, self.layout.low.capacity), high_pages)

    def forget_bounds(self) -> None:
        """Says that counts changed in a way the host's bounds do not cover."""
        self._steps_left = 0

    def withdraw(self, tokens: int) -> None:
        """Undoes `begin` for a forward whose first layer stored nothing."""
        self.seen -= tokens
        self.padding.length = min(self.padding.length, self.seen)
        self.compaction_due = False
        if tokens == 1 and self.seen > 0 and not self.recording:
            self.steps_since_compaction -= 1

    def check_values(self) -> None:
        """Reads the device.

        Raises:
            ValueError: since the last look a step of one token (or a prompt, see enter.py) stored keys or values that
                are not finite, or a step had a mask for the tokens before it that differs from what is stored.
        """
        self.raise_for(*torch.stack([flag.reshape(()) != 0 for flag in self.flags()]).tolist())

    def flags(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `raise_for` takes, as it stands on the device."""
        return self.invalid, self.changed_past, self.flag

    def raise_for(self, invalid: bool, changed_past: bool, flag: bool) -> None:
        """Raises as `check_values` does."""
        if invalid:
            raise ValueError(self.value_message())
        if changed_past:
            raise ValueError(
                "the attention mask of a step of one token hides tokens that are stored, or shows some that are not. "
                "On this device tokens can be hidden only together with a forward of several tokens; what was "
                "generated since then is wrong. Call cache.reset() and start over."
            )
        if flag:
            raise RuntimeError(
                "a compaction found too few pages, which the host should have provided; please report it."
            )

    def value_message(self) -> str:
        rotated = "rotated " if self.config.rotate else ""
        return (
            f"{rotated}keys or values are NaN, infinite or beyond {self.value_limit:g}, which the cache cannot store; "
            "check the model's dtype (float16 overflows: load it with dtype=torch.bfloat16) or use "
            "DiffKVConfig.lossless()."
        )
