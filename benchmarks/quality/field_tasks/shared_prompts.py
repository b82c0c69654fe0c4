"""Reads a prompt once for several methods.

Caches that attend to a prompt exactly and compress it afterwards get the same queries, keys and values from the model,
up to rounding, because only the attention function differs. The model reads the prompt once with the dense cache, and
every layer's queries, keys and values are recorded. Each method's own cache then receives them through its `update`
and, if it is a `DiffKVCache`, its attention function, as in a forward of the method. From the second generated token
on, the method's own `generate()` runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hf_diffkv_evaluation.methods.transformers_caches import QuantizedMethod
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_diffkv.cache.diffkv_cache import DiffKVCache
from hf_diffkv.compat import attention_of, passing
from hf_diffkv.evaluation.methods import Method
from hf_diffkv.evaluation.methods.base import using_attention
from hf_diffkv.evaluation.methods.dense import DenseMethod
from hf_diffkv.evaluation.methods.diffkv import DiffKVMethod
from hf_diffkv.evaluation.session import Session

# attention whose prompts are recorded, and its name when wrapped
DENSE_ATTENTION, NOTING = "sdpa", "field-noting"
SHARING = (DenseMethod, QuantizedMethod, DiffKVMethod)


@dataclass
class ReadPrompt:
    """A prompt that the model has read.

    Attributes:
        ids: token ids of the prompt.
        layers: arguments of the attention function by layer: module, query, key, value and options.
        token: most likely next token.
        seconds: duration of the forward.
    """

    ids: tuple[int, ...]
    layers: dict[int, tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]] = field(default_factory=dict)
    token: int = -1
    seconds: float = 0.0


def can_share(method: Method, model: Any) -> bool:
    """Returns whether a method's cache may take over a prompt that the dense cache read."""
    return type(method) in SHARING and attention_of(model.config) == DENSE_ATTENTION


@torch.no_grad()
def read_prompt(model: Any, ids: Sequence[int]) -> ReadPrompt:
    """Reads a prompt with the dense cache."""
    prompt = ReadPrompt(tuple(ids))
    started = time.perf_counter()
    with _noting(model, prompt):
        output = model(
            input_ids=torch.tensor([list(ids)], device=model.device),
            **passing(DynamicCache(config=model.config)),
            use_cache=True,
            logits_to_keep=1,
        )
    prompt.token = int(output.logits[0, -1].float().argmax())
    prompt.seconds = time.perf_counter() - started
    return prompt


@torch.no_grad()
def hand_over(model: Any, method: Method, prompt: ReadPrompt) -> Session:
    """Makes a session of a method whose own cache has taken over the prompt."""
    session = Session(model, method)
    cache = session.cache
    with method.attached(model, cache):
        attention = ALL_ATTENTION_FUNCTIONS[attention_of(model.config)]
        if isinstance(cache, DiffKVCache):
            cache.attach(model)
        for index, (module, query, key, value, options) in sorted(prompt.layers.items()):
            key, value = cache.update(key, value, index)
            if isinstance(cache, DiffKVCache):
                attention(module, query, key, value, None, **options)
    session.ids = list(prompt.ids)
    return session


@contextmanager
def _noting(model: Any, prompt: ReadPrompt) -> Iterator[None]:
    """Records the attention of all layers of `model` within the block."""
    dense = ALL_ATTENTION_FUNCTIONS[DENSE_ATTENTION]

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        known = {name: options[name] for name in ("scaling", "softcap", "s_aux") if options.get(name) is not None}
        prompt.layers[module.layer_idx] = (module, query, key, value, known)
        return dense(module, query, key, value, mask, **options)

    AttentionInterface.register(NOTING, note)
    AttentionMaskInterface.register(NOTING, ALL_MASK_ATTENTION_FUNCTIONS[DENSE_ATTENTION])
    with using_attention(model, NOTING):
        yield
