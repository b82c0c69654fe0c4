"""An attention function for Transformers that computes DiffKV densely, with `LayerSimulation`.

It shares no code with the package. The model runs with a `DynamicCache`, of which only the newest keys and values are
used; each full-attention layer keeps its state in its simulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dense_simulation import LayerSimulation
from runs import empty_simulation
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hf_diffkv import DiffKVConfig

NAME = "simulated_diffkv"


class SimulatedAttention:
    """Attention function of one model, and the simulations of its full-attention layers by layer index.

    Layers that read the keys and values of an earlier layer attend to that layer's simulation, the last before them.
    """

    def __init__(self, model: PreTrainedModel, config: DiffKVConfig) -> None:
        self.config = config
        self.layers: dict[int, LayerSimulation] = {}
        self._reading = [
            module.layer_idx
            for module in model.modules()
            if getattr(module, "is_kv_shared_layer", False) and not module.is_sliding
        ]
        full = [i for i, kind in enumerate(getattr(model.config, "layer_types", None) or []) if kind[:4] == "full"]
        self._read = max((i for i in full if i < min(self._reading)), default=None) if self._reading else None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if sliding_window is not None:
            output = dense_attention(query, key, value, attention_mask, scaling, softcap, s_aux)
        else:
            reads = module.layer_idx in self._reading
            simulation = self._simulation(self._read if reads else module.layer_idx, key)
            if not reads:
                new = query.shape[2]
                valid = attention_mask[:, 0, -1, -new:]  # the last query sees every real key
                simulation.begin(key[:, :, -new:], value[:, :, -new:], valid)
            output = simulation.read(query, scaling, softcap, s_aux)
            if module.layer_idx != self._read and (not reads or module.layer_idx == self._reading[-1]):
                simulation.finish()
        return output.transpose(1, 2).contiguous(), None

    def _simulation(self, layer_idx: int, key: Tensor) -> LayerSimulation:
        if layer_idx not in self.layers:
            config = self.config
            alphas = (_of_layer(alpha, len(self.layers)) for alpha in (config.alpha_high, config.alpha_low))
            options = {"rotate": config.rotate, "center": config.center}
            self.layers[layer_idx] = empty_simulation(config, key, *alphas, **options)
        return self.layers[layer_idx]


@contextmanager
def simulated(model: PreTrainedModel, config: DiffKVConfig) -> Iterator[SimulatedAttention]:
    """Runs the model with a new `SimulatedAttention` within the block."""
    attention = SimulatedAttention(model, config)
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _whole_mask)
    try:
        model.set_attn_implementation(NAME)
        yield attention
    finally:
        model.set_attn_implementation(before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(NAME)


def _whole_mask(*args: Any, **kwargs: Any) -> Tensor:
    """bool [batch, 1, queries, keys], never None."""
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[batch, query_heads, queries, value_dim]; mask: bool [batch, 1, queries, keys]."""
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    # float32 where Transformers' own attention supports nothing else; a padding query may see no key at all
    exact = softcap is None and sinks is None
    weights = logits.softmax(-1, dtype=None if exact else torch.float32).nan_to_num(0.0).to(value.dtype)
    return weights[..., : key.shape[2]] @ value.repeat_interleave(group, 1)


def _of_layer(threshold: Any, index: int) -> Any:
    return list(threshold[index]) if isinstance(threshold, tuple) else threshold
