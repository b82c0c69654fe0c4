"""Choice of the backend that runs an op, and GPU properties for kernel launchers.

Ops run as Triton kernels on supported GPUs, as native code on CPUs where it was built, and as the PyTorch reference
elsewhere.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch

from ..extras import install
from ..native import library
from ..native.library import unit_stride as unit_stride
from ..pages import LayerRows, PageLayout, TierLayout

REFERENCE, KERNELS, NATIVE = BACKENDS = ("reference", "kernels", "native")
# older NVIDIA devices have less shared memory than the kernels need, and no bfloat16
OLDEST_CAPABILITY = (8, 0)
# AMD devices that the kernels are compiled for, and the oldest Triton that compiles them (docs/kernels.md)
AMD_TARGETS = ("gfx942",)
OLDEST_TRITON = (3, 6)
# PyTorch's GPU builds include Triton
INSTALL = install("gpu")
# all consumer GPUs have as much shared memory as sm_86, which suffices for the choices made for sm_80
OTHER_TARGETS = {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
# most elements that kernels accept in a rotary key or latent
WIDEST_LATENT = 512
# target of interpreted kernels
INTERPRETER = "interpreter"
_logger = logging.getLogger("hf_diffkv")
# backend of the innermost `use_backend`, or None
forced: str | None = None


@dataclass(frozen=True)
class Device:
    """Properties of a device from which launchers choose sizes and constants.

    Attributes:
        target: `sm_80`, `sm_90`, `sm_100`, `gfx942` or `INTERPRETER`.
        processors: number of multiprocessors; 1 for the interpreter, which runs programs one by one.
        registers: number of registers per multiprocessor; NVIDIA devices only.
        shared: bytes of shared memory per multiprocessor; NVIDIA devices only.
    """

    target: str
    processors: int = 1
    registers: int = 65536
    shared: int = 164 << 10


# device that launchers assume for every tensor while launches are only recorded (tools/kernels)
_assumed: Device | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs every op on one backend inside the `with` block, regardless of the device; for tests and comparisons.

    The reference runs if the backend does not support an op, dtype or precision.

    Raises:
        ValueError: `name` is not in `BACKENDS`.
        ImportError: `name` is "kernels" and Triton is not installed.
    """
    global forced
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; use one of {BACKENDS}.")
    if name == KERNELS and importlib.util.find_spec("triton") is None:
        raise ImportError(f"the backend {KERNELS!r} needs Triton: {INSTALL}.")
    previous, forced = forced, name
    try:
        yield
    finally:
        forced = previous


def choose(device: torch.device, dtype: torch.dtype, *tiers: TierLayout) -> str:
    """Returns the entry of `BACKENDS` that runs ops for a model of `dtype` on `device` with pages of `tiers`."""
    if use_kernels(device, dtype):
        return KERNELS
    wanted = device.type == "cpu" if forced is None else forced == NATIVE
    return NATIVE if wanted and library.fits(dtype, *tiers) else REFERENCE


def use_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether ops on keys and values of `dtype` on `device` run as Triton kernels."""
    if forced is not None:
        return forced == "kernels"
    return device.type == "cuda" and dtype != torch.float64 and _has_triton() and _fits(device)


def takes_latents(layout: PageLayout) -> bool:
    """Returns whether kernels can attend from absorbed queries (store/latent.py) to pages of this layout.

    They multiply latents one quarter at a time, each with one scale, and update no scores.
    """
    high = layout.high
    in_quarters = high.value_dim % 4 == 0 and all(
        tier.v_bits == 16 or (tier.v_bits > 1 and 4 % tier.v_groups == 0) for tier in (high, layout.low)
    )
    return in_quarters and not layout.selects and max(high.key_dim, high.value_dim) <= WIDEST_LATENT


def device_of(device: torch.device) -> Device:
    """Returns the properties of the GPU that runs kernels for tensors on `device`."""
    return _real_device(device) if _assumed is None else _assumed


def without_autocast(op: Callable) -> Callable:
    """Decorates an op to run without autocast, because ops choose their compute dtypes themselves.

    The op's first argument must be a tensor or `LayerRows`.
    """

    @wraps(op)
    def run(first: Any, *args: Any, **kwargs: Any) -> Any:
        device = first.device.type
        if not torch.is_autocast_enabled(device):
            return op(first, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return op(first, *args, **kwargs)

    return run


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, given: dict[str, object], **more: object) -> None:
    """Launches a Triton kernel with the entries of `given` that match its parameters, and with all of `more`.

    Triton launches on the current device, so `device` is made current.
    """
    taken = {name: given[name] for name in kernel.arg_names if name in given}
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**{**taken, **more})


def row_arguments(rows: LayerRows) -> dict[str, object]:
    """Returns a layer's rows as kernel arguments."""
    names = ("high_count", "low_count", "window_key", "window_value", "window_score", "window_start", "sink_end")
    free_list, (high, low) = rows.free_list, rows.tiers
    return {
        **{name: getattr(rows, name) for name in (*names, "length", "heads", "batch", "width", "slots", "sink_slots")},
        "pages": rows.pages,
        "table": rows.page_table,
        "rows": rows.count,
        "ring": free_list.ring,
        "state": free_list.state,
        "HIGH": high,
        "LOW": low,
    }


@cache
def _real_device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(INTERPRETER)
    limits = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device(AMD_TARGETS[0], limits.multi_processor_count)
    return Device(
        OTHER_TARGETS.get(torch.cuda.get_device_capability(device), "sm_80"),
        limits.multi_processor_count,
        limits.regs_per_multiprocessor,
        limits.shared_memory_per_multiprocessor,
    )


@cache
def _has_triton() -> bool:
    """Returns whether Triton is installed and recent enough; logs once if not."""
    if importlib.util.find_spec("triton") is None:
        lack = "Triton is not installed"
    else:
        import triton

        if tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) >= OLDEST_TRITON:
            return True
        lack = "Triton {} is older than {}.{}".format(triton.__version__, *OLDEST_TRITON)
    _logger.warning("%s, which the kernels need; the cache runs in PyTorch, which is slower (%s)", lack, INSTALL)
    return False


@cache
def _fits(device: torch.device) -> bool:
    """Returns whether the kernels run on a device of type "cuda"; logs once if not."""
    if torch.version.hip:
        target = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        fits = target in AMD_TARGETS
        lack = f"the kernels were compiled for {', '.join(AMD_TARGETS)} alone, not for {target}"
    else:
        fits = torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
        oldest = "compute capability {}.{}".format(*OLDEST_CAPABILITY)
        lack = f"{torch.cuda.get_device_name(device)} is older than {oldest}, which the kernels need"
    if not fits:
        _logger.warning("%s; the cache runs in PyTorch, which is slower", lack)
    return fits
