"""Switches models to the "diffkv" attention, and back when the `generate()` calls that needed it have ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..compat import attention_of, attentions_of, set_attentions
from ..import_hook import NAME, PAGED_NAME
from .errors import UnsupportedModelError
from .supported_models import check_attention, check_model_config

_logger = logging.getLogger("hf_diffkv")


@dataclass
class _Calls:
    """The `generate()` calls that run on one model at this moment.

    Attributes:
        calls: how many, those with other caches included: a forward must not see its attention change.
        needed: whether one of them needs "diffkv".
        before: the attention of every configuration before the first of them switched it; None while none has.
    """

    calls: int = 0
    needed: bool = False
    before: list[tuple[Any, str | None]] | None = None


# by the identity of the model's configuration, which lives as long as the calls
_uses: dict[int, _Calls] = {}
_lock = threading.Lock()


@contextmanager
def attention_set_back(model: Any) -> Iterator[None]:
    """Sets the attention of `model` back to what it was, once the last of the calls inside has ended."""
    key = id(model.config)
    with _lock:
        use = _uses.setdefault(key, _Calls())
        use.calls += 1
    try:
        yield
    finally:
        with _lock:
            use.calls -= 1
            if use.calls == 0:
                del _uses[key]
                # whoever has chosen another attention meanwhile keeps that
                if use.before is not None and _is_switched(model):
                    set_attentions(use.before)


def needs_diffkv(model: Any) -> bool:
    """Whether a `generate()` call that runs on `model` needs the "diffkv" attention."""
    with _lock:
        use = _uses.get(id(model.config))
        return use is not None and use.needed


def runs_batches(model: Any) -> bool:
    """Whether `model` has the attention of continuous batching with a compressed cache."""
    return attention_of(model.config.get_text_config(decoder=True)) == PAGED_NAME


def ensure_attention(model: Any) -> None:
    """Switches the decoder of `model` to the "diffkv" attention; within `attention_set_back`, for as long.

    Raises:
        UnsupportedModelError: its attention cannot be switched, or the cache cannot work with it.
    """
    check_model_config(model.config)
    check_attention(model)
    with _lock:
        # outside of calls nothing is set back
        use = _uses.get(id(model.config), _Calls())
        use.needed = True
        if _is_switched(model):
            return
        use.before = attentions_of(model)
        set_attention(model, NAME)
        if attention_of(model.config.get_text_config(decoder=True)) not in (NAME, None):
            raise UnsupportedModelError(f"{type(model).__name__} refused the attention implementation 'diffkv'.")
    _logger.info("switched %s to attn_implementation='diffkv'", type(model).__name__)


def set_attention(model: Any, name: str) -> None:
    """Sets the attention implementation of the decoder of `model`; other parts, an image encoder say, keep theirs."""
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        model.set_attn_implementation(name)
    else:
        part = next(key for key in model.config.sub_configs if getattr(model.config, key, None) is text_config)
        model.set_attn_implementation({part: name})


def _is_switched(model: Any) -> bool:
    return attention_of(model.config.get_text_config(decoder=True)) == NAME
