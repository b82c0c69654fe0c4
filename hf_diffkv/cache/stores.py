"""Assigns layers to stores: one store per device, head shape and page format."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..config import DiffKVConfig
from ..config.layers import layer_configs, same_pages
from ..heads.harm import HarmBetween
from ..heads.query_moments import QueryMoments
from ..store import KVHeads, Store, begin_forward, drop_unused_layers, look_together, settle, withdraw
from .devices import TensorParallel, absent_layers, layer_devices, layer_shapes
from .errors import HandOverError, forward_under_way, stopped_halfway
from .free_memory import budget_of
from .inference import ordinary_tensors
from .other_layers import EarlierLayers
from .turns import ForwardTurns

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def between_forwards(method: MethodT) -> MethodT:
    """Makes a method of an object with `stores` wait for its turn between two forwards (`Stores.between_forwards`)."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.stores.between_forwards():
            return method(self, *args, **kwargs)

    return cast(MethodT, alone)


def reports(method: MethodT) -> MethodT:
    """Works like `between_forwards`, but raises `HandOverError` while later layers have shared tokens left to read."""

    @wraps(method)
    def report(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.stores.between_forwards():
            if self.stores.awaited is not None:
                raise forward_under_way()
            return method(self, *args, **kwargs)

    return cast(MethodT, report)


class Stores:
    """All stores of one cache.

    Args:
        config: the user's configuration.
        num_layers: number of compressed layers of the model.
        max_positions: maximum number of tokens of a request; None if unknown.

    Attributes:
        configs: configuration of each layer (`DiffKVConfig.of_layer`).

    Raises:
        ValueError: thresholds or precisions are given for a different number of layers.
    """

    def __init__(self, config: DiffKVConfig, num_layers: int, max_positions: int | None = None) -> None:
        self.config = config
        self.configs = layer_configs(config, num_layers)
        self.num_layers = num_layers
        self.max_positions = max_positions
        self.all: list[Store] = []
        # moments of the model's queries, if known; stores read them
        self.moments: QueryMoments | None = None
        # loss from lowering heads, if known
        self.harm: HarmBetween | None = None
        # `max_bytes` in bytes, by device
        self._budgets: dict[torch.device, int] = {}
        # logical tokens seen by each layer; the layers refer to this object, which must not refer back to them, or a
        # dropped cache would keep its memory until Python's garbage collector runs
        self.seen = [0] * num_layers
        self.recording = False
        # whether the layers cache latents
        self.latent = False
        # set while a decode step is being captured (graphs.py)
        self.capturing = False
        # whether that step has a mask: kernels are compiled separately for both cases, and a capture must not compile
        self.capturing_mask = False
        # set together with `capturing` while the forward only warms up: stored data must not change
        self.rehearsing = False
        self.pending: int | None = None
        # the layer whose keys and values later layers have yet to read
        self.awaited: int | None = None
        # whether no second forward has begun
        self._broken = self._in_first = False
        # turns of forwards and of other users of the cache
        self.turns = ForwardTurns()
        # whether the cache also has Transformers' own layers, and those before the first compressed one
        self.has_other_layers = False
        self.earlier = EarlierLayers()
        self.order = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.tensor_parallel = TensorParallel()
        # device of each compressed layer; None: one device for all, or unknown
        self.devices: list[torch.device] | None = None
        # number of KV heads, key_dim and value_dim of compressed layers, where the model reveals them
        self.shapes: dict[int, tuple[int, int, int]] = {}
        # compressed layers of the model that run in other processes
        self.absent: set[int] = set()
        # number of later layers that read the keys and values of each layer
        self.readers: dict[int, int] = {}
        # layers replaced by one of Transformers' own
        self.kept_dense: set[int] = set()
        self._places: dict[int, tuple[Store, int]] = {}

    def attach(self, model: Any, compressed_layers: list[int]) -> None:
        """Notes which devices `model` runs on.

        Args:
            compressed_layers: index of each compressed layer in the model.
        """
        devices = layer_devices(model)
        known = all(layer_idx in devices for layer_idx in compressed_layers)
        self.devices = [devices[layer_idx] for layer_idx in compressed_layers] if known else None
        absent = absent_layers(model, compressed_layers)
        self.absent = {index for index, layer_idx in enumerate(compressed_layers) if layer_idx in absent}
        self.absent |= self.kept_dense
        self.note_shapes(model, compressed_layers)

    def note_shapes(self, model: Any, compressed_layers: list[int]) -> None:
        """Notes the layer shapes of `model`, if it is a loaded model that reveals them; arguments as in `attach`."""
        if self.tensor_parallel.size == 1 and not self.latent:
            found = layer_shapes(model)
            places = enumerate(compressed_layers)
            self.shapes = {index: found[layer_idx] for index, layer_idx in places if layer_idx in found}

    def use_moments(self, moments: QueryMoments) -> None:
        """Rounds generated keys with moments of the model's queries from now on.

        Raises:
            ValueError: the moments belong to a different model.
        """
        moments.check_layers(self.num_layers)
        for index, (store, _) in self._places.items():
            self._check_moments(moments, index, store)
        self.moments = moments
        for store in self.all:
            store.moments = moments

    def _check_moments(self, moments: QueryMoments, index: int, store: Store) -> None:
        moments.check_layer(index, self.tensor_parallel.size * store.num_heads, store.key_dim)

    def place(self, index: int, key: Tensor, value: Tensor) -> tuple[Store, int]:
        """Assigns a layer to a store that fits its keys and values, and makes the store if needed.

        Returns:
            The store, and the layer's index in it.

        Raises:
            ValueError: no store can be made for these keys and values.
            MemoryError: the windows do not fit into `max_bytes`.
        """
        if key.ndim != 4 or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"keys {tuple(key.shape)} and values {tuple(value.shape)} must be [batch, heads, tokens, head_dim]."
            )
        batch, dims = key.shape[0], (key.shape[1], key.shape[3], value.shape[3])
        heads = KVHeads(*dims, key.dtype, key.device, self.latent)
        config = self.of_layer(index, key.shape[1])
        store = next((store for store in self.all if self._fits(store, batch, heads, config)), None)
        before = list(self.all)
        try:
            if store is None:
                store = self._new_store(index, batch, heads)
            used = self._used(store)
            store.place_layer(used, index)
            alphas = (config.alpha_high, config.alpha_low)
            share = self.tensor_parallel.share
            store.set_thresholds(used, *(share(a, store.num_heads) if isinstance(a, tuple) else a for a in alphas))
        except BaseException:
            self.all[:] = before
            raise
        self.assign(index, store, used)
        return store, used

    def _new_store(self, index: int, batch: int, heads: KVHeads) -> Store:
        """Makes the store of a layer, and of the layers to come if rows are lowered, so that room is made for all.

        Raises:
            ValueError: the cache holds a different number of sequences, or raised by `Store`.
            MemoryError: raised by `Store` and `update_limit`. The caller drops what was made by then.
        """
        first = len(self.all)
        if first and self.all[0].batch_size != batch:
            held = self.all[0].batch_size
            raise ValueError(f"this cache holds {held} sequences but the model was called with {batch}.")
        for layer in (index, *self._to_come(index, heads.device)):
            known = None if layer == index else self.shapes.get(layer)
            sizes = {} if known is None else dict(zip(("num_heads", "key_dim", "value_dim"), known))
            wanted = dataclasses.replace(heads, **sizes)
            if layer != index and any(self._fits(store, batch, wanted, self.configs[layer]) for store in self.all):
                continue
            store = self.make_store(layer, self._layers_to_come(heads.device, layer), batch, wanted)
            store.recording = self.recording
            for slot, other in enumerate(self._alike(heads.device, layer) if store.lowering.active else ()):
                store.place_layer(slot, other)
                self._note_final(other, store, slot)
            self.all.append(store)
            self._make_room_beside(store)
        return self.all[first]

    def _to_come(self, index: int, device: torch.device) -> list[int]:
        """Returns the layers after layer `index` that need a place on `device`, if rows are lowered to fit a budget."""
        if self.config.precise is None:
            return []
        return [layer for layer in self._without_place(device) if layer > index]

    def make_store(self, index: int, layers: int, batch_size: int, heads: KVHeads) -> Store:
        """Makes a store for `layers` layers of this model, including `index`; arguments as in `Store`."""
        first_head = self.tensor_parallel.rank * heads.num_heads
        sizes = {"total_layers": self.num_layers, "first_head": first_head, "max_positions": self.max_positions}
        config = self.configs[index]
        if config.max_bytes is not None:
            if heads.device not in self._budgets:
                self._budgets[heads.device] = budget_of(config.max_bytes, heads.device)
            config = dataclasses.replace(config, max_bytes=self._budgets[heads.device])
        try:
            store = Store(config, layers, batch_size, heads, **sizes)
        except RuntimeError as error:
            # what PyTorch raises without a GPU, or for sizes beyond any memory
            if not any(part in str(error) for part in ("DefaultCPUAllocator", "overflow")):
                raise
            raise MemoryError(
                f"a window of {config.window} and {config.sinks} sinks, which are held uncompressed from the start, do "
                "not fit in memory; lower them or the batch size."
            ) from error
        store.moments, store.lowering.harm = self.moments, self._harm_of(store)
        return store

    def _harm_of(self, store: Store) -> np.ndarray | None:
        """Returns `LoweringState.harm` of a store; zero for layers with a different number of heads."""
        if self.harm is None:
            return None
        heads = store.num_heads
        moves = [self.harm(*pair) for pair in zip(store.precisions, store.precisions[1:])]
        if None in moves:
            return None
        shared = [[self.tensor_parallel.share(layer, heads) for layer in move] for move in moves]
        return np.array([[layer if len(layer) == heads else (0.0,) * heads for layer in move] for move in shared])

    def _make_room_beside(self, store: Store) -> None:
        self.share_budget(store)
        try:
            store.update_limit()
        except MemoryError:
            # other stores reserve memory for layers that turned out to have a different shape or device
            for other in filter(self._used, self._on(store.device)):
                drop_unused_layers(other, self._used(other))
            self.share_budget(store)
            store.update_limit()

    def _fits(self, store: Store, batch: int, heads: KVHeads, config: DiffKVConfig) -> bool:
        alike = store.batch_size == batch and store.heads == heads and same_pages(store.config, config)
        return alike and self._used(store) < store.num_layers

    def _used(self, store: Store) -> int:
        return sum(place[0] is store for place in self._places.values())

    def _layers_to_come(self, device: torch.device, index: int) -> int:
        """Counts the layers without a place that may need one on `device`, together with layer `index`."""
        return max(1, len(self._alike(device, index)))

    def _alike(self, device: torch.device, index: int) -> list[int]:
        """Returns the layers without a place that may need one on `device`, with heads and pages like layer `index`."""
        alike = [layer for layer in self._without_place(device) if same_pages(self.configs[layer], self.configs[index])]
        return [layer for layer in alike if self.shapes.get(layer) == self.shapes.get(index)]

    def _without_place(self, device: torch.device) -> list[int]:
        """Returns the layers without a place that may need one on `device`."""
        left = sorted(set(range(self.num_layers)) - set(self._places) - self.absent)
        return [layer for layer in left if self.devices is None or self.devices[layer] == device]

    def of_layer(self, index: int, heads: int) -> DiffKVConfig:
        """Returns the configuration of a layer with `heads` KV heads here.

        Raises:
            ValueError: the configuration has precisions for a different number of heads.
        """
        chosen = None if self.config.head_precisions is None else self.config.head_precisions[index]
        if chosen is not None and len(self.tensor_parallel.share(chosen, heads)) != heads:
            raise ValueError(
                f"head_precisions[{index}] has {len(chosen)} entries but the layer has {heads} KV heads here; give "
                f"{heads}, or under tensor parallelism call cache.attach(model) first."
            )
        return self.configs[index]

    def reach(self, layer_idx: int) -> None:
        """Notes that a forward reaches the compressed layer `layer_idx` of the model."""
        if self.turns.reach(layer_idx) and self.earlier.open:
            self.earlier.end()

    def reach_other(self, layer_idx: int, layer: Any, call: tuple = ("update",)) -> None:
        """Notes that a forward reaches one of Transformers' own layers by `call` (`turns.reach`) and may change it."""
        if self.turns.reach(layer_idx, call, is_stock=True):
            self.earlier.begin()
        if self.num_layers:
            self.earlier.note(layer)

    def starts_forward(self, index: int) -> bool:
        """Returns whether this layer is the first of a forward: no other layer has seen more tokens."""
        return max(self.seen) <= self.seen[index]

    def begin(self, tokens: int) -> None:
        """Starts a forward of `tokens` tokens in every store.

        Raises:
            HandOverError: an earlier forward stopped halfway.
            ValueError, MemoryError: raised by `begin_forward`; all stores are then unchanged.
        """
        self.check_complete(begins=True)
        begun = []
        try:
            if any(store.seen for store in self.all):  # all layers are known after the first forward
                self.all[:] = filter(self._used, self.all)
            for store in self.all:
                # before another store lowers its rows
                settle(store)
            look_together(self.all)
            for store in self.all:
                if store.seen:
                    drop_unused_layers(store, self._used(store))
                self.share_budget(store)
                begin_forward(store, tokens)
                begun.append(store)
        except BaseException:
            for store in begun:
                withdraw(store, tokens)
            raise
        self._in_first = max(self.seen) == 0

    def record(self, recording: bool) -> None:
        """Begins or ends the recording of new tokens (store/rollback.py)."""
        self.recording = recording
        for store in self.all:
            settle(store)
            store.recording = recording

    @contextmanager
    def between_forwards(self, whatever_runs: bool = False) -> Iterator[None]:
        """Takes a turn (`ForwardTurns.between`) to read or change the stores, once other threads are done."""
        with self.turns.between(whatever_runs), ordinary_tensors():
            other = self.turns.last_forward not in (None, threading.get_ident())
            devices = {store.device for store in self.all if other and store.device.type == "cuda"}
            # threads may have their own streams
            for device in devices:
                torch.cuda.synchronize(device)
            yield
            for device in devices:
                torch.cuda.synchronize(device)

    def in_step(self) -> AbstractContextManager:
        """Returns `TensorParallel.in_step` for work on all stores."""
        if not self.all or self.tensor_parallel.group is None:
            return nullcontext()
        return self.tensor_parallel.in_step(self.all[0].device)

    def check_place(self, tokens: int) -> None:
        """Raises `HandOverError` if a layer that gets its first `tokens` tokens missed earlier ones."""
        if max(self.seen) > tokens:
            self.broken = True
            self.check_usable()

    def check_complete(self, begins: bool = False) -> None:
        """Raises `HandOverError` unless every layer took part in every forward so far.

        A model may lack layers of its configuration, so those without tokens count only between the first forward and
        the second; `begins` says that one begins.
        """
        stopped = self._in_first and not (begins or self.turns.last_layer_came)
        seen = {seen for index, seen in enumerate(self.seen) if seen or stopped and index not in self.absent}
        self.broken |= len(seen) > 1
        self.check_usable()

    def check_read(self) -> None:
        """Raises `HandOverError` unless all layers that share keys and values have attended to them."""
        if self.awaited is not None:
            self.broken = True
            raise HandOverError(
                "not all layers that share the keys and values of an earlier layer attended to them: the forward "
                "stopped halfway, or the model has fewer such layers than its configuration says. Call cache.reset() "
                "before using this cache again."
            )

    @property
    def broken(self) -> bool:
        """Whether a forward, or a change between two, stopped halfway."""
        return self._broken or any(store.unfinished for store in self.all)

    @broken.setter
    def broken(self, value: bool) -> None:
        self._broken = value

    def check_usable(self) -> None:
        """Raises `HandOverError` after a forward that is known to have stopped halfway."""
        if self.broken or self.turns.halfway:
            raise stopped_halfway()

    def give_up(self, index: int, error: BaseException) -> None:
        """Ends a forward that could not give a layer tokens: undoes it in the first layer, else breaks the cache."""
        # what other layers or ranks did for this forward, or an interrupted beginning, cannot be undone from here
        alone = self.tensor_parallel.size == 1 or not isinstance(error, MemoryError)
        begun = any(store.seen > self.seen[index] for store in self.all)
        undone = self.starts_forward(index) and alone and not (begun or self.broken) and self.earlier.set_back()
        self.broken |= not undone
        self.turns.end(undone)

    def abandon(self, index: int, tokens: int) -> bool:
        """Handles a layer's failure to store `tokens` tokens, which ends the forward.

        The forward is undone if this layer is its first one; otherwise the cache is marked as broken.

        Returns:
            Whether no tokens are left, so that all stores were dropped.
        """
        others = [seen for other, seen in enumerate(self.seen) if other != index and seen]
        # other ranks may have stored their tokens already
        if self.broken or self.tensor_parallel.size > 1 or any(seen >= self.seen[index] for seen in others):
            self.broken = True
            self.turns.end()
            return False
        self.seen[index] -= tokens
        for store in self.all:
            withdraw(store, tokens)
        undone = self.earlier.set_back()
        empty = not others and self.seen[index] == 0
        if empty:
            self.clear()
        self.broken |= not undone
        self.turns.end(undone)
        return empty

    def assign(self, index: int, store: Store, slot: int) -> None:
        """Sets the place of a layer, in a store of this cache or in a new one.

        Raises:
            ValueError: the moments of the model's queries belong to different heads.
        """
        if self.moments is not None:
            self._check_moments(self.moments, index, store)
        if not any(store is other for other in self.all):
            self.all.append(store)
        self._note_final(index, store, slot)
        self._places[index] = (store, slot)
        here = self.readers.keys() - self.absent
        for each in self.all:
            # layers without a place may get one there
            each.readers = sum(self.readers[i] for i in here if self._places.get(i, (each, 0))[0] is each)

    def _note_final(self, index: int, store: Store, slot: int) -> None:
        """Tells a store that lowers rows which heads it may lower in the layer whose place is or will be `slot`."""
        alphas = self.configs[index].alpha_high
        share = self.tensor_parallel.share(alphas, store.num_heads) if isinstance(alphas, tuple) else alphas
        if store.lowering.active and not (isinstance(share, tuple) and len(share) != store.num_heads):
            store.lowering.note_final(slot, share, (store.num_layers, store.num_heads))

    def share_budget(self, store: Store, more_requests: int = 0) -> None:
        """Tells `store`, before it may grow, how much of `max_bytes` the others on its device hold or will need.

        Args:
            more_requests: number of requests by which the batch of the other stores will grow.
        """
        if self.config.max_bytes is None:
            return
        known = store.lowering.together and store.steps_left > 0 and store.twins is None
        if known and not more_requests and not store.recording:
            # nothing grows before the next look, and what it needs is known by then
            return
        stores = self._on(store.device)
        store.lowering.together = tuple(map(weakref.ref, stores))
        others = [other for other in stores if other is not store]
        store.taken = sum(
            other.bytes + (other.bytes - other.pool.bytes) * more_requests // other.batch_size for other in others
        )
        store.layers_later = sum(other.num_layers for other in others if other.padding.length < store.seen)

    def _on(self, device: torch.device) -> list[Store]:
        return [store for store in self.all if store.device == device]

    def clear(self) -> None:
        """Drops all stores and their memory."""
        self.pending = self.awaited = None
        self.broken = self.turns.halfway = False
        self.earlier.end()
        self.recording = False
        self._budgets.clear()
        self.all.clear()
        self._places.clear()
