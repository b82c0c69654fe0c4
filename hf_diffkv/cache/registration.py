"""Registers `"diffkv"` with Transformers as attention, mask and `cache_implementation`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation.utils import GenerationMixin

from ..compat import (
    GENERATE,
    GRAPHS,
    MASK_LENGTH,
    PROMPTS,
    SETTING_BACK,
    Wrapped,
    disown,
    forget_attention,
    passed,
    passing,
    text_length,
)
from ..config import DiffKVConfig
from ..config.presets import PRESETS
from ..import_hook import NAME, PAGED_NAME, add_name, remove_name
from .attention import diffkv_attention, diffkv_mask
from .calls import current_call, under_way
from .continuous_batching import check_no_manager
from .diffkv_cache import DiffKVCache
from .graphs import DecodeStep, GraphRequest, wants_graphs
from .latent import unwrap_classes
from .resolve import resolve_config
from .supported_models import check_model_config
from .switching import attention_set_back, ensure_attention, runs_batches

# arguments of `DiffKVCache` that choose a whole configuration
CHOICES = {"config", "preset", "target_ratio"}

_wrapped = Wrapped()


def register() -> None:
    """Registers attention and mask functions and wraps `generate()`'s methods. A second call does nothing."""
    if _wrapped.originals:
        return
    AttentionInterface.register(NAME, diffkv_attention)
    AttentionMaskInterface.register(NAME, diffkv_mask)
    if not GENERATE.available():
        remove_name()
        return
    add_name()
    _wrapped.wrap(GenerationMixin, "_prepare_cache_for_generation", _wrap)
    if SETTING_BACK.available():
        _wrapped.wrap(GenerationMixin, "generate", _wrap_generate)
        _wrapped.wrap(GenerationMixin, "_update_model_kwargs_for_generation", _wrap_update)
    MASK_LENGTH.available()
    if GRAPHS.available():
        _wrapped.wrap(GenerationMixin, "_valid_auto_compile_criteria", _wrap_criteria)
        _wrapped.wrap(PreTrainedModel, "get_compiled_call", _wrap_compiled_call)
    if PROMPTS.available():
        _wrapped.wrap(GenerationMixin, "_prefill", _wrap_prefill)
        _wrapped.wrap(GenerationMixin, "prepare_inputs_for_generation", _wrap_inputs)


def unregister() -> None:
    """Undoes `register`."""
    _wrapped.undo()
    unwrap_classes()
    remove_name()
    forget_attention(NAME, PAGED_NAME)


def cache_fields(cache_config: Any) -> dict[str, Any]:
    """Returns the `DiffKVCache` arguments in a `GenerationConfig`'s `cache_config`. Raises `ValueError` for others."""
    if cache_config is None:
        return {}
    if isinstance(cache_config, (DiffKVConfig, str)):
        return {"config": cache_config}
    if not isinstance(cache_config, Mapping) or not all(isinstance(name, str) for name in cache_config):
        raise ValueError(
            f"cache_config={cache_config!r} must be a dict of DiffKVConfig fields, a DiffKVConfig, or a preset's name."
        )
    return dict(cache_config)


def _check_is_cache(cache: Any) -> None:
    """Raises `ValueError` for a configuration, a name or the class `DiffKVCache` given as a cache."""
    name = isinstance(cache, str) and (cache == NAME or cache in PRESETS)
    if name or cache is DiffKVCache or isinstance(cache, DiffKVConfig):
        shown = "the class DiffKVCache" if cache is DiffKVCache else repr(cache)
        raise ValueError(
            f"cache is {shown}, which is not a cache; pass cache=DiffKVCache(model), with a preset or configuration as "
            "its second argument, or cache_implementation='diffkv' and cache_config=... together."
        )


def _warn_of_unused(generation_config: Any, wanted: bool) -> None:
    """Warns about `DiffKVConfig` fields in a call that does not ask for a `DiffKVCache`."""
    given = generation_config.cache_config
    # an assistant model gets the options of the assisted call, for its own cache
    if getattr(generation_config, "is_assistant", False):
        return
    if wanted or given is None or generation_config.cache_implementation is not None:
        return
    known = {field.name for field in dataclasses.fields(DiffKVConfig)} | CHOICES
    ours = given in PRESETS if isinstance(given, str) else isinstance(given, DiffKVConfig)
    if ours or (isinstance(given, Mapping) and given and set(given) <= known):
        warnings.warn(
            "cache_config is for a DiffKVCache and has no effect without cache_implementation='diffkv'.",
            stacklevel=4,
        )


