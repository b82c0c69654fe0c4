"""Transformers' own layers next to compressed ones: sliding windows, linear attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .errors import another_batch, stopped_halfway


class OtherStates:
    """Mixin for linear-attention states in a cache with `stores`; forwards that use them take a turn (turns.py).

    Attributes:
        stand_ins: layer of this process with the same length, for each layer that pipeline parallelism put elsewhere.
    """

    stores: Any
    layers: Any
    stand_ins: dict[int, int]

    # masks are made for the first layer of a kind, which may run in another process
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(self.stand_ins.get(layer_idx, layer_idx))  # type: ignore[misc]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, self.stand_ins.get(layer_idx, layer_idx))  # type: ignore[misc]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._reach_states(layer_idx, "update_conv_state", *args, *kwargs.values())
        stores = self.stores.all
        # states of steps are joined in the model
        if stores and not torch.compiler.is_compiling() and conv_states.shape[0] != stores[0].batch_size:
            # nothing has changed
            self.stores.turns.end(undone=True)
            raise another_batch(stores[0].batch_size, conv_states.shape[0])
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        self._reach_states(layer_idx, "update_recurrent_state", *args, *kwargs.values())
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)  # type: ignore[misc]

    # models write into the states they get
    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._reach_states(layer_idx, "get_conv_state", *args, *kwargs.values())
        return super().get_conv_state(layer_idx, *args, **kwargs)  # type: ignore[misc]

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._reach_states(layer_idx, "get_recurrent_state", *args, *kwargs.values())
        return super().get_recurrent_state(layer_idx, *args, **kwargs)  # type: ignore[misc]

    def _reach_states(self, layer_idx: int, *call: Any) -> None:
        if torch.compiler.is_compiling() or self.stores.capturing:
            return
        # its name and the number of the state, if any
        known = tuple(each for each in call if isinstance(each, (str, int)))
        # users look at states between two forwards
        if not known[0].startswith("get") or self.stores.turns.within_module():
            self.stores.reach_other(layer_idx, self.layers[layer_idx], known)


class EarlierLayers:
    """Transformers' own layers that a forward has reached before it stored tokens, as they were before it.

    Attributes:
        open: whether a forward is under way that began with such a layer and has stored no tokens yet.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self.open = self._lost = False

    def begin(self) -> None:
        """Notes layers from now on, as a forward begins."""
        self.end()
        self.open = True

    def note(self, layer: Any) -> None:
        """Notes a layer that is about to change. Models write into states, so these cannot be restored."""
        if not self.open:
            return
        if has_states(layer):
            self._lost = True
        else:
            # updates replace tensors and do not write into them
            self._before.append((layer, dict(vars(layer))))

    def set_back(self) -> bool:
        """Restores the layers. Returns whether all of them are as they were before the forward."""
        for layer, before in self._before:
            vars(layer).clear()
            vars(layer).update(before)
        undone = not self._lost
        self.end()
        return undone

    def end(self) -> None:
        """Drops what was noted, and notes nothing more in this forward."""
        self._before.clear()
        self.open = self._lost = False


def ends_forwards(layers: Sequence[Any], here: Sequence[int]) -> int:
    """Returns the index of the last layer that forwards reach; -1 if this release of Transformers does not show it.

    Args:
        layers: layers of the cache. Transformers puts other objects in the slots of layers without a cache.
        here: indices of the layers in this process.
    """
    # before `get_conv_state` existed, models took states unnoticed
    if not hasattr(Cache, "get_conv_state") and any(map(has_states, layers)):
        return -1
    reached = (i for i in here if isinstance(layers[i], CacheLayerMixin) or has_states(layers[i]))
    return max(reached, default=-1)


