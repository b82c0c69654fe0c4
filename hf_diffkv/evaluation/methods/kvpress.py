"""Presses of kvpress by name and share of the prompt's tokens that they remove: `kvpress:snapkv+0.57`.

Whole numbers of a press follow: `kvpress:snapkv+0.57+window_size=16`. `adakv-` before a press lets the heads of a layer
share its budget (AdaKV). kvpress needs an older Transformers than this library, so these methods run in an environment
of their own: `make kvpress`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from ...compat import attention_of
from ..errors import EvaluationError, unknown
from . import method
from .base import HeldBytes, Method, attends_fully, tensor_bytes

PRESSES = {
    "expected-attention": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "lagkv": "LagKVPress",
    "observed-attention": "ObservedAttentionPress",
    "pyramidkv": "PyramidKVPress",
    "random": "RandomPress",
    "snapkv": "SnapKVPress",
    "streaming-llm": "StreamingLLMPress",
    "tova": "TOVAPress",
}
ADAKV = "adakv-"
# it reads the attention weights, which only eager attention returns; AdaKV does not run on that
EAGER = "observed-attention"
# layers as large as PyramidKV wants them: AdaKV would overrule that
WITHOUT_ADAKV = (EAGER, "pyramidkv")


class KVPressMethod(Method):
    """A press on a `DynamicCache`: compresses the prompt, once, and keeps all that follows.

    A press that removes the same number of tokens from all heads of a layer really frees them. AdaKV removes different
    numbers, and kvpress hides those tokens from attention instead of freeing them: bytes are those of the tokens that
    it keeps, which is `simulated`.

    Args:
        press: a key of `PRESSES`, or one behind `adakv-`.
        ratio: share of tokens to remove, from 0 to below 1.
        numbers: further arguments of the press, for example `window_size`.
    """

    environment = "kvpress"
    drops_tokens = True
    packages = ("kvpress", "transformers")

    def __init__(self, press: str, ratio: float, numbers: dict[str, int]) -> None:
        self.press, self.ratio, self.numbers = press, ratio, numbers
        # hidden tokens get keys that no query of a forward attends to, which are the harder to find the more there are
        self.asks_at_once = not press.startswith(ADAKV)

    def new_cache(self, model: Any) -> Any:
        if not attends_fully(model):
            raise ValueError("kvpress also shortens sliding-window layers, which the model's masks do not allow for.")
        return DynamicCache(config=model.config)

    @contextmanager
    def attached(self, model: Any, cache: Any) -> Iterator[None]:
        modules = [layer.self_attn for layer in model.model.layers]
        before = attention_of(model.config)
        try:
            if cache.get_seq_length():
                for module, hidden in zip(modules, cache.hidden):
                    module.masked_key_indices = hidden
                yield
            else:
                if self.press == EAGER:
                    model.set_attn_implementation("eager")
                with self._build()(model):
                    yield
                # kvpress leaves them on the model, where another cache would find them
                cache.hidden = [getattr(module, "masked_key_indices", None) for module in modules]
        finally:
            for module in modules:
                module.masked_key_indices = None
            if before is not None and before != attention_of(model.config):
                model.set_attn_implementation(before)

    def _build(self) -> Any:
        import kvpress

        made = getattr(kvpress, PRESSES[self.press.removeprefix(ADAKV)])
        press = made(compression_ratio=self.ratio, **self.numbers)
        if isinstance(press, kvpress.RandomPress):
            _draw_by_layer(press)
        return kvpress.AdaKVPress(press) if self.press.startswith(ADAKV) else press

    def held(self, cache: Any) -> HeldBytes:
        hidden = 0
        for layer, indices in zip(cache.layers, cache.hidden):
            of_token = sum(states.shape[-1] * states.element_size() for states in (layer.keys, layer.values))
            hidden += 0 if indices is None else len(indices[0]) * of_token
        held = tensor_bytes(cache.layers) - hidden
        return HeldBytes(held, held, simulated=hidden > 0)


def _draw_by_layer(press: Any) -> None:
    """Has a random press draw the same in a layer each time, and in every layer something else."""
    score = press.score

    def seeded(module: Any, *arguments: Any) -> torch.Tensor:
        press.seed = module.layer_idx
        return score(module, *arguments)

    press.score = seeded


@method("kvpress")
def kvpress(options: list[str]) -> Method:
    if len(options) < 2:
        raise EvaluationError(
            "method 'kvpress' takes a press and the share of tokens that it removes, for example kvpress:snapkv+0.5."
        )
    name, share, *more = options
    known = [*PRESSES, *(ADAKV + press for press in PRESSES if press not in WITHOUT_ADAKV)]
    if name not in known:
        raise unknown("press", name, known)
    try:
        ratio = float(share)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio < 1:
        raise EvaluationError(f"method 'kvpress' removes a share of tokens from 0 to below 1, not {share!r}.")
    numbers = {}
    for option in more:
        field, _, number = option.partition("=")
        if not field.isidentifier() or not number.isdecimal():
            raise EvaluationError(f"method 'kvpress' takes whole numbers of a press, window_size=16, not {option!r}.")
        numbers[field] = int(number)
    return KVPressMethod(name, ratio, numbers)
