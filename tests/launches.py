"""Counts on the CPU what a GPU would launch: the package's kernels in Triton's interpreter, and PyTorch operators."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from given_stores import attend_prompt
from host_reads import HostReads
from triton.runtime.interpreter import GridExecutor

from hf_diffkv.ops import table
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.prefill_attention import launch
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import Store, begin_forward, check_integrity

# what the first layer of a forward reads, in one copy to the host
FIRST_READS = ["cpu in read_together", "numpy in read_together"]

# they only allocate, or return what is known without the device
NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "is_pinned",
    "set_",
    "resize_",
    "_unsafe_view",
}


class Launches(HostReads):
    """Notes launches and reads within the context, each in its `phase`.

    Every operator except views and allocations counts as one launch, and so does every kernel of the package, whatever
    the interpreter does for it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.phase = ""
        self.launched: list[tuple[str, str]] = []
        self.reads: list[tuple[str, str]] = []
        call = GridExecutor.__call__

        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> Any:
            self.note(executor.fn.__name__)
            active, self.active = self.active, False
            try:
                return call(executor, *args, **kwargs)
            finally:
                self.active = active

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def note(self, what: str) -> None:
        if self.active:
            self.launched.append((self.phase, what))

    def record(self, what: str) -> None:
        before = len(self.found)
        super().record(what)
        self.reads += [(self.phase, found) for found in self.found[before:]]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if launches(func):
            self.note(func.overloadpacket.__name__)
        return super().__torch_dispatch__(func, types, args, kwargs)


def mark_attention(counter: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes prompts attend with the reference in the phase "attention", followed by the phase "after"."""
    attention = table.ops_of("reference").prefill_attention

    def marked(*args: Any, **options: Any) -> Any:
        counter.phase = "attention"
        with use_backend("reference"):
            found = attention(*args, **options)
        counter.phase = "after"
        return found

    monkeypatch.setattr(launch, "prefill_attention", marked)
    # implementations that were found before stay as they are
    monkeypatch.setattr(table, "ops_of", cache(table.ops_of.__wrapped__))


def turns_of_layers(
    store: Store, dim: int, monkeypatch: pytest.MonkeyPatch, free: int = 0
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Runs a prompt and two turns of two requests with kernels.

    Args:
        free: pages that are free before each layer.

    Yields:
        The layer, what it launches after attention, and what it reads outside attention.
    """
    counter = Launches(monkeypatch)
    mark_attention(counter, monkeypatch)
    with use_backend("kernels"), torch.no_grad():
        # all stay in the window; they leave it and rows are centred; a turn over what is stored
        for turn, tokens in enumerate((6, 20, 12)):
            begin_forward(store, tokens)
            valid = torch.arange(tokens) >= torch.tensor([[0], [2]]) if turn == 1 else None
            for layer in range(2):
                inputs = [torch.randn(2, heads, tokens, dim) for heads in (2, 1, 1)]
                store.pool.ensure_free(free)
                counter.phase = "before"
                counter.launched.clear()
                counter.reads.clear()
                with counter:
                    attend_prompt(store, layer, *inputs, softmax=Softmax(0.2), valid=valid)
                after = [what for phase, what in counter.launched if phase == "after"]
                yield layer, after, [what for phase, what in counter.reads if phase != "attention"]
    check_integrity(store)


def launches(func: Any) -> bool:
    """Whether an operator runs something on the device."""
    returns = func._schema.returns
    view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return bool(returns) and not view and func.overloadpacket.__name__ not in NO_LAUNCH