def stand_ins(layers: Sequence[Any], absent: Collection[int]) -> dict[int, int]:
    """Returns a layer in this process for each of `absent`: one of the same kind, or else any that counts tokens."""
    counting = [i for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
    here = [i for i in counting if i not in absent]
    alike = {i: [j for j in here if type(layers[j]) is type(layers[i])] for i in counting if i in absent}
    return {i: (same or here)[0] for i, same in alike.items() if here}


def check_lengths(layers: Sequence[Any], layer_idx: int, seen: int, tokens: int, absent: Collection[int]) -> None:
    """Raises `HandOverError` unless sliding windows have seen as many tokens as the first compressed layer.

    Args:
        layers: layers of the cache.
        layer_idx: index of the first compressed layer, which is about to be updated.
        seen: number of tokens that this layer has seen.
        tokens: number of new tokens.
        absent: indices of layers that run in another process, which stay empty here.
    """
    for index, layer in enumerate(layers):
        expected = seen + tokens if index < layer_idx else seen
        if index not in absent and hasattr(layer, "sliding_window") and layer.get_seq_length() != expected:
            raise stopped_halfway()


def check_dtype(layer: Any, key_states: Tensor) -> None:
    """Raises `ValueError` if one of Transformers' own layers holds keys of a different dtype than it is given."""
    held = getattr(layer, "keys", None)
    if isinstance(held, Tensor) and held.dtype != key_states.dtype:
        raise ValueError(
            f"this cache holds {held.dtype} but the model gave {key_states.dtype}; use a new DiffKVCache, or the model "
            "in its earlier dtype."
        )


def check_croppable(layer: Any, tokens_to_remove: int) -> None:
    """Raises `ValueError` if one of Transformers' own layers has dropped tokens that `crop` would have to restore."""
    if tokens_to_remove == 0:
        return
    states = getattr(layer, "recurrent_states", None) or {}
    if any(state is not None for state in states.values()):
        raise ValueError(
            f"cannot remove {-tokens_to_remove} tokens: the recurrent states of a {type(layer).__name__} cannot be "
            "rolled back. Keep a copy.deepcopy of the cache."
        )
    if getattr(layer, "record_past", True):
        return
    if not hasattr(layer, "sliding_window") or layer.get_seq_length() >= layer.sliding_window:
        raise ValueError(
            f"cannot remove {-tokens_to_remove} tokens: a {type(layer).__name__} keeps only what the next token needs. "
            "Call activate_past_recording() before the forward whose tokens may be rejected (generate() does), or keep "
            "a copy.deepcopy of the cache."
        )


def has_states(layer: Any) -> bool:
    """Returns whether a layer has linear-attention states, which a forward may write in several calls."""
    return hasattr(layer, "conv_states")


def release_prompt(layer: Any) -> None:
    """Copies what a sliding window keeps of a prompt, all of which it would otherwise hold until the next step."""
    for name in ("keys", "values"):
        kept = getattr(layer, name, None)
        # a step leaves one token behind, which is not worth a copy
        if isinstance(kept, Tensor) and kept.untyped_storage().nbytes() > 2 * kept.nbytes:
            setattr(layer, name, kept.clone())


def without_gradients(layers: Sequence[Any]) -> dict[int, Tensor]:
    """Copies tensors that a forward with gradients left in Transformers' own layers; `copy.deepcopy` refuses to.

    Returns:
        The copies, by the identity of their originals.
    """
    held = [value for layer in layers for value in vars(layer).values()]
    held += [value for group in held if isinstance(group, dict) for value in group.values()]
    return {id(t): t.detach().clone() for t in held if isinstance(t, Tensor) and t.grad_fn is not None}


def empty_other_layers(layers: Sequence[Any]) -> None:
    """Empties Transformers' own layers of a cache after their `reset`."""
    for layer in layers:
        if isinstance(layer, DynamicLayer):
            # up to Transformers 5.17, these layers keep their old keys, as zeros before the new ones; emptied ones keep
            # their batch size
            layer.keys = layer.values = None
            layer.is_initialized = False
        if has_states(layer):
            _empty_states(layer)


def _empty_states(layer: Any) -> None:
    """Drops linear-attention states; `reset` keeps their size, which depends on the batch and grows while recording."""
    empty = {"conv_states": None, "recurrent_states": None, "has_previous_state": False}
    empty |= {"is_conv_states_initialized": False, "is_recurrent_states_initialized": False}
    for name, value in empty.items():
        setattr(layer, name, dict.fromkeys(getattr(layer, name), value))
