"""Bytes of every kind of cache against what its format says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model
from transformers import DynamicCache

from hf_diffkv.evaluation.methods import HeldBytes, get_method
from hf_diffkv.evaluation.methods.base import tensor_bytes
from hf_diffkv.evaluation.session import Session

LAYERS, HEADS, DIM = 2, 2, 64
# of the exact tokens 4 are sinks
PROMPT, WINDOW = 150, 68
# keys and values of one token of all layers and heads
NUMBERS = 2 * LAYERS * HEADS * DIM
# the group that quantised caches share a scale and a zero point over
GROUP = 64
FLOAT32, BFLOAT16 = 4, 2


def ids(count: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def held(model: Any, label: str, *sizes: int) -> HeldBytes:
    session = Session(model, get_method(label))
    for size in sizes:
        session.forward(ids(size))
    return session.held()


@pytest.fixture(scope="module")
def bfloat16() -> Any:
    return tiny_model("llama", head_dim=DIM, dtype=torch.bfloat16)


def test_dense(llama: Any, bfloat16: Any) -> None:
    for model, itemsize in ((llama, FLOAT32), (bfloat16, BFLOAT16)):
        for sizes in ((PROMPT,), (PROMPT, 1, 7)):
            expected = sum(sizes) * NUMBERS * itemsize
            assert held(model, "dense", *sizes) == HeldBytes(expected, expected)


def test_empty_cache(llama: Any) -> None:
    assert held(llama, "dense") == HeldBytes(0, 0)
    assert held(llama, "quanto:4").bytes == held(llama, "fp8").bytes == 0


@pytest.mark.parametrize(
    ("label", "bits"), [("quanto:4", 4), ("quanto:2", 2), ("hqq:4", 4), ("hqq:2", 2), ("hqq:8", 8)]
)
def test_quantised_by_groups(label: str, bits: int, bfloat16: Any) -> None:
    """Codes, and per group a scale and a zero point in the model's dtype; what is newer stays as it is."""
    codes = PROMPT * NUMBERS * bits // 8
    scales = PROMPT * NUMBERS // GROUP * 2 * BFLOAT16
    assert held(bfloat16, label, PROMPT).bytes == codes + scales
    assert held(bfloat16, label, PROMPT, 20, 3).bytes == codes + scales + 23 * NUMBERS * BFLOAT16


def test_fp8(bfloat16: Any) -> None:
    """A byte per number, and a float32 scale for the keys of each layer and for its values."""
    assert held(bfloat16, "fp8", PROMPT).bytes == PROMPT * NUMBERS + 2 * LAYERS * FLOAT32
    assert held(bfloat16, "fp8", PROMPT, 20).bytes == (PROMPT + 20) * NUMBERS + 2 * LAYERS * FLOAT32


@pytest.mark.parametrize(("label", "bits"), [("diffkv:K8V4", 12), ("diffkv:K4V2", 6), ("diffkv:K8V8", 16)])
def test_diffkv(label: str, bits: int, bfloat16: Any) -> None:
    found = held(bfloat16, label, PROMPT)
    outside = PROMPT - WINDOW
    codes = outside * NUMBERS * bits // 16
    assert found.payload_bytes == codes + WINDOW * NUMBERS * BFLOAT16
    # metadata, sums and positions of every token, tables, pages that are not full
    assert found.bytes > found.payload_bytes
    assert found.levels["low"] + found.levels["high"] == outside * LAYERS * HEADS
    assert found.levels["window"] == WINDOW * LAYERS * HEADS


def test_diffkv_lossless(bfloat16: Any) -> None:
    assert held(bfloat16, "diffkv:lossless", PROMPT).payload_bytes == PROMPT * NUMBERS * BFLOAT16


def test_sliding_windows(gemma: Any) -> None:
    """One layer holds everything, the other its window less one; the same for every method."""
    heads, dim, window = 2, 16, 24
    token = 2 * heads * dim * FLOAT32
    size = torch.tensor(window).nbytes
    for sizes in ((PROMPT,), (PROMPT, 5)):
        sliding = (window - 1) * token + size
        expected = sum(sizes) * token + sliding
        assert held(gemma, "dense", *sizes) == HeldBytes(expected, expected)
        assert held(gemma, "diffkv:lossless", *sizes).payload_bytes == expected
    outside = PROMPT - WINDOW
    low = held(gemma, "diffkv:K4V2", PROMPT).payload_bytes
    assert low == sliding + WINDOW * token + outside * token * 6 // (16 * FLOAT32)


def test_shorter_than_a_sliding_window(gemma: Any) -> None:
    assert held(gemma, "dense", 10).bytes == 2 * 10 * 2 * 2 * 16 * FLOAT32 + 8


def test_a_view_counts_as_what_it_keeps() -> None:
    whole = torch.zeros(100, dtype=torch.float64)
    assert tensor_bytes([whole[:3], whole[50:]]) == 800
    assert tensor_bytes({"a": (whole, [whole.view(10, 10)]), "b": torch.zeros(2, dtype=torch.int8)}) == 802


def test_layers_of_models_count() -> None:
    """Some models bring a layer of their own."""

    class Layer:
        def __init__(self) -> None:
            self.index_keys = torch.zeros(5)

    Layer.__module__ = "transformers.models.some.modeling_some"
    cache = DynamicCache()
    cache.layers = [Layer()]
    assert tensor_bytes(cache.layers) == tensor_bytes(cache) == 20
