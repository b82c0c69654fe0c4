"""Layers that cache latents (multi-head latent attention; docs/latent.md).

Models of this kind give `update` a latent and a rotary key for each token, and expand all of them into keys and values
with their method `expand_kv` before they call the attention function. The method is wrapped once for each class:
latents that carry a `LatentLayer` reach the attention function as they are. All others (training, other caches, layers
with sliding windows) are expanded as before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING

from ..compat import Wrapped, has_attention, parameters_of
from ..config import DiffKVConfig
from ..config.latent import check_precisions, has_latents
from ..import_hook import NAME
from ..store.latent import ExpandedAttention
from .devices import TensorParallel
from .errors import HandOverError, UnsupportedModelError
from .latent_weights import Projection
from .layer import LAYER_TAG, DiffKVLayer

EXPAND_METHOD = "expand_kv"
EXPAND_PARAMETERS = ["kv_nope", "k_rot"]
_wrapped = Wrapped()


def wrap_classes(text_config: Any, model: Any) -> None:
    """Wraps `expand_kv` of the model's attention classes. A second call does nothing.

    Args:
        text_config: configuration of a model that caches latents.
        model: the model, or its configuration.

    Raises:
        UnsupportedModelError: no class of the model expands latents in the known way.
    """
    if isinstance(model, nn.Module):
        found = {kind for kind in map(type, model.modules()) if hasattr(kind, EXPAND_METHOD)}
    else:
        found = _classes_of(text_config)
    if not found or any(_parameters(owner) != EXPAND_PARAMETERS for owner in found):
        raise UnsupportedModelError(
            f"{text_config.model_type} has latents (multi-head latent attention), but its code does not expand them "
            "the way Transformers' own models do, so DiffKVCache cannot be used; use DynamicCache."
        )
    for owner in found:
        if not any(getattr(vars(base).get(EXPAND_METHOD), "_diffkv", False) for base in owner.__mro__):
            _wrapped.wrap(owner, EXPAND_METHOD, _wrap)


def unwrap_classes() -> None:
    """Undoes `wrap_classes`."""
    _wrapped.undo()


def prepare_latents(config: DiffKVConfig, text_config: Any, model: Any) -> bool:
    """Checks the precisions and wraps the classes of a model, or of its configuration, if it caches latents.

    Returns:
        Whether the model caches latents.

    Raises:
        ValueError: rotary keys would have too few bits.
        UnsupportedModelError: the model expands latents in an unknown way.
    """
    if not has_latents(text_config):
        return False
    check_precisions(config)
    wrap_classes(text_config, model)
    return True


def check_latent_model(model: Any) -> None:
    """Wraps the classes of a model and raises `UnsupportedModelError` if its heads are split among processes."""
    size = TensorParallel.of(model).size
    if size > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is split among {size} processes (tensor parallelism), which DiffKVCache does not "
            "support for models that cache latents; load it without tp_plan, or use DynamicCache."
        )
    wrap_classes(model.config.get_text_config(decoder=True), model)


def _classes_of(text_config: Any) -> set[type]:
    """Returns the attention classes in the module that defines Transformers' model for a configuration."""
    made = MODEL_MAPPING.get(type(text_config), None)
    made = made[0] if isinstance(made, (list, tuple)) else made
    names = vars(sys.modules[made.__module__]) if made is not None else {}
    return {found for found in names.values() if isinstance(found, type) and EXPAND_METHOD in vars(found)}


def _parameters(owner: type) -> list[str] | None:
    return parameters_of(inspect.unwrap(getattr(owner, EXPAND_METHOD)))


def _wrap(original: Callable) -> Callable:
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        layer = getattr(kv_nope, LAYER_TAG, None)
        tagged = layer is not None and layer is getattr(k_rot, LAYER_TAG, None)
        # with a different attention, the tokens stay pending, which the cache reports
        if not tagged or not has_attention(self.config, NAME):
            return original(self, kv_nope, k_rot)
        return k_rot, kv_nope

    return expand_kv


class LatentLayer(DiffKVLayer):
    """Compressed layer of latents with one head: its key is the rotary key, its value the latent.

    Attributes:
        expand: function that expands latents in the next `attend`; None attends with absorbed queries.
    """

    has_latents = True
    expand: Callable | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announces new tokens.

        Args:
            key_states: latents, [batch, 1, tokens, rank].
            value_states: rotary keys, [batch, 1, tokens, rope_dim].

        Returns:
            Aliases of both, marked so that `expand_kv` and the attention function find this layer.

        Raises:
            HandOverError: these are not latents.
            ValueError: batch size, dimensions, dtype or device differ from before.
            MemoryError: the tokens do not fit.
        """
        if key_states.shape[1] != 1 or value_states.shape[1] != 1:
            raise HandOverError(
                f"this model caches {key_states.shape[1]} heads although its configuration has latents; it cannot use "
                "DiffKVCache."
            )
        rope, latent = self.announce(value_states, key_states)
        return latent, rope

    @property
    def keys(self) -> Tensor | None:
        """Dense copy of the stored latents, [batch, 1, seen, rank], as in Transformers' layers."""
        return self._dense("values")

    @property
    def values(self) -> Tensor | None:
        """Dense copy of the stored rotary keys, [batch, 1, seen, rope_dim]."""
        return self._dense("keys")

    def enter(
        self, module: nn.Module, query: Tensor, latent: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
        """Prepares the attention of announced tokens.

        Args:
            module: attention module of the model.
            query: query states of the model, [batch, heads, tokens, nope_dim + rope_dim].
            latent: the new tokens' latents.

        Returns:
            The query for `attend`, and a function that turns its output into the model's; None if it already is.

        Raises:
            UnsupportedModelError: the module's projection cannot be used (`Projection.of`).
        """
        try:
            projection = Projection.of(module, latent)
        except BaseException:
            if self.pending is not None:
                self.abandon(query.shape[2])
            raise
        if not torch.compiler.is_compiling() and not self.stores.recording:
            tokens = query.shape[2]
            past = self.seen if self.pending is None else self.seen - tokens
            if projection.expands(tokens, past):
                self.expand = module.expand_kv
                return query, None
        return projection.absorb(query), projection.values

    def _begin(self, key: Tensor, value: Tensor) -> None:
        # an earlier forward may have ended between `enter` and its attention
        self.expand = None
        super()._begin(key, value)

    def _new_tokens(self, key: Tensor, value: Tensor, valid: Tensor | None, mask: Tensor | None) -> Any:
        expand, self.expand = self.expand, None
        if expand is None:
            return super()._new_tokens(key, value, valid, mask)
        return ExpandedAttention(expand, self.store, self.slot, key, value, valid, mask)
