"""What the mask that a model hands to its attention says about stored tokens and new ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import HandOverError
from .layer_state import LayerState

# attribute of a mask that is causal with padding: the padding, [batch, keys]
PADDING = "_diffkv_padding"


def split_mask(
    mask: Tensor | None, layer: LayerState, tokens: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a mask says, each part None where it says nothing.

    Returns:
        Visibility of the tokens seen before, bool [batch, past]; of the new ones, bool [batch, tokens]; and the mask
        among the new ones where it is not plainly causal, bool [batch, 1, tokens, tokens].
    """
    if mask is None:
        return None, None, None
    if mask.shape[-1] != layer.seen:
        raise HandOverError(
            f"the attention mask covers {mask.shape[-1]} keys but the cache has seen {layer.seen}; pass a mask for "
            "all tokens, past ones included."
        )
    past = layer.seen - tokens
    padding = getattr(mask, PADDING, None)
    if padding is None and mask.ndim == 2:
        padding = mask.bool()
    if padding is not None:
        return padding[:, :past], padding[:, past:], None
    mask = _as_bool(mask)
    if mask.shape[1] != 1:
        raise HandOverError("'diffkv' attention cannot use a mask that differs between heads.")
    mask = mask.expand(layer.store.batch_size, -1, -1, -1)
    last = mask[:, 0, -1]
    if tokens > 1 and not bool((mask[..., :past] == last[:, None, None, :past]).all()):
        raise HandOverError(
            "this attention mask hides some past tokens from some of the new ones only; once compressed, a past token "
            "can only be attended by all that follow or, from some forward on, by none."
        )
    valid, new = last[:, past:], mask[..., past:]
    if tokens > 1 and bool((new & valid[:, None, :, None] & ~valid[:, None, None]).any()):
        raise HandOverError(
            "this attention mask hides new tokens from the last of them, which makes them padding, but shows them to "
            "others; let the last new token see all that are not padding."
        )
    return last[:, :past], valid, new


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(mask.dtype).min / 2
    if not bool(((mask == 0) | (mask < lowest)).all()):
        raise HandOverError("'diffkv' attention cannot add a bias to the logits; the mask may only allow or forbid.")
    return mask == 0
