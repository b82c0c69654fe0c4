"""The state on one device: pages, tables, counts, windows and thresholds, and the host's bounds on them."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import torch
from torch import Tensor

from ..config import DiffKVConfig
from ..heads.query_moments import QueryMoments
from ..ops import backend
from ..ops.backend import KERNELS
from ..ops.rotation import Rotation, rotation_matrix
from ..ops.rounding import LARGEST_BITS, ModelFeedback
from ..ops.softmax import Softmax
from ..ops.table import Ops, latent_ops, ops_for
from ..ops.tiles import Bounds
from ..pages import NULL_PAGE, KeptRows, LayerRows, PageLayout, PagePool, PageTable
from ..pages.layout import NARROW_POSITIONS
from ..pages.rows import ROW_STATE, compute_dtype
from ..policy import make_policy
from ..precision import Precision
from .faults import GROWTH_PART, changed_mask, no_room, too_few_pages, unstorable, with_growth
from .host_reads import read_together
from .kv_heads import KVHeads
from .lowering_state import LoweringState, precisions_of
from .recorded import Recorded

if TYPE_CHECKING:
    from ..ops.decode_attention.scratch import Scratch

# fp16 metadata holds a range of twice this
FP16_RANGE = 32752.0
# bytes of a page's entries in the page table and in the free list
PAGE_ENTRIES = 8

LayerThreshold = Union[float, tuple[float, ...]]


class Padding:
    """Mask of each request's real logical positions; uses no memory while there is no padding."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.batch_size, self.device, self.length = batch_size, device, 0
        self._valid: Tensor | None = None

    @property
    def bytes(self) -> int:
        return 0 if self._valid is None else self._valid.numel()

    def append(self, tokens: int, valid: Tensor | None) -> None:
        """Appends `tokens` positions; `valid` marks the real ones, bool [batch, tokens], or None if all are."""
        if valid is not None or self._valid is not None:
            self._grow(self.length + tokens)
            self._valid[:, self.length : self.length + tokens] = True if valid is None else valid
        self.length += tokens

    def _grow(self, length: int) -> None:
        have = 0 if self._valid is None else self._valid.shape[1]
        if length <= have:
            return
        grown = torch.ones(self.batch_size, math.ceil(length * 1.125), dtype=torch.bool, device=self.device)
        if self._valid is not None:
            grown[:, :have] = self._valid
        self._valid = grown

    def equals(self, mask: Tensor | None) -> Tensor | None:
        """Returns whether `mask`, bool [batch, length] or None for all real, has the same real positions.

        The result is bool [] on the device, or None if they are known to be the same.
        """
        if self._valid is None:
            return None if mask is None else mask.all()
        known = self._valid[:, : self.length]
        return known.all() if mask is None else (mask == known).all()

    def replace(self, mask: Tensor) -> None:
        """Sets the real positions to `mask`, bool [batch, length]."""
        self._grow(self.length)
        self._valid[:, : self.length] = mask

    def mask(self) -> Tensor:
        """Returns the real positions, bool [batch, length]."""
        ones = torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.device)
        return ones if self._valid is None else self._valid[:, : self.length]

    def copy(self) -> Padding:
        """Returns an independent copy."""
        twin = Padding(self.batch_size, self.device)
        twin.length, twin._valid = self.length, None if self._valid is None else self._valid.clone()
        return twin

    def select(self, index: Tensor) -> None:
        self.batch_size = index.numel()
        self._valid = None if self._valid is None else self._valid[index]


