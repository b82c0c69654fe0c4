"""Switches models to the "diffkv" attention, and back after the `generate()` calls that needed it."""

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
from .supported_models import check_attention

_logger = logging.getLogger("hf_diffkv")


@dataclass
class _Calls:
    """The running `generate()` calls on one model.

    Attributes:
        calls: number of calls, including those with other caches, as attention must not change during a forward.
        needed: whether one of the calls needs "diffkv".
        before: attention of every configuration before a call switched it; None if none has.
    """

    calls: int = 0
    needed: bool = False
    before: list[tuple[Any, str | None]] | None = None


# keys are identities of the models' configurations, which live as long as the calls
_uses: dict[int, _Calls] = {}
_lock = threading.Lock()


@contextmanager
def attention_set_back(model: Any) -> Iterator[None]:
    """Restores the attention of `model` once the last of its calls within such a block has ended."""
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
                # an attention that the user has chosen in the meantime stays
                if use.before is not None and _is_switched(model):
                    set_attentions(use.before)


def needs_diffkv(model: Any) -> bool:
    """Returns whether a running `generate()` call on `model` needs the "diffkv" attention."""
    with _lock:
        use = _uses.get(id(model.config))
        return use is not None and use.needed


def runs_batches(model: Any) -> bool:
    """Returns whether `model` has the attention of continuous batching with a compressed cache."""
    return attention_of(model.config.get_text_config(decoder=True)) == PAGED_NAME


def ensure_attention(model: Any) -> None:
    """Switches the decoder of `model` to the "diffkv" attention; `attention_set_back` restores the former one.

    Raises:
        UnsupportedModelError: the model's attention cannot be switched.
    """
    check_attention(model)
    with _lock:
        # outside calls, nothing is restored
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
    """Sets the attention of the decoder of `model`; other parts, such as an image encoder, keep theirs."""
    text_config = model.config.get_text_config(decoder=True)
    if text_config is model.config:
        model.set_attn_implementation(name)
    else:
        part = next(key for key in model.config.sub_configs if getattr(model.config, key, None) is text_config)
        model.set_attn_implementation({part: name})


def _is_switched(model: Any) -> bool:
    return attention_of(model.config.get_text_config(decoder=True)) == NAME
