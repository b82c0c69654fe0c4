"""Memory that a prompt needs beyond its keys, values and output while a layer compresses it: counted, not measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from given_stores import attend_prompt, new_store
from native_code import needs_native
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_diffkv import DiffKVConfig
from hf_diffkv.ops import rotation
from hf_diffkv.ops.compact import rewrite
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import Store, begin_forward

HEADS, GROUP, DIM = 8, 2, 128
TOKENS = 1536


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tensors copied at once, which have a fixed size, small compared with the prompt."""
    monkeypatch.setattr(rewrite, "READ_TOKENS", 1024)
    monkeypatch.setattr(rotation, "FLOAT_ELEMENTS", 1 << 17)


class LiveBytes(TorchDispatchMode):
    """Counts the live memory of tensors created by operators while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {self._key(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := self._key(tensor)) not in given | self._live.keys():
                storage = tensor.untyped_storage()
                self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata


def attend(store: Store, tokens: int, seed: int) -> tuple[int, int]:
    """Peak of one layer's turn beyond its output, and the bytes of its keys and values."""
    generator = torch.Generator().manual_seed(seed)
    # laid out as in models
    shapes = [(1, tokens, heads, DIM) for heads in (HEADS * GROUP, HEADS, HEADS)]
    states = [torch.randn(shape, generator=generator).to(store.dtype).transpose(1, 2) for shape in shapes]
    begin_forward(store, tokens)
    with LiveBytes() as live:
        output = attend_prompt(store, 0, *states, softmax=Softmax(DIM**-0.5))
    store.padding.append(tokens, None)
    given = sum(state.nbytes for state in states[1:])
    assert live.peak > output.nbytes
    return live.peak - output.nbytes, given


@needs_native
@pytest.mark.parametrize("options", [{}, {"rotate": True, "center": True}], ids=["default", "rotated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_copy_of_all_keys_and_values_is_made(dtype: torch.dtype, options: dict[str, bool]) -> None:
    store = new_store(DiffKVConfig(alpha_high=1.0, **options), 1, 1, HEADS, DIM, DIM, dtype, torch.device("cpu"))
    taken, given = attend(store, TOKENS, seed=0)
    assert taken < given


@needs_native
def test_a_chunk_reads_the_past_from_its_pages() -> None:
    store = new_store(DiffKVConfig(alpha_low=0.0), 1, 1, HEADS, DIM, DIM, torch.bfloat16, torch.device("cpu"))
    _, past = attend(store, TOKENS, seed=0)
    taken, _ = attend(store, 64, seed=1)
    # nothing is pruned, so the past is large; its positions and scores are read, its keys and values not copied
    assert taken < past
