"""The attention function of continuous batching, for tokens of many requests packed in a row without padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_diffkv.cache.attention import HARMLESS
from hf_diffkv.cache.errors import HandOverError
from hf_diffkv.ops.softmax import Softmax

# what Transformers' engine passes along for its own caches
OF_THE_ENGINE = {"block_table", "logits_indices", "logits_processor_args", "read_index", "write_index"}


class PackedCache:
    """Base class of the caches that the engine passes to the model; they have `attend` (`ContinuousCache`)."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Stores nothing yet, but adds itself to `kwargs`, which the attention function gets.

        Since release 5.24, layers call this; before, the attention function got all arguments of the forward.
        """
        kwargs["cache"] = self
        return key_states, value_states


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements Transformers' attention interface. Each request attends causally to its own tokens in `cache`.

    Args:
        query: [1, query_heads, tokens, head_dim]; key and value likewise with KV heads.
        cache: `PackedCache`, which knows the layers with a sliding window. If it has a `mask`, that one is ignored.
        kwargs: `softcap`, `s_aux` (logits of attention sinks) and `sliding_window`; `dropout` and `is_causal` have no
            effect.

    Returns:
        Output [1, tokens, query_heads, value_dim], and no attention weights.

    Raises:
        HandOverError: the call lacks the cache, or has an argument that this function cannot honour.
    """
    name = type(module).__name__
    if cache is None:
        raise HandOverError(
            f"{name} got no cache from the engine: either this forward is not the engine's own (stop the manager "
            "before using the model for anything else), or the model does not pass keyword arguments on to its "
            "attention and cannot be batched continuously."
        )
    softcap, sinks, sliding_window = (kwargs.pop(name, None) for name in ("softcap", "s_aux", "sliding_window"))
    if attention_mask is not None and attention_mask is getattr(cache, "mask", None):
        attention_mask = None
    given = {**kwargs, "attention_mask": attention_mask, "dropout": None, "is_causal": None}
    unknown = sorted(k for k, v in given.items() if v is not None and k not in HARMLESS | OF_THE_ENGINE)
    if unknown:
        raise HandOverError(
            f"{name} passes {unknown} to its attention function, which the compressed cache cannot honour here; leave "
            'cache_implementation="diffkv" out.'
        )
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
    output = cache.attend(module.layer_idx, query, key, value, softmax, sliding_window)
    return output.transpose(1, 2).contiguous(), None