def _check_options(model: Any, cache: DiffKVCache, generation_config: Any) -> None:
    """Raises `ValueError` for options of `generate()` that contradict the cache given to it."""
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False contradicts the DiffKVCache that was given; leave one of them out.")
    given = generation_config.cache_config
    # a value from the model's own generation_config is a default, which a given cache overrides
    if given is None or given == getattr(model.generation_config, "cache_config", None):
        return
    fields = cache_fields(given)
    if CHOICES.isdisjoint(fields):
        agrees = cache.config == DiffKVConfig.from_dict({**cache.config.to_dict(), **fields})
    else:
        config = fields.pop("config", None)
        # the cache may have been made from either
        agrees = any(cache.config == resolve_config(each, config, fields) for each in (model, model.config))
    if not agrees:
        raise ValueError(
            f"cache_config={given!r} differs from the configuration of the cache that was given; leave cache_config "
            "out, or make a new DiffKVCache(model.config, ...) with these fields."
        )


def _check_inputs(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for prompts that Transformers would process wrongly.

    These are prompts that end with padding, from which the next token would be predicted, and embeddings to be
    prefilled in chunks, because Transformers splits only the ids.
    """
    if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            f"prefill_chunk_size={generation_config.prefill_chunk_size} cannot be used with inputs_embeds, which "
            "Transformers does not cut into chunks; leave it out, or pass input_ids."
        )
    mask = model_kwargs.get("attention_mask")
    # an assistant model is given no mask, and generated text may well end with the padding id
    if mask is None or mask.ndim != 2 or getattr(generation_config, "is_assistant", False):
        return
    ends = mask.any(-1) & (mask[:, -1] == 0)
    if bool(ends.any()):
        remedy = (
            "pad on the left (tokenizer.padding_side = 'left'), or pass an attention_mask if these are real tokens "
            "that share the padding's id"
        )
        if model_kwargs.get("inputs_embeds") is not None:
            remedy = "move the padding of inputs_embeds and attention_mask in front of the prompts"
        raise ValueError(
            f"the attention_mask of rows {ends.nonzero()[:, 0].tolist()} ends with padding, from which the next token "
            f"would be predicted; {remedy}."
        )


def _check_prompt(cache: DiffKVCache, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises `ValueError` for a prompt no longer than the cached tokens, which `generate()` would slice wrongly."""
    length, seen = text_length(model_kwargs, generation_config), cache.get_seq_length()
    embeds = model_kwargs.get("inputs_embeds")
    if seen and embeds is not None and embeds.shape[1] <= seen:
        raise ValueError(
            f"the cache holds {seen} tokens of each sequence but inputs_embeds has {embeds.shape[1]}: to continue, "
            "pass the embeddings of the whole text, those of earlier and of generated tokens included; for another "
            "prompt use a new DiffKVCache, or call reset()."
        )
    if seen and length is not None and length <= seen:
        raise ValueError(
            f"the cache holds {seen} tokens of each sequence but the prompt has {length}: to continue, pass the "
            "whole text, earlier tokens included (or the new tokens and an attention_mask for all); for another "
            "prompt use a new DiffKVCache, or call reset()."
        )


def _claim(model: Any, cache: DiffKVCache, generation_config: Any) -> None:
    """Claims a cache for the running `generate()` call on `model`. Raises `CacheInUseError` as `Usage.claim` does."""
    call = current_call(model)
    if call is None:
        cache.usage.claim(model, generation_config)
    else:
        call.claim(cache, generation_config)


def _wrap_generate(original: Callable) -> Callable:
    """Makes `generate()` restore the model's attention, and raise an error if the model does not use the cache."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _wrapped.originals or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        with attention_set_back(self), under_way(self, kwargs.get("custom_generate") is not None) as call:
            generated = original(self, *args, **kwargs)
            call.end()
        return generated

    return generate


def _wrap_update(original: Callable) -> Callable:
    def update(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        call = current_call(self)
        if call is not None:
            call.check(outputs)
        return original(self, outputs, *args, **kwargs)

    return update


def _wrap(original: Callable) -> Callable:
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not _wrapped.originals:
            return original(self, generation_config, model_kwargs, *args, **kwargs)
        cache = passed(model_kwargs)
        _check_is_cache(cache)
        wanted = generation_config.cache_implementation == NAME
        if isinstance(cache, DiffKVCache):
            _check_options(self, cache, generation_config)
            if generation_config.cache_implementation not in (None, NAME):
                # the original raises an error for a cache given together with a name
                return original(self, generation_config, model_kwargs, *args, **kwargs)
            _check_inputs(generation_config, model_kwargs)
            check_no_manager(self)
            check_model_config(self.config)
            cache.check_layers(self)
            ensure_attention(self)
            _claim(self, cache, generation_config)
            with cache.stores.between_forwards():
                cache.check_handover()
            _check_prompt(cache, generation_config, model_kwargs)
            cache.attach(self)
        elif not wanted or cache is not None or generation_config.use_cache is False:
            _warn_of_unused(generation_config, wanted)
            if runs_batches(self):
                check_no_manager(self)
            return original(self, generation_config, model_kwargs, *args, **kwargs)
        else:
            _check_inputs(generation_config, model_kwargs)
            check_no_manager(self)
            made = DiffKVCache(self, **cache_fields(generation_config.cache_config))
            ensure_attention(self)
            _claim(self, made, generation_config)
            made.attach(self)
            model_kwargs |= passing(made)
        if generation_config.output_attentions:
            warnings.warn(
                "a DiffKVCache returns no attention weights, so `attentions` stays empty; "
                "cache.significance(layer_idx) has what each token received when levels depend on it, as with "
                'DiffKVConfig(low="K4V2").',
                stacklevel=3,
            )
        call = current_call(self)
        if call is not None:
            call.use(passed(model_kwargs), text_length(model_kwargs, generation_config))
        # generate() works on its own copy of the config, and the original refuses a cache together with a name
        generation_config.cache_implementation = None
        try:
            result = original(self, generation_config, model_kwargs, *args, **kwargs)
        finally:
            generation_config.cache_implementation = NAME if wanted else None
        if cache is None:
            disown(passed(model_kwargs))
            if getattr(generation_config, "is_assistant", False):
                passed(model_kwargs).usage.drafts = True
                passed(model_kwargs).activate_past_recording()
        return result

    return prepare


def _wrap_criteria(original: Callable) -> Callable:
    """Makes `generate()` ask for a compiled forward if steps should be captured."""

    def valid(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        cache = passed(model_kwargs)
        if isinstance(generation_config.compile_config, GraphRequest):
            return True
        if isinstance(cache, DiffKVCache) and _wrapped.originals and wants_graphs(self, cache):
            asked = None if generation_config.disable_compile else generation_config.compile_config
            compiled_call = _wrapped.originals.get((PreTrainedModel, "get_compiled_call"))
            step = DecodeStep(self, cache, generation_config.max_length, asked, compiled_call)
            # generate() works on its own copy of the config
            generation_config.compile_config = GraphRequest(step)
            return True
        return original(self, model_kwargs, generation_config)

    return valid


def _times(cache: DiffKVCache, sequences: int, generation_config: Any) -> int:
    """Returns how many times a cache must be repeated for the `sequences` into which a call expanded its prompts."""
    times = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    return times if cache.get_seq_length() and cache.rows() * times == sequences else 1


def _wrap_prefill(original: Callable) -> Callable:
    """Makes `generate()` refuse a prompt that does not begin with the cached tokens, and repeat them for its beams."""

    def prefill(
        self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = passed(model_kwargs)
        # an assistant's cache is cropped to the given tokens; embeddings have no token ids
        checks = isinstance(cache, DiffKVCache) and not getattr(generation_config, "is_assistant", False)
        times = _times(cache, input_ids.shape[0], generation_config) if checks else 1
        if checks and model_kwargs.get("inputs_embeds") is None and input_ids.ndim == 2:
            # if only the new tokens are given, the mask is longer
            if input_ids.shape[1] == text_length(model_kwargs, generation_config):
                rows, mask = input_ids[::times], model_kwargs.get("attention_mask")
                cache.held_tokens.check(rows, mask if mask is None else mask[::times], cache.get_seq_length())
        if checks and times > 1:
            cache.batch_repeat_interleave(times)
        call = current_call(self)
        if call is None or generation_config.prefill_chunk_size is None:
            return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        call.in_chunks = True
        try:
            return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            call.in_chunks = False

    return prefill


def _wrap_inputs(original: Callable) -> Callable:
    """Makes models use the cache of their call, and caches remember the token ids that `generate()` gives them."""

    def inputs(self: Any, input_ids: Any, next_sequence_length: int | None = None, *args: Any, **kwargs: Any) -> Any:
        call = current_call(self)
        given = args[0] if args else passed(kwargs)
        if call is not None and call.prepare(given, input_ids, kwargs):
            # inputs of the first forward, such as images, are needed again
            kwargs["is_first_iteration"], next_sequence_length = True, None
            if args:
                args = (call.cache, *args[1:])
            else:
                kwargs |= passing(call.cache)
        cache, first = passed(kwargs), bool(kwargs.get("is_first_iteration"))
        embedded = first and kwargs.get("inputs_embeds") is not None
        if isinstance(cache, DiffKVCache) and not embedded and input_ids is not None and input_ids.ndim == 2:
            if first and next_sequence_length is None and call is not None and call.cache is cache:
                next_sequence_length = call.missing(input_ids, kwargs.get("attention_mask"))
            new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
            cache.held_tokens.note(input_ids, new.shape[1], cache.get_seq_length(), first)
        return original(self, input_ids, next_sequence_length, *args, **kwargs)

    return inputs


def _wrap_compiled_call(original: Callable) -> Callable:
    def compiled_call(self: Any, compile_config: Any) -> Callable:
        if isinstance(compile_config, GraphRequest):
            return compile_config.step
        return original(self, compile_config)

    return compiled_call
