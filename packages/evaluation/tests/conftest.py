"""Fixtures of the tests here, and all methods."""

import hf_diffkv_evaluation.methods  # noqa: F401
from evaluated import gemma, invented, llama, names, tiny_lm, tokenizer, uncompiled_quanto  # noqa: F401
