"""Counts what makes the host wait for a device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_diffkv.cache.attention import attend_at
from hf_diffkv.cache.handles import layer_of
from hf_diffkv.ops.softmax import Softmax

READS = {
    torch.ops.aten._local_scalar_dense,
    # these stand for it inside an operator
    torch.ops.aten.item,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
    torch.ops.aten._unique,
    torch.ops.aten._unique2,
    torch.ops.aten.unique_dim,
    torch.ops.aten.unique_consecutive,
    torch.ops.aten.bincount,
    torch.ops.aten.histc,
}


def attend_within(
    mode: TorchDispatchMode,
    states: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    order: Tensor,
    handle: Tensor,
    reads: bool,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Runs a compiled forward's operator so that `mode` sees all that happens inside it; `handle` is on the CPU."""
    layer = layer_of(handle)
    with mode:
        return attend_at(layer, *states, mask, Softmax(scaling, softcap, sinks), reads)


class HostReads(TorchDispatchMode):
    """Notes every host read of a tensor that the package causes within the context, even on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.active = False
        for name in ("tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name: str, method: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.record(name)
            return method(tensor, *args, **kwargs)

        return call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled forward stays compiled, and its reads are seen."""
        return True

    def __enter__(self) -> HostReads:
        self.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.active = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.hf_diffkv.attend.default:
            output = attend_within(self, *args, **kwargs)
            self.active = True
            return output
        packet = func.overloadpacket
        if packet in READS:
            self.record(str(func))
        elif packet in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                self.record(f"{func} with a bool mask")
        elif packet is torch.ops.aten.repeat_interleave and kwargs.get("output_size") is None:
            self.record(str(func))
        return func(*args, **kwargs)

    def record(self, what: str) -> None:
        frame = sys._getframe()
        while frame is not None and self.active:
            if frame.f_globals.get("__name__", "").startswith("hf_diffkv"):
                # Python 3.10 knows only the name
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
                self.found.append(f"{what} in {name}")
                return
            frame = frame.f_back
