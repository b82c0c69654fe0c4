"""All methods: those of the library, and those for further caches of Transformers."""

from __future__ import annotations

from hf_diffkv.evaluation.methods import METHODS, Method, get_method

from . import transformers_caches as transformers_caches

__all__ = ["METHODS", "Method", "get_method"]
