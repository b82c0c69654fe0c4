"""Fixtures of tests of the evaluation, here and in packages/evaluation: small models, names that are forgotten."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invented import add_invented
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.evaluation.methods import METHODS
from hf_diffkv.evaluation.tasks import TASKS

TINY_LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"


@pytest.fixture(scope="session", autouse=True)
def uncompiled_quanto() -> None:
    """Unpacks quanto's codes by PyTorch. quanto would compile an extension for minutes."""
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        from optimum.quanto.library.extensions.cpp import ext

        def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
            return torch.cat([codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)])

        ext._lib = SimpleNamespace(unpack=unpack)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_LM)


@pytest.fixture(scope="session")
def tiny_lm() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def llama() -> Any:
    """Random, two layers of two KV heads of 64, which all quantised caches can hold."""
    return tiny_model("llama", head_dim=64)


@pytest.fixture(scope="session")
def gemma() -> Any:
    """Random, a layer with a sliding window of 24 and one without."""
    return tiny_model("gemma3_text")


@pytest.fixture
def invented(names: None) -> None:
    """A task and methods that need no model."""
    add_invented()


@pytest.fixture
def names() -> Iterator[None]:
    """Forgets after a test what it has registered."""
    before = [(registry, registry.names(), dict(registry._entries)) for registry in (METHODS, TASKS)]
    yield
    for registry, _, entries in before:
        registry._entries = entries
