"""Stores a prompt's keys and values and reads them back: rotated, centred, rounded for its queries, quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import DiffKVConfig, Precision
from ..heads.sensitivity import MEASURED_FIELDS
from ..ops.softmax import Softmax
from ..ops.table import ops_for
from ..pages.rows import compute_dtype
from ..store import KVHeads, Store, begin_forward, read_tokens
from ..store.prompt import StoredPast, admitted, compress
from ..store.transform import query_moment
from .watched import WatchedLayer


def stored(layer: WatchedLayer, precision: Precision) -> tuple[Tensor, Tensor]:
    """Returns keys and values as read back from a store, [heads, tokens, dim] each; window and sinks are exact.

    Raises:
        ValueError: the precision does not fit the heads.
    """
    key, value = layer.keys, layer.values
    config = DiffKVConfig(high=precision, low=precision, alpha_high=0.0, **MEASURED_FIELDS)
    heads = KVHeads(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
    store = Store(config, 1, key.shape[0], heads)
    begin_forward(store, key.shape[2])
    store.note_logits(0, Softmax(1.0, layer.options["softcap"], layer.options["s_aux"]))
    new = admitted(store, 0, key, value, None)
    past = StoredPast.read(store, 0, new)
    moments = [query_moment(store, query, None) for query in layer.queries]
    compress(store, 0, past, new, None, None if moments[0] is None else sum(moments[1:], start=moments[0]))
    store.padding.append(key.shape[2], None)
    tokens = read_tokens(store, 0)
    return tokens.keys[0].to(key.dtype), tokens.values[0].to(value.dtype)


def errors(layer: WatchedLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns relative errors of the keys and values of `stored`, [heads] each, over tokens that are not exact.

    For keys, this is the mean squared change of the prompt's logits over the mean square of the logits of centred keys.
    For values, it is the mean squared error over the mean squared value.
    """
    dtype = compute_dtype(keys.dtype)
    config = DiffKVConfig(**MEASURED_FIELDS)
    inner = slice(config.sinks, keys.shape[1] - config.window)
    moment = sum(ops_for(query.device, query.dtype).second_moment(query, keys.shape[0]) for query in layer.queries)
    exact, exact_values = layer.keys[0].to(dtype), layer.values[0].to(dtype)
    centred = exact - exact.mean(1, keepdim=True)

    def logits(key: Tensor) -> Tensor:
        return ((key[:, inner] @ moment) * key[:, inner]).sum((1, 2))

    off = (values.to(dtype) - exact_values)[:, inner].square().sum((1, 2))
    of_values = off / exact_values[:, inner].square().sum((1, 2))
    return logits(keys.to(dtype) - exact) / logits(centred), of_values


def geometric_mean(figures: Tensor) -> float:
    """Returns the geometric mean of the positive finite figures; NaN if there are none."""
    good = figures[torch.isfinite(figures) & (figures > 0)].double()
    return float(good.log().mean().exp())
