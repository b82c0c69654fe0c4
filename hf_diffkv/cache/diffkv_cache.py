"""`DiffKVCache`: Transformers' Cache API on the outside, paged compressed storage inside."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..compat import attention_of, is_stock_attention
from ..config.diffkv_config import DiffKVConfig, configuration_of
from ..config.files import as_folder
from ..store import check_integrity, commit_together, fork_store, levels, read_tokens
from .devices import TensorParallel, absent_layers, are_apart, layer_devices, main_device
from .errors import HandOverError, another_batch
from .held_tokens import HeldTokens
from .io import load_cache, save_cache
from .latent import LatentLayer, check_latent_model, prepare_latents
from .layer import DiffKVLayer
from .other_layers import (
    OtherStates,
    check_croppable,
    check_dtype,
    check_lengths,
    empty_other_layers,
    ends_forwards,
    has_states,
    release_prompt,
    stand_ins,
    without_gradients,
)
from .report import MemoryReport, in_short, memory_report
from .resolve import config_of, harm_for, moments_for, resolve_config
from .rows import ChosenRows
from .snapshot import model_fingerprint
from .stores import Stores, between_forwards, reports
from .supported_models import cache_layers, check_attention, check_model_config, shared_layers
from .usage import Usage


class DiffKVCache(ChosenRows, OtherStates, Cache):
    """Compressed cache with one precision per head, or high and low levels by significance, and optional pruning.

    The model's attention implementation must be `"diffkv"`. `generate()` switches to it and restores the former one;
    elsewhere, call `model.set_attn_implementation("diffkv")`. Layers other than plain full attention (sliding window,
    linear) keep Transformers' own cache layers.

    Args:
        model_config: the model's `PretrainedConfig`, or the model itself; also accepted as `config=`, as in
            `DynamicCache`.
        config: a `DiffKVConfig`, the name of a preset ("quality", "balanced", "small"), or a dict of fields that
            override `DiffKVConfig.for_model(model_config)`; None uses the latter unchanged.
        **kwargs: individual fields of `DiffKVConfig` that override `config`.

    Raises:
        ValueError: unknown or invalid fields (`DiffKVConfig`), or `model_config` is not a configuration.
        UnsupportedModelError: encoder-decoder models, models that attend to a selection of tokens, models without
            attention, and, if the model itself is passed, models whose attention cannot be switched.
    """

    # Transformers' own layers and compressed ones
    layers: list[Any]

    def __init__(
        self, model_config: Any = None, config: DiffKVConfig | Mapping | str | Any | None = None, **kwargs: Any
    ) -> None:
        if model_config is None and hasattr(configuration_of(config), "get_text_config"):
            model_config, config = config, None
        model, model_config = model_config, configuration_of(model_config)
        check_model_config(model_config)
        check_attention(model)
        text_config = model_config.get_text_config(decoder=True)
        self.model_fingerprint = model_fingerprint(model_config)
        self.config = resolve_config(model, config, kwargs)
        layers = cache_layers(text_config)
        self._readers = shared_layers(text_config)
        compressed = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not compressed:
            warnings.warn(
                "this model has no plain full-attention layer, so DiffKVCache compresses nothing.", stacklevel=2
            )
        self.stores = Stores(self.config, len(compressed), getattr(text_config, "max_position_embeddings", None))
        self.usage = Usage()
        self.held_tokens = HeldTokens()
        self.stores.latent = prepare_latents(self.config, text_config, model)
        self._compressed_layers = compressed
        self.stand_ins: dict[int, int] = {}
        kind = LatentLayer if self.stores.latent else DiffKVLayer
        for index, layer_idx in enumerate(compressed):
            readers = self.stores.readers[index] = len(self._readers.get(layer_idx, ()))
            layers[layer_idx] = kind(self.stores, index, layer_idx, readers)
        super().__init__(layers=layers)
        self._note_layers()
        self.stores.note_shapes(model, compressed)
        self._find_moments(model)

    def _note_layers(self) -> None:
        """Notes which layer a forward ends with."""
        absent = {i for i, layer in enumerate(self.layers) if getattr(layer, "index", None) in self.stores.absent}
        here = sorted(set(range(len(self.layers))) - absent - self.stand_ins.keys())
        compressed = self.compressed_layers()
        self._first_compressed = next((i for i in compressed if i in here), -1)
        self._last_layer = max(here, default=0)
        self.stores.has_other_layers = len(compressed) < len(self.layers)
        self.stores.turns.last_layer = ends_forwards(self.layers, here) if compressed else -1
        for layer_idx in compressed:
            self.layers[layer_idx].is_last = layer_idx == self._last_layer

    def _find_moments(self, model: Any) -> None:
        """Looks up the model's query moments and the harm of lowering its heads, if they are used and not yet known.

        Raises:
            ValueError: the file is not a moments file, or belongs to another model.
        """
        if self.stores.harm is None:
            self.stores.harm = harm_for(model, self.config, self.stores.num_layers)
        if self.stores.moments is None and self.stores.num_layers:
            moments = moments_for(model, self.config)
            if moments is not None:
                self.stores.use_moments(moments)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes a layer's new key and value states, [batch, heads, tokens, head_dim] each.

        Raises:
            ValueError: the cache holds a different number of sequences or a different dtype.
            HandOverError: tokens announced by an earlier `update` never reached the `diffkv` attention function, an
                earlier forward stopped halfway, or the model that `generate()` ran with this cache now has a different
                attention implementation.
        """
        self._check_picked_up()
        layer = self.layers[layer_idx]
        if self.stores.awaited is not None and layer_idx <= self._compressed_layers[self.stores.awaited]:
            self.stores.check_read()
        # otherwise the host does not see this forward
        told = not (torch.compiler.is_compiling() or self.stores.capturing)
        if told and layer_idx <= self._first_compressed:
            self._check_switched()
            # Transformers' own layers would fail halfway
            if self.stores.all and key_states.shape[0] != self.stores.all[0].batch_size:
                raise another_batch(self.stores.all[0].batch_size, key_states.shape[0])
            if layer_idx < self._first_compressed:
                check_dtype(layer, key_states)
        if layer_idx == self._first_compressed and told:
            check_lengths(self.layers, layer_idx, layer.seen, key_states.shape[2], self.stand_ins)
        if isinstance(layer, DiffKVLayer) or not told:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.stores.reach_other(layer_idx, layer)
        returned = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        release_prompt(layer)
        # otherwise the forward ends when its thread begins the next one or is seen outside it
        is_last = layer_idx == self._last_layer and not has_states(layer)
        self.stores.turns.layer_done(is_last, self.stores.awaited is not None)
        return returned

    def _check_switched(self) -> None:
        """Raises `HandOverError`, before anything changes, if the cache's model uses a stock attention."""
        model = self.usage.model
        name = None if model is None else attention_of(model.config.get_text_config(decoder=True))
        if is_stock_attention(name):
            raise HandOverError(
                f"{type(model).__name__} uses the attention {name!r}, which cannot use a DiffKVCache: generate() "
                'restores attention when it returns. Call model.set_attn_implementation("diffkv") before calling the '
                "model yourself; the cache is unchanged."
            )

    def check_handover(self) -> None:
        """Raises `HandOverError` unless every layer stored all announced keys and values, and its readers attended."""
        self._check_picked_up()
        self.stores.check_read()
        self.stores.check_complete()

    def _check_picked_up(self) -> None:
        if self.stores.pending is not None:
            raise HandOverError(
                f"layer {self._compressed_layers[self.stores.pending]} gave keys and values to DiffKVCache but its "
                'attention function never picked them up. Call model.set_attn_implementation("diffkv") before calling '
                "the model yourself (generate() restores attention when it returns); if you already do, this model "
                "changes keys or values after caching them and cannot use DiffKVCache. Call cache.reset() before "
                "using this cache again."
            )

    def check_layers(self, model: Any) -> None:
        """Raises `ValueError` if the layers of `model` do not match this cache."""
        text_config = config_of(model).get_text_config(decoder=True)
        mine = [DynamicLayer if isinstance(layer, DiffKVLayer) else type(layer) for layer in self.layers]
        if mine != [type(layer) for layer in cache_layers(text_config)]:
            raise ValueError(
                f"this cache was made for another model: its layers do not match {type(model).__name__}; use "
                "DiffKVCache(model.config)."
            )

    @between_forwards
    def attach(self, model: Any) -> None:
        """Tells the cache which devices and processes `model` runs on.

        `generate()` calls this. Call it yourself before `model(...)` in three cases: under tensor parallelism, so that
        all ranks stop if one fails; with `max_bytes` and a `device_map` over several devices; and with a `device_map`
        that separates layers sharing keys and values, in which case the layer that is read stays uncompressed.

        Raises:
            ValueError: the model's layers or query moments do not match this cache.
        """
        self.check_layers(model)
        if self.stores.latent:
            check_latent_model(model)
        self.stores.tensor_parallel = TensorParallel.of(model)
        for layer_idx, readers in self._readers.items():
            layer = self.layers[layer_idx]
            if isinstance(layer, DiffKVLayer) and layer.store is None and are_apart(model, (layer_idx, *readers)):
                self.stores.kept_dense.add(layer.index)
                self.layers[layer_idx] = DynamicLayer()
        self.stores.attach(model, self._compressed_layers)
        self.stand_ins = stand_ins(self.layers, absent_layers(model, list(range(len(self.layers)))))
        self._note_layers()
        self._find_moments(model)

    def compressed_layers(self) -> list[int]:
        """Returns the indices of the compressed layers."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, DiffKVLayer)]

    @reports
    def memory(self) -> MemoryReport:
        """Reports the cache's bytes and tokens; under tensor parallelism, those of this rank's heads."""
        return memory_report(self)

    @reports
    def levels(self, layer_idx: int) -> Tensor:
        """Returns levels, int8 [batch, kv_heads, seen]: -1 padding, 0 pruned, 1 low, 2 high, 3 window or sinks.

        Here and below, kv_heads counts this rank's heads under tensor parallelism, and a layer that is not compressed
        or holds nothing raises a `ValueError`.
        """
        layer = self._filled_layer(layer_idx)
        return levels(layer.store, layer.slot)

    @reports
    def dequantize(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decompresses a layer.

        Returns:
            Keys and values (latents and rotary keys in latent models), [batch, kv_heads, seen, dim], float32 (float64
            for float64 models), zero where not stored; and a mask of stored tokens, bool [batch, kv_heads, seen].
        """
        layer = self._filled_layer(layer_idx)
        tokens = read_tokens(layer.store, layer.slot)
        keys, values, mask = tokens.keys, tokens.values, tokens.mask
        return (values, keys, mask) if layer.has_latents else (keys, values, mask)

    @reports
    def significance(self, layer_idx: int) -> Tensor:
        """Returns significance sums, float32 [batch, kv_heads, seen]: attention each token received from later queries.

        Raises:
            ValueError: no level in this layer depends on significance, so none is kept.
        """
        layer = self._filled_layer(layer_idx)
        if not layer.store.layout.selects:
            raise ValueError(
                f"layer {layer_idx} of this cache tracks no significance because all tokens of a head have the same "
                "precision; give DiffKVConfig two precisions with alpha_high above 0, or alpha_low above 0."
            )
        return read_tokens(layer.store, layer.slot).score

    @between_forwards
    def check_integrity(self) -> None:
        """Raises `IntegrityError` unless every page has one owner, and counts and tables agree."""
        for store in self.stores.all:
            check_integrity(store)

    def _filled_layer(self, layer_idx: int) -> Any:
        """Returns a compressed layer that holds tokens. Raises `ValueError` for any other layer."""
        if not isinstance(layer_idx, Integral):
            raise ValueError(
                f"layer_idx={layer_idx!r} must be an integer, one of compressed_layers(): {self.compressed_layers()}."
            )
        if not -len(self.layers) <= layer_idx < len(self.layers):
            raise ValueError(f"layer_idx={layer_idx} does not exist: this cache has {len(self.layers)} layers.")
        layer = self.layers[layer_idx]
        if not isinstance(layer, DiffKVLayer):
            raise ValueError(
                f"layer {layer_idx} is a {type(layer).__name__}, which is not compressed; compressed layers are "
                f"{self.compressed_layers()}."
            )
        if layer.store is None:
            raise ValueError(f"layer {layer_idx} holds nothing yet; run the model with this cache first.")
        self.stores.check_usable()
        return layer

    def save_pretrained(self, save_directory: str | os.PathLike, model: Any = None) -> None:
        """Writes the cache as safetensors and JSON.

        Args:
            model: the cache's model, whose weights are then checked on loading; None records no weights.

        Raises:
            ValueError: some tokens may still be taken back (call `crop(0)`), a layer cannot be saved, or `model`
                differs in configuration from the cache's model, or has offloaded weights.
            OSError: the files cannot be written; an earlier cache's files stay in place.
        """
        if model is not None and self.model_fingerprint != model_fingerprint(config_of(model)):
            raise ValueError(
                "model's configuration is not the one this cache was made for; pass the model of this cache."
            )
        save_cache(self, save_directory, model)

    @classmethod
    def from_pretrained(
        cls, save_directory: str | os.PathLike, model: Any, *, device: torch.device | str | None = None
    ) -> DiffKVCache:
        """Reads a cache that `save_pretrained` wrote.

        Args:
            model: the model, onto whose devices the cache is loaded; or its `PretrainedConfig` if there is no model
                yet, in which case weights are not compared.
            device: target device if `model` is a configuration; None means the CPU.

        Raises:
            FileNotFoundError: no cache was saved there.
            CacheFileError: the files are damaged, newer than this version, or belong to another model.
            UnsupportedModelError: the model is not supported by this cache.
            ValueError: `model` is neither a model nor a configuration, `device` is given together with a model, or
                `save_directory` is not a path.
        """
        save_directory = as_folder("save_directory", save_directory)
        model_config = configuration_of(model)
        if not hasattr(model_config, "get_text_config"):
            raise ValueError(f"model is a {type(model).__name__}; pass the model itself, or its configuration.")
        check_model_config(model_config)
        if model is model_config:
            place = torch.device("cpu" if device is None else device)
            return load_cache(cls, save_directory, model, TensorParallel(), {}, place)
        if device is not None:
            raise ValueError(
                f"device={device} cannot be combined with a model, whose layers say where the cache goes; leave it out."
            )
        parallel, devices = TensorParallel.of(model), layer_devices(model)
        return load_cache(cls, save_directory, model, parallel, devices, main_device(model))

    @between_forwards
    def fork(self, n: int) -> list[DiffKVCache]:
        """Makes `n` caches that continue from the same tokens and share this one's memory until they change.

        The first forward of a fork copies all pages it shares. Transformers' own layers are copied at once.

        Raises:
            ValueError: n is less than 1, or some tokens may still be taken back (call `crop(0)`).
            CacheInUseError: another thread's `generate()` is using the cache.
            HandOverError: a forward stopped halfway.
        """
        if not isinstance(n, Integral) or n < 1:
            raise ValueError(f"n={n!r} must be an integer of at least 1.")
        self.usage.check_idle()
        self.check_handover()
        return [self._twin() for _ in range(n)]

    def _twin(self) -> DiffKVCache:
        stores = [fork_store(store) for store in self.stores.all]
        return self.__deepcopy__({id(store): fork for store, fork in zip(self.stores.all, stores)})

    @between_forwards
    def __deepcopy__(self, memo: dict) -> DiffKVCache:
        memo |= without_gradients(self.layers)
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in list(vars(self).items())})
        return twin

    def reset(self) -> None:
        """Empties the cache and frees its memory."""
        # also after an error within a forward, which will not resume
        with self.stores.between_forwards(whatever_runs=True):
            self._forget_tokens()
            self.usage.clear()

    @between_forwards
    def start_over(self) -> None:
        """Forgets all tokens within a `generate()` call, which then recomputes them."""
        recording = self.stores.recording
        self._forget_tokens()
        if recording:
            self.activate_past_recording()

    def _forget_tokens(self) -> None:
        super().reset()
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
        empty_other_layers(self.layers)
        self.stores.clear()
        self.held_tokens.clear()

    @between_forwards
    def activate_past_recording(self) -> None:
        """Lets `crop` take back new tokens from now on; `crop` must then follow every forward.

        Between two crops, new tokens stay uncompressed and attention to them is exact. Up to 512 can be held this way.
        """
        self.check_handover()
        super().activate_past_recording()
        self.stores.record(True)

    def stop_recording(self) -> None:
        """Keeps all tokens and ends the recording begun by `activate_past_recording`."""
        self.crop(0)
        self.stores.record(False)
        for layer in self.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    @between_forwards
    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens, leaving levels, significance and pages as if they had never been seen.

        Args:
            tokens_to_remove: negated number of tokens to remove, or 0 to keep all.

        Raises:
            ValueError: a positive number, or more tokens than can be taken back; the cache is then unchanged.
            MemoryError: the remaining tokens do not fit into `max_bytes`. The cache is unchanged, so more of them can
                be taken back, unless some are already stored; it then raises `HandOverError` until `reset()`.
        """
        # generate() passes a tensor in some versions
        if isinstance(tokens_to_remove, Tensor) and tokens_to_remove.numel() == 1:
            tokens_to_remove = tokens_to_remove.item()
        if not isinstance(tokens_to_remove, Integral) or tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove!r} must be 0 or a negative integer: minus the number of tokens."
            )
        self.check_handover()
        # with two tokenizers, an assistant's text may change further back; it is then given all of it again
        if self.usage.drafts and any(store.revocable < -tokens_to_remove for store in self.stores.all):
            return self.start_over()
        for layer in self.layers:
            check_croppable(layer, tokens_to_remove)
        seen = self.get_seq_length()
        recording = [store for store in self.stores.all if store.revocable]
        # until all layers agree, an error leaves the cache like this
        self.stores.broken = True
        try:
            with self.stores.in_step():
                commit_together(self.stores.all, -tokens_to_remove, self.stores.share_budget)
        except (ValueError, MemoryError) as error:
            # other ranks may have stored their tokens already
            apart = isinstance(error, MemoryError) and self.stores.tensor_parallel.size > 1
            self.stores.broken = apart or not all(store.revocable for store in recording)
            raise
        for i, layer in enumerate(self.layers):
            if isinstance(layer, DiffKVLayer):
                layer.see(0 if layer.store is None else tokens_to_remove)
            # Transformers' own layers cannot be cropped while empty
            elif seen and i not in self.stand_ins and (tokens_to_remove < 0 or getattr(layer, "record_past", True)):
                layer.crop(tokens_to_remove)
                release_prompt(layer)
        if seen and not self.get_seq_length():
            empty_other_layers(self.layers)
        self.held_tokens.crop(seen, -tokens_to_remove)
        self.stores.broken = False

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("DiffKVCache allocates with its first keys and values; no preparation is needed.")

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Returns -1, no maximum. Older name for `get_max_length`."""
        return -1

    def __iter__(self) -> Iterator:
        raise TypeError(
            "DiffKVCache cannot be iterated: its keys and values are not dense tensors. Use dequantize(layer_idx); "
            "with torch.nn.DataParallel pass use_cache=False."
        )

    def __repr__(self) -> str:
        try:
            with self.stores.between_forwards():
                return f"{type(self).__name__}({in_short(self)})"
        except HandOverError:
            # this thread is within a forward: describe what the host knows so far
            return f"{type(self).__name__}({in_short(self)})"


def _sent(cache: DiffKVCache) -> tuple:
    """Returns how another process rebuilds a cache: from bytes, as PyTorch would move its tensors to shared memory."""
    return pickle.loads, (pickle.dumps(cache),)


ForkingPickler.register(DiffKVCache, _sent)
