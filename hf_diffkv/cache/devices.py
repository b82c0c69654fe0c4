"""Which device holds which layer of a model, and which share of every layer's heads this process holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

ValueT = TypeVar("ValueT")
# what a rank that did well raises for another one's error
ERROR_KINDS = {"MemoryError": MemoryError, "ValueError": ValueError, "RuntimeError": RuntimeError}


@dataclass(frozen=True)
class TensorParallel:
    """This process among those that hold the same layers and share out their heads.

    Attributes:
        rank, size: place in the group, and how many share.
        group: their `torch.distributed` process group; None where every process works for itself.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, model: Any) -> TensorParallel:
        """What Transformers' `tp_plan` made of `model`."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        from torch.distributed.tensor import DTensor

        for mesh in (p.device_mesh for p in model.parameters() if isinstance(p, DTensor)):
            names = mesh.mesh_dim_names
            # in older releases of Transformers, and where the user made it, the mesh may have no names
            if names is None and mesh.ndim == 1 and mesh.size() == getattr(model, "tp_size", None):
                return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())
            if "tp" in (names or ()):
                return cls(mesh["tp"].get_local_rank(), mesh["tp"].size(), mesh["tp"].get_group())
        return cls()

    def share(self, heads: tuple[ValueT, ...], count: int) -> tuple[ValueT, ...]:
        """This rank's `count` values of one per head of the model; unchanged where it is given `count` already."""
        if self.size > 1 and len(heads) == self.size * count:
            return heads[self.rank * count : (self.rank + 1) * count]
        return heads

    @contextmanager
    def in_step(self, device: torch.device) -> Iterator[None]:
        """Work that may fail on one rank alone: then it fails on all of them, as no rank may go on without the others.

        Every rank of the `group` must come here. Reads the device.

        Raises:
            What the block raised; on the other ranks an error of its kind that names the rank.
        """
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = torch.tensor(int(error is not None), device=device)
        dist.all_reduce(failed, group=self.group)
        if not int(failed):
            return
        reports: list[Any] = [None] * self.size
        dist.all_gather_object(reports, None if error is None else (error_kind(error), str(error)), group=self.group)
        if error is not None:
            raise error
        rank, (kind, message) = next((i, report) for i, report in enumerate(reports) if report is not None)
        raise ERROR_KINDS[kind](f"tensor-parallel rank {rank} of {self.size} failed, so this one stops too: {message}")

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        return self

    def __reduce__(self) -> tuple:
        # a process group stays in its process; the next generate() finds it again
        return TensorParallel, (self.rank, self.size)


def error_kind(error: Exception) -> str:
    """Which of `ERROR_KINDS` other ranks raise for `error`."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "MemoryError"
    return "ValueError" if isinstance(error, ValueError) else "RuntimeError"


def main_device(model: Any) -> torch.device:
    """Where layers run that `layer_devices` does not name. Weights that are offloaded stand on the meta device."""
    device_map = getattr(model, "hf_device_map", None) or {}
    running = [device for device in device_map.values() if device not in ("cpu", "disk")]
    if running:
        return _actual(running[0])
    if model.device.type != "meta":
        return model.device
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    hooks = [each for hook in hooks for each in getattr(hook, "hooks", (hook,))]
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return _actual(next((device for device in devices if device is not None), "cpu"))


def layer_devices(model: Any) -> dict[int, torch.device]:
    """Where each layer of the decoder runs; empty unless a `device_map` put the model on several devices."""
    device_map = getattr(model, "hf_device_map", None) or {}
    # layers offloaded to the host or to disk run on the first other device
    running = [device for device in device_map.values() if device not in ("cpu", "disk")]
    if len(set(running)) < 2:
        return {}
    found = {index: _entry(device_map, name) for index, name in _layer_names(model).items()}
    return {index: _actual(running[0] if device in ("cpu", "disk") else device) for index, device in found.items()}


def absent_layers(model: Any, layers: list[int]) -> set[int]:
    """Those of `layers` that pipeline parallelism put into another process."""
    here = _layer_names(model)
    return set(layers) - set(here) if here else set()


def are_apart(model: Any, layers: tuple[int, ...]) -> bool:
    """Whether `layers` are on several devices, or some of them only are in this process."""
    devices = layer_devices(model)
    absent = absent_layers(model, list(layers))
    return len({devices.get(layer) for layer in layers}) > 1 or 0 < len(absent) < len(layers)


def _layer_names(model: Any) -> dict[int, str]:
    """The name of a module in each of the decoder's layers that are in this process."""
    decoder = {id(module) for module in model.get_decoder().modules()}
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and id(module) in decoder:
            names.setdefault(index, name)
    return names


def _entry(device_map: dict[str, Any], name: str) -> Any:
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map[name]


def _actual(device: Any) -> torch.device:
    """As tensors name it: "cuda" and 0 are cuda:0."""
    return torch.empty(0, device=device).device
