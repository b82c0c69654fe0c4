"""Divides a byte budget into slots and pages, after trying out the model's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from hf_diffkv.cache.dense import dense_attention
from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.heads.harm import HarmBetween
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages import PageLayout

from .attention import PackedCache
from .linear_layers import LinearModule
from .servable import ModelLayers, unservable
from .shapes import AttentionShape
from .slot_part import slot_configs
from .slot_room import PerSlot
from .slots import Slots


class _Trial(PackedCache):
    """Stands in for a cache. It computes ordinary attention and notes the shapes of its inputs."""

    def __init__(self, layers: ModelLayers, max_positions: int | None) -> None:
        self.layers, self.max_positions = layers, max_positions
        self.shapes: dict[int, AttentionShape] = {}
        self.windows: dict[int, int] = {}
        # states that one request leaves in linear layers
        self.states: dict[int, LinearAttentionLayer] = {}

    def run_linear(self, module: LinearModule, hidden_states: Tensor) -> Tensor:
        states = self.states[module.layer] = LinearAttentionLayer(self.layers.linear[module.layer])
        output = module.run(hidden_states, states)
        if not isinstance(output, Tensor) or output.shape != hidden_states.shape:
            name = type(module.module).__name__
            raise unservable(name, "keeps states and returns more than hidden states")
        return output

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, sliding_window: int | None
    ) -> Tensor:
        if sliding_window is not None:
            self.windows[layer] = sliding_window
        dims = (key.shape[1], query.shape[1], key.shape[3], value.shape[3])
        self.shapes[layer] = AttentionShape(*dims, key.dtype, key.device, self.max_positions)
        return dense_attention(query, key, value, None, softmax, 0.0, causal=True)


def try_attention(
    model: Any, layers: ModelLayers, modules: list[LinearModule]
) -> tuple[AttentionShape, dict[int, LinearAttentionLayer]]:
    """Runs two tokens through `model`, whose attention is the paged one, and records its layers' inputs.

    Args:
        layers: layers according to the model's configuration.
        modules: modules that keep states; they get their own forward back afterwards.

    Returns:
        The shape of all attention layers, and the states that a request leaves, by layer.

    Raises:
        HandOverError: the model does not pass its cache on.
        UnsupportedModelError: layers differ, or bypass the attention.
    """
    text_config = model.config.get_text_config(decoder=True)
    trial = _Trial(layers, getattr(text_config, "max_position_embeddings", None))
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    for module in modules:
        module.take_over(trial.run_linear)
    try:
        with torch.no_grad():
            model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False, cache=trial)
    finally:
        for module in modules:
            module.give_back()
    if sorted(trial.shapes) != layers.attention or len(set(trial.shapes.values())) != 1:
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} differ in heads, head_dim, dtype or device, or do not all attend "
            "through the attention interface; continuous batching with the compressed cache needs them to be the same."
        )
    sliding = layers.sliding
    expected = {} if sliding is None else dict.fromkeys(sliding.layers, sliding.window)
    # some models show it only in their mask
    if trial.windows.items() - expected.items():
        raise unservable(type(model).__name__, "has sliding windows that its configuration does not mention")
    if trial.states.keys() != layers.linear.keys():
        raise unservable(type(model).__name__, "does not run all modules that keep states in every forward")
    return next(iter(trial.shapes.values())), trial.states


def make_slots(
    config: DiffKVConfig,
    shape: AttentionShape,
    num_layers: int,
    requests: int,
    tokens: int | None,
    max_bytes: int,
    others: Sequence[PerSlot] = (),
    harm: HarmBetween | None = None,
) -> Slots:
    """Returns slots for at most `requests` requests of `tokens` tokens, as many and as long as fit in `max_bytes`.

    Args:
        num_layers: number of layers of full attention.
        tokens: tokens of the longest request; None for as many as fit.
        others: other objects that hold memory for every slot.
        harm: predicted loss from lowering heads; None if unknown.

    Raises:
        ValueError: raised by `Slots`.
        MemoryError: not even one slot fits.
    """
    token = 0.0
    head = (shape.key_dim, shape.value_dim, shape.dtype.itemsize, shape.max_positions)
    for of_layer in slot_configs(config, num_layers, shape):
        layout = PageLayout.of(of_layer, *head)
        capacity = max(layout.high.capacity, layout.low.capacity)
        token += shape.num_heads * layout.page_bytes / capacity
    fitting = int(max_bytes / token) + config.window + config.sinks
    longest = shape.ranks.least(max(1, fitting if tokens is None else min(fitting, tokens)))
    sizes = {"max_tokens": longest, "max_bytes": max_bytes}
    return Slots(config, shape, num_layers, requests, **sizes, others=others, harm=harm)
