"""Placement of a model: the device of each layer, and this process's share of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..pages.reserve import NO_MEMORY

ValueT = TypeVar("ValueT")
# error that a successful rank raises on behalf of a failed one
ERROR_KINDS = {"MemoryError": MemoryError, "ValueError": ValueError, "RuntimeError": RuntimeError}


@dataclass(frozen=True)
class TensorParallel:
    """This process's place in a group of processes that hold the same layers and split their heads.

    Attributes:
        rank, size: rank within the group, and number of ranks.
        group: `torch.distributed` process group; None without tensor parallelism.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, model: Any) -> TensorParallel:
        """Returns the place that Transformers' `tp_plan` gave this process for `model`."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        from torch.distributed.tensor import DTensor

        for mesh in (p.device_mesh for p in model.parameters() if isinstance(p, DTensor)):
            names = mesh.mesh_dim_names
            # the mesh may have no names in older releases of Transformers, or if the user made it
            if names is None and mesh.ndim == 1 and mesh.size() == getattr(model, "tp_size", None):
                return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())
            if "tp" in (names or ()):
                return cls(mesh["tp"].get_local_rank(), mesh["tp"].size(), mesh["tp"].get_group())
        return cls()

    def share(self, heads: tuple[ValueT, ...], count: int) -> tuple[ValueT, ...]:
        """Returns this rank's `count` values out of one per head of the model; `count` values are returned as given."""
        if self.size > 1 and len(heads) == self.size * count:
            return heads[self.rank * count : (self.rank + 1) * count]
        return heads

    @contextmanager
    def in_step(self, device: torch.device) -> Iterator[None]:
        """Makes the block fail on all ranks if it fails on one, as no rank may continue without the others.

        Every rank of `group` must enter it. Reads the device.

        Raises:
            Exception: raised by the block; other ranks raise an error of the same kind that names the failed rank.
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
        # a process group cannot leave its process; the next generate() finds it again
        return TensorParallel, (self.rank, self.size)


def error_kind(error: Exception) -> str:
    """Returns the name in `ERROR_KINDS` of the error that other ranks raise for `error`."""
    if isinstance(error, NO_MEMORY):
        return "MemoryError"
    return "ValueError" if isinstance(error, ValueError) else "RuntimeError"


def main_device(model: Any) -> torch.device:
    """Returns the device of layers that `layer_devices` does not name. Offloaded weights are on the meta device."""
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
    """Returns the device of each decoder layer; empty unless a `device_map` put the model on several devices."""
    device_map = getattr(model, "hf_device_map", None) or {}
    # layers offloaded to the host or to disk run on the first other device
    running = [device for device in device_map.values() if device not in ("cpu", "disk")]
    if len(set(running)) < 2:
        return {}
    found = {index: _entry(device_map, name) for index, name in _layer_names(model).items()}
    return {index: _actual(running[0] if device in ("cpu", "disk") else device) for index, device in found.items()}


def layer_shapes(model: Any) -> dict[int, tuple[int, int, int]]:
    """Returns KV heads, key_dim and value_dim of each decoder layer whose projections reveal them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    shapes = {}
    for module in () if decoder is None else decoder.modules():
        # looking up a missing attribute is slow, and most modules lack this one
        index = vars(module).get("layer_idx")
        if not isinstance(index, int):
            continue
        dim = getattr(module, "head_dim", None)
        sizes = [getattr(getattr(module, name, None), "out_features", None) for name in ("k_proj", "v_proj")]
        if all(isinstance(number, int) and number > 0 for number in (dim, *sizes)):
            heads = sizes[0] // dim
            shapes[index] = (heads, dim, sizes[1] // max(1, heads))
    return shapes


def absent_layers(model: Any, layers: list[int]) -> set[int]:
    """Returns the members of `layers` that pipeline parallelism put into another process."""
    here = _layer_names(model)
    return set(layers) - set(here) if here else set()


def are_apart(model: Any, layers: tuple[int, ...]) -> bool:
    """Returns whether `layers` are on several devices, or only some of them are in this process."""
    devices = layer_devices(model)
    absent = absent_layers(model, list(layers))
    return len({devices.get(layer) for layer in layers}) > 1 or 0 < len(absent) < len(layers)


def _layer_names(model: Any) -> dict[int, str]:
    """Returns the name of one module in each decoder layer of this process, by layer index."""
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
    """Returns the device as tensors name it: "cuda" and 0 become cuda:0."""
    return torch.empty(0, device=device).device
