"""`generate()` with a DiffKV cache, in the form that Transformers loads as a custom generation method."""

from typing import Any

from transformers import GenerationMixin

import hf_diffkv


def generate(*args: Any, model: Any, cache_config: Any = None, **kwargs: Any) -> Any:
    """Does what `model.generate` does, with a DiffKV cache.

    Args:
        *args: positional arguments of `GenerationMixin.generate`, passed if a model folder contains this file.
        model: a decoder-only model.
        cache_config: dict of `DiffKVConfig` fields, or a `DiffKVConfig`; None uses `DiffKVConfig.for_model`.
        **kwargs: other arguments of `GenerationMixin.generate`. `cache` continues a `DiffKVCache`.

    Returns:
        The output of `GenerationMixin.generate`. In a dict output, `cache` is the `DiffKVCache`.

    Raises:
        ValueError: another cache is requested, or `cache_config` is given with a cache that has its own configuration.
    """
    # named past_key_values before Transformers 5.24
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    name = kwargs.pop("cache_implementation", None)
    if name not in (None, "diffkv"):
        raise ValueError(f"cache_implementation={name!r} contradicts custom_generate, which uses DiffKV; leave it out.")
    if cache is not None and not isinstance(cache, hf_diffkv.DiffKVCache):
        raise ValueError(f"cache is a {type(cache).__name__}; pass a DiffKVCache, or leave it out.")
    if cache is not None and cache_config is not None:
        raise ValueError("cache has its own configuration; leave cache_config out.")
    return GenerationMixin.generate(model, *args, cache_implementation="diffkv", cache_config=cache_config, **kwargs)