class Store:
    """Pages and windows of `num_layers` layers on one device; step.py takes it from one forward to the next.

    A token's index counts only the request's real tokens, not padding. Exact tokens are the sinks, below `sink_end`,
    and the tokens from `window_start` on (pages/rows.py). A row is one (layer, request, KV head).

    Args:
        config: configuration of the layers, with `max_bytes` in bytes.
        num_layers: number of compressed layers in this store.
        batch_size: number of requests.
        heads: KV heads of each layer.
        total_layers: number of compressed layers of the model; None means `num_layers`.
        first_head: index of this store's first head within the model.
        max_positions: upper bound on a request's tokens, padding included; None if unknown.

    Raises:
        ValueError: a precision does not fit the head.
        MemoryError: `max_bytes` cannot hold the windows.
    """

    # generated tokens between two looks at the device; the host uses upper bounds in between
    refresh_steps = 8

    def __init__(
        self,
        config: DiffKVConfig,
        num_layers: int,
        batch_size: int,
        heads: KVHeads,
        *,
        total_layers: int | None = None,
        first_head: int = 0,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.policy = make_policy(config.policy, config.policy_options)
        self.num_layers, self.batch_size = num_layers, batch_size
        # the device as tensors name it: "cuda" becomes "cuda:0"
        self.heads = replace(heads, device=torch.empty(0, device=heads.device).device)
        self.num_heads, self.key_dim, self.value_dim = heads.num_heads, heads.key_dim, heads.value_dim
        self.dtype, self.device = dtype, device = heads.dtype, self.heads.device
        # precisions that rows have in turn (lowering.py); the stage says which two of them apply now
        self.precisions = precisions_of(config, self.key_dim, self.value_dim)
        dims = (self.key_dim, self.value_dim, dtype.itemsize)
        self.layouts = PageLayout.of_pairs(config, self.precisions, *dims, max_positions)
        self.stage = 0
        self.sink_slots, self.window_slots = config.sinks, config.sinks + config.window + 1
        # index of each layer among the model's compressed layers, and of each head
        self.total_layers = num_layers if total_layers is None else total_layers
        self.layers = list(range(num_layers))
        self.layer_index = torch.arange(num_layers, device=device)
        self.head_index = torch.arange(first_head, first_head + self.num_heads, device=device)
        shape = (num_layers, batch_size, self.num_heads)
        self.alpha_high = torch.zeros(shape, dtype=torch.float32, device=device)
        self.alpha_low = torch.zeros(shape, dtype=torch.float32, device=device)
        self.window_key = torch.zeros(*shape, self.window_slots, self.key_dim, dtype=dtype, device=device)
        self.window_value = torch.zeros(*shape, self.window_slots, self.value_dim, dtype=dtype, device=device)
        self.window_score = torch.zeros(*shape, self.window_slots, dtype=torch.float32, device=device)
        self.high_count = torch.zeros(shape, dtype=torch.int32, device=device)
        self.low_count = torch.zeros(shape, dtype=torch.int32, device=device)
        # mean key subtracted from a row's keys, in rotated channels
        centered = self.key_dim if config.center else 0
        self.key_offset = torch.zeros(*shape, centered, dtype=compute_dtype(dtype), device=device)
        # round the keys of tokens that leave the windows during generation; None rounds to the nearest code
        self.moments: QueryMoments | None = None
        # layers that are not centred, because their attention does not depend on differences of logits alone
        self.uncentered: set[int] = set()
        self.centers_soon = False  # whether the first tokens of some row may leave the window before the next refresh
        self.length = torch.zeros(num_layers, batch_size, dtype=torch.int64, device=device)
        self.sink_end = torch.full_like(self.length, self.sink_slots)
        self.window_start = self.sink_end.clone()
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.invalid = torch.zeros((), dtype=torch.bool, device=device)
        self.changed_past = torch.zeros((), dtype=torch.bool, device=device)
        self.table = PageTable(num_layers, batch_size, self.num_heads, device)
        self.pool = PagePool(self.layout.page_bytes, device)
        self.padding = Padding(batch_size, device)
        self.seen = 0
        self.recording = False
        self.recorded: list[Recorded | None] = [None] * num_layers
        # bytes of the cache's other stores on this device, and their layers still to come in this forward
        self.taken = self.layers_later = 0
        self.readers = 0  # later layers of the model that read keys and values of layers here
        self.lowering = LoweringState(config.precise is not None)
        self.tightening = 0.0  # largest strength by which `max_bytes` has tightened any layer's thresholds
        self.compaction_due = False
        # changes begun but not ended, which leave the contents uncertain; an error leaves them counted
        self.unfinished = 0
        self.scratch: Scratch | None = None
        self.forward: Any = None  # record of prompt_kernels.py for the current forward of several tokens
        # `ops`, and the forced backend and autocast that they were chosen for
        self._ops: Ops | None = None
        self._ops_chosen_for: tuple[str | None, bool] = (None, False)
        self._kept: KeptRows | None = None  # records of the rows for ops
        # tokens per row for which tables and buffers are allocated in advance, so that they stay in place until then
        self.room = 0
        # the host's bounds on the rows, of all layers and by layer, valid for `steps_left` more steps
        self.all_bounds: Bounds | None = None
        self.layer_bounds: list[Bounds] = []
        self.steps_left = 0
        self.twins: weakref.WeakSet[Store] | None = None  # stores that share its memory, itself included (forks.py)
        self.finalizer: weakref.finalize | None = None
        self.update_limit()

    @property
    def layout(self) -> PageLayout:
        """Format of the pages at this stage."""
        return self.layouts[self.stage]

    @property
    def high(self) -> Precision:
        """Precision of the high tier at this stage."""
        return self.precisions[self.stage]

    @property
    def low(self) -> Precision:
        """Precision of the low tier at this stage."""
        return self.precisions[self.stage + 1]

    def begin_stage(self, stage: int) -> None:
        """Begins a stage, for which pages, tables and counts are ready."""
        self.stage = stage
        self._kept = self._ops = self.scratch = None
        self.forget_bounds()

    @property
    def bytes(self) -> int:
        """Bytes the device holds for this store; memory shared with forks is divided equally among them."""
        return (self.pool.bytes + self.bytes_outside_pool()) // self.sharers

    @property
    def sharers(self) -> int:
        """Number of stores that share this store's memory, itself included."""
        return 1 if self.twins is None else len(self.twins)

    def bytes_outside_pool(self) -> int:
        """Returns the bytes of everything except pages."""
        tensors = sum(t.numel() * t.element_size() for t in self._tensors()) + self.padding.bytes
        return tensors + sum(r.bytes for r in self.recorded if r is not None) + self.lowering.promised

    def _tensors(self) -> list[Tensor]:
        tensors = [getattr(self, name) for name in ROW_STATE]
        tensors += [self.table.table, self.layer_index, self.head_index, self.invalid, self.changed_past]
        tensors += [] if self.scratch is None else self.scratch.tensors()
        tensors += [] if self.lowering.moments is None else [self.lowering.moments]
        bounds = [] if self.all_bounds is None else [*self.layer_bounds, self.all_bounds]
        return [*tensors, self.flag, *(tensor for bound in bounds for tensor in bound.tensors())]

    @property
    def key_rotation(self) -> Tensor | None:
        """Rotation of keys and queries, [key_dim, key_dim]; None if they are not rotated."""
        return self._rotation(self.key_dim)

    @property
    def value_rotation(self) -> Tensor | None:
        """Rotation of values, [value_dim, value_dim]; None if they are not rotated."""
        return self._rotation(self.value_dim)

    @property
    def rotation(self) -> Rotation:
        """Rotations of keys and values."""
        return Rotation(self.key_rotation, self.value_rotation)

    def _rotation(self, dim: int) -> Tensor | None:
        return rotation_matrix(dim, self.key_offset.dtype, self.device) if self.config.rotate else None

    @property
    def rounds_for_queries(self) -> bool:
        """Whether some keys are rounded for the queries that read them."""
        return self.config.adaptive_rounding and min(self.layout.high.k_bits, self.layout.low.k_bits) <= LARGEST_BITS

    @property
    def model_feedback(self) -> ModelFeedback | None:
        """Feedback for rounding the keys of generated tokens; None rounds each element to the nearest code."""
        if self.moments is None or not self.rounds_for_queries:
            return None
        heads = self.moments.triangles[self.layers[0]].shape[0]
        matrix = self.moments.feedback(heads, self.key_dim, self.config.rotate, self.device)
        return ModelFeedback(matrix, self.layer_index, self.head_index)

    def owned_pages(self) -> Tensor:
        """Returns the ids of the pages in the table, int32 [n]."""
        table = self.table.table
        return table[table != NULL_PAGE]

    def private_pages(self) -> tuple[PagePool, PageTable]:
        """Copies the pages in the table to a new pool; returns the pool and its table."""
        pool, fresh = self.pool.copy_of(self.owned_pages().long())
        table = self.table.copy()
        table.table[table.table != NULL_PAGE] = fresh.to(torch.int32)
        return pool, table

    def __getstate__(self) -> dict:
        """Returns the state for copies and pickles; a fork gets its own copy of shared pages."""
        state = dict(self.__dict__, _kept=None, _ops=None)
        if self.twins is not None:
            pool, table = self.private_pages()
            state |= {"pool": pool, "table": table, "twins": None, "finalizer": None, "steps_left": 0}
        return state

    def rows(self, layer: int) -> LayerRows:
        """Returns the record of a layer's tensors for ops; the same object until one of them moves."""
        kept = self.kept_rows()
        return kept.layers[layer] or kept.layer(layer)

    def all_rows(self) -> LayerRows:
        """Returns the record of all layers as one batch: requests of the first layer, of the second, and so on."""
        return self.kept_rows().all()

    def kept_rows(self) -> KeptRows:
        """Returns the records of all layers; the same object until a tensor moves."""
        state = self.__dict__
        held = (self.pool, self.table.table, self.invalid, *[state[name] for name in ROW_STATE])
        if self._kept is None or not all(map(is_, held, self._kept.held)):
            self._kept = KeptRows(self.layout, self.sink_slots, held)
        return self._kept

    def addresses(self) -> tuple:
        """Returns the addresses of everything a decode step uses; a captured step is valid while they do not change."""
        held = [self.pool.free_list.ring, self.pool.free_list.state, self.table.table, self.flag, self.invalid]
        held += [getattr(self, name) for name in ROW_STATE]
        held += [] if self.scratch is None else self.scratch.tensors()
        feedback = self.model_feedback
        held += [] if feedback is None else [feedback.matrix, feedback.layer, feedback.head]
        return (self.pool.address, self.stage, *((tensor.data_ptr(), tensor.shape) for tensor in held))

    @property
    def ops(self) -> Ops:
        """Implementations of the ops that this store runs; chosen once, and again under `use_backend` or autocast."""
        chosen_for = backend.forced, torch.is_autocast_enabled(self.device.type)
        if self._ops is None or self._ops_chosen_for != chosen_for:
            found = ops_for(self.device, self.dtype, self.layout.high, self.layout.low)
            self._ops = latent_ops(found, self.layout) if self.heads.latent else found
            self._ops_chosen_for = chosen_for
        return self._ops

    @property
    def stores_by_kernel(self) -> bool:
        """Whether kernels store a prompt directly: there is no token selection, or thresholds alone decide it."""
        # no kernel rotates a prompt's latents: a program would hold too many elements
        if self.ops.backend != KERNELS or type(self.pool) is not PagePool or self.heads.latent:
            return False
        return not self.layout.selects or (self.policy.by_thresholds and self.config.max_bytes is None)

    @property
    def value_limit(self) -> float:
        """Largest magnitude of a stored element, in the store's form."""
        bits = (self.config.high, self.config.low)
        limit = torch.finfo(self.dtype).max
        if not all(p.k_bits == 16 and p.v_bits == 16 for p in bits):
            limit = min(FP16_RANGE, limit)
        # the mean subtracted from keys is no larger than the largest key
        return limit / 2 if self.config.center else limit

    def place_layer(self, layer: int, index: int) -> None:
        """Assigns `layer` of this store to the model's compressed layer `index`."""
        self.layers[layer] = index
        self.layer_index[layer] = index

    def may_lower(self) -> Tensor:
        """Returns a mask of rows whose generated tokens may become low, bool [layers, batch, heads]."""
        if self.policy.sets_thresholds:
            return torch.ones_like(self.alpha_high, dtype=torch.bool)
        return self.alpha_low < self.alpha_high

    @property
    def low_heads(self) -> Tensor:
        """Mask of rows at the low precision, bool [layers, batch, heads]; for stores that select no tokens."""
        return self.alpha_high > 0

    @property
    def observation_window(self) -> int | None:
        """Number of a prompt's last queries that add to significance: None for all, 0 without token selection."""
        return self.config.observation_window if self.layout.selects else 0

    def note_logits(self, layer: int, softmax: Softmax) -> None:
        """Excludes a layer from centring if its attention depends on more than differences of logits."""
        if softmax.softcap is not None or softmax.sinks is not None:
            self.uncentered.add(layer)

    def set_thresholds(self, layer: int, alpha_high: LayerThreshold, alpha_low: LayerThreshold) -> None:
        """Sets the thresholds of an empty layer.

        Without token selection, low heads have infinity, others zero. With `until_full`, rows may already be lowered.

        Args:
            alpha_high, alpha_low: one number, or one per head.

        Raises:
            ValueError: not one number per head.
        """
        for name, value in (("alpha_high", alpha_high), ("alpha_low", alpha_low)):
            if isinstance(value, tuple) and len(value) != self.num_heads:
                raise ValueError(
                    f"{name} has {len(value)} entries per layer but layers have {self.num_heads} KV heads here; give "
                    f"{self.num_heads}, or under tensor parallelism call cache.attach(model) first."
                )
        if self.lowering.active:
            return
        alphas = self.policy.first_alphas(alpha_high, alpha_low)
        if not self.layout.selects and self.config.high == self.config.low:
            alphas = (0.0, 0.0)
        for target, value in zip((self.alpha_high, self.alpha_low), alphas):
            target[layer] = torch.tensor(value, dtype=torch.float32, device=self.device)

    @property
    def max_bytes(self) -> int | None:
        """Share of the budget that the device's other stores leave, in bytes; None if unlimited."""
        return None if self.config.max_bytes is None else int(self.config.max_bytes) - self.taken

    def update_limit(self, more: int = 0) -> None:
        """Sets the pool's page limit to what fits alongside all other memory and `more` bytes.

        Raises:
            MemoryError: not even one page fits.
        """
        max_bytes = self.max_bytes
        if max_bytes is None:
            return
        growth = self.growth() + (max_bytes + self.taken) // GROWTH_PART
        other = self.bytes_outside_pool() + growth + more
        page = self.layout.page_bytes + PAGE_ENTRIES
        if max_bytes - other < page:
            fixed = self.taken + other - growth + self.growth()
            raise no_room(self.config, with_growth(fixed + page), self.lowering.moments)
        self.pool.max_pages = int((max_bytes - other) // page)

    def growth(self) -> int:
        """Returns the bytes by which padding and the pool's memory may grow before the next update of the limit."""
        return self.padding.bytes // 8 + self.batch_size * (self.refresh_steps + 1) + self.pool.granularity

    def ensure_width(self, tokens: int) -> None:
        """Widens the page table's rows for `tokens` stored tokens."""
        high = self.layout.high.capacity
        high_pages = (self.high_count + (high - 1)) // high
        self.table.ensure_width(tokens, min(high, self.layout.low.capacity), high_pages)

    @property
    def look_due(self) -> bool:
        """Whether the next generated token makes the host look at the device, which may raise."""
        return self.steps_left == 0

    def forget_bounds(self) -> None:
        """Marks the host's bounds as outdated, after a change of counts that they do not cover."""
        self.steps_left = 0

    def scratch_fits(self) -> bool:
        """Returns whether the scratch buffers are large enough for the next step."""
        return self.scratch is not None and self.scratch.max_tokens >= self.layer_bounds[0].max_tokens

    @property
    def revocable(self) -> int:
        """Number of recorded tokens, which may still be taken back."""
        return min((recorded.tokens for recorded in self.recorded if recorded is not None), default=0)

    def check_positions(self, tokens: int) -> None:
        """Raises `ValueError` if pages cannot hold the positions of `tokens` more tokens."""
        if self.layout.high.position_bytes == 2 and self.seen + tokens > NARROW_POSITIONS:
            raise ValueError(
                f"{self.seen + tokens} tokens exceed the model's max_position_embeddings and have positions that do "
                "not fit in 16 bits; use metadata_bits=32."
            )

    def look(self, *tensors: Tensor) -> list[np.ndarray]:
        """Reads device tensors as `read_together` does, and checks for errors there since the last look.

        Raises:
            ValueError: a decode step, or a prompt stored by kernels, had keys or values that are not finite; or the
                mask of a decode step did not match the stored tokens.
            RuntimeError: a compaction found too few free pages.
        """
        *arrays, invalid, changed_past, flag = read_together(*tensors, self.invalid, self.changed_past, self.flag)
        if invalid:
            raise unstorable(self.config, self.value_limit)
        if changed_past:
            raise changed_mask()
        if flag:
            raise too_few_pages()
        return arrays


class Changing:
    """Counts a change of stores as unfinished; it stays counted if it ends with an error."""

    def __init__(self, *stores: Store) -> None:
        self._stores = stores

    def __enter__(self) -> None:
        for store in self._stores:
            store.unfinished += 1

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for store in self._stores:
            store.unfinished -= kind is None
