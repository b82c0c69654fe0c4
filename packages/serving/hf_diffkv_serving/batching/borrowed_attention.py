"""Switches the attention of models while managers of continuous batching use them.

A model gets its own attention back once none of its managers runs, or when the last one is dropped.
"""

from __future__ import annotations

import weakref
from typing import Any

from transformers import AttentionInterface

from hf_diffkv.cache.switching import set_attention
from hf_diffkv.compat import attention_of, can_switch
from hf_diffkv.import_hook import PAGED_NAME

from .attention import paged_attention

# by model: its own attention, and the managers that use it
_own: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_managers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def borrow(model: Any, manager: Any) -> None:
    """Switches `model` to the packed attention for `manager`. Raises `ValueError` if that is impossible."""
    current = attention_of(model.config.get_text_config(decoder=True))
    if current != PAGED_NAME:
        if not can_switch(model):
            raise ValueError(f"the attention of {type(model).__name__} cannot be switched to {PAGED_NAME!r}.")
        AttentionInterface.register(PAGED_NAME, paged_attention)
        set_attention(model, PAGED_NAME)
        if current is not None:
            _own[model] = current
    _managers.setdefault(model, weakref.WeakSet()).add(manager)


def give_back(model: Any, manager: Any) -> None:
    """Notes that `manager` no longer needs `model`. Managers that are not running borrow it again on start."""
    _managers.get(model, weakref.WeakSet()).discard(manager)
    if not any(other.is_running() for other in _managers.get(model, ())):
        _restore(model)


def give_back_when_dropped(model: Any, manager: Any) -> None:
    """Gives `model` its attention back once `manager` is dropped without being stopped."""
    weakref.finalize(manager, _note_dropped, weakref.ref(model)).atexit = False


def _note_dropped(reference: weakref.ref[Any]) -> None:
    model = reference()
    if model is not None and not _managers.get(model):
        _restore(model)


def _restore(model: Any) -> None:
    own = _own.pop(model, None)
    if own is not None:
        set_attention(model, own)
