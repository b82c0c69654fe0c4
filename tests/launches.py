"""Counts on the CPU what a GPU would launch: kernels of the package in Triton's interpreter, PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
from host_reads import HostReads
from triton.runtime.interpreter import GridExecutor

from hf_diffkv.ops.backend import use_backend
from hf_diffkv.store import prompt

# they only allocate, or tell what is known without the device
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
    """Within its context, notes launches and reads, each at its `phase`.

    Every operator counts one but for views and allocations, and every kernel of the package one, whatever the
    interpreter does for it.
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
    """Has prompts attend by the reference, in the phase "attention", behind which is the phase "after"."""
    attention = prompt.prefill_attention

    def marked(*args: Any, **options: Any) -> Any:
        counter.phase = "attention"
        with use_backend("reference"):
            found = attention(*args, **options)
        counter.phase = "after"
        return found

    monkeypatch.setattr(prompt, "prefill_attention", marked)


def launches(func: Any) -> bool:
    """Whether an operator runs something on the device."""
    returns = func._schema.returns
    view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return bool(returns) and not view and func.overloadpacket.__name__ not in NO_LAUNCH
