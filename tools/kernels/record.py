"""Records launches instead of running them, for a device that need not be present."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, mangle_type

from hf_diffkv.ops.backend import Device
from tools.kernels.assumed import assume_device
from tools.kernels.variant import TARGETS, KernelVariant


def record(launch: Callable[..., object], *arguments: object, targets: Sequence[str] = TARGETS) -> list[KernelVariant]:
    """Returns the variants that `launch(*arguments)` compiles, in launch order and named by kernel.

    Args:
        launch: launcher to record. Its tensors may be on any device, and those that kernels would fill are unchanged.
        targets: targets that must all compile the same variants.

    Raises:
        ValueError: the variants differ between `targets`.
    """
    found = []
    for target in targets:
        with assume_device(Device(target)), _noted_launches() as variants:
            launch(*arguments)
        found.append(variants)
    for target, variants in zip(targets, found):
        if variants != found[0]:
            raise ValueError(f"what is launched for {target} is not what is for {targets[0]}; record them one by one.")
    return [replace(variant, targets=tuple(targets)) for variant in found[0]]


@contextmanager
def _noted_launches() -> Iterator[list[KernelVariant]]:
    """Appends every launch within the block to a list instead of running it."""
    found: list[KernelVariant] = []

    def note(kernel: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
        found.append(_variant(kernel, arguments, options))

    kinds = JITFunction, InterpretedFunction
    runs = [kind.run for kind in kinds]
    try:
        for kind in kinds:
            kind.run = note
        yield found
    finally:
        for kind, run in zip(kinds, runs):
            kind.run = run


def _variant(kernel: Any, arguments: tuple[object, ...], options: dict[str, Any]) -> KernelVariant:
    """A launch with its arguments as Triton would specialise them, except addresses and multiples of 16."""
    names = kernel.arg_names
    named = {name: options.pop(name) for name in names if name in options}
    given = inspect.signature(kernel.fn).bind(*arguments, **named).arguments
    signature, constexprs = {}, {}
    for parameter in _parameters(kernel):
        value = given[parameter.name]
        kind = "constexpr"
        if not parameter.is_constexpr and value is not None:
            kind = mangle_type(value, not parameter.do_not_specialize)
        if kind == "constexpr":
            constexprs[parameter.name] = value
        else:
            signature[parameter.name] = kind
    launch = {option: options.pop(option) for option in ("num_warps", "num_stages") if option in options}
    name = kernel.fn.__name__.removesuffix("_kernel")
    return KernelVariant(name, kernel, signature, constexprs, **launch, options=options)


@cache
def _parameters(kernel: Any) -> list[Any]:
    return (kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)).params
