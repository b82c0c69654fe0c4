"""All methods: the library's, and those for other Transformers caches."""

from __future__ import annotations

from hf_diffkv.evaluation.methods import METHODS, Method, get_method

from . import transformers_caches as transformers_caches

__all__ = ["METHODS", "Method", "get_method"]
