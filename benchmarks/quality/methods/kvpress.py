"""Methods for kvpress, with a press and the share of the prompt's tokens that it removes: `kvpress:snapkv+0.57`.

Integer arguments of the press may follow: `kvpress:snapkv+0.57+window_size=16`. With the prefix `adakv-`, the heads of
a layer share the press's budget (AdaKV). kvpress needs an older Transformers than this library, so these methods run in
their own environment (`make kvpress`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from isolated import Isolated
from transformers import DynamicCache

from hf_diffkv.compat import attention_of
from hf_diffkv.evaluation.errors import EvaluationError, unknown
from hf_diffkv.evaluation.methods import HeldBytes, Method, method
from hf_diffkv.evaluation.methods.base import attends_fully, tensor_bytes

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
# this press needs attention weights, which only eager attention returns and AdaKV does not support
EAGER = "observed-attention"
# AdaKV would also override the sizes that PyramidKV gives to layers
WITHOUT_ADAKV = (EAGER, "pyramidkv")


class KVPressMethod(Method):
    """Method with a press on a `DynamicCache`, which compresses the prompt once and keeps all later tokens.

    A press that removes the same number of tokens from all heads of a layer really frees them. AdaKV removes different
    numbers, and kvpress only hides these tokens from attention; bytes are then computed from the kept tokens
    (`simulated`).

    Args:
        press: key of `PRESSES`, possibly prefixed with `adakv-`.
        ratio: share of tokens to remove, from 0 to below 1.
        numbers: further integer arguments of the press, for example `window_size`.
    """

    environment = Isolated("kvpress")
    # its cache does not count the tokens it drops, so `generate()` would use wrong positions (`decoding.py`)
    drops_tokens = True
    packages = ("kvpress", "transformers")

    def __init__(self, press: str, ratio: float, numbers: dict[str, int]) -> None:
        self.press, self.ratio, self.numbers = press, ratio, numbers
        # hidden tokens get keys that no query of a forward attends to, which are harder to find for many queries
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
                # kvpress leaves these on the model, where they would affect other caches
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
    """Seeds a random press by layer, so that draws repeat within a layer and differ between layers."""
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
