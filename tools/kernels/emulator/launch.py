"""Runs the library's own launch code, executing the compiled PTX one block at a time."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from .block import Block
from .compiler import Compiler, Kernel
from .global_memory import GlobalMemory
from .state import BlockState

Index = tuple[int, int, int]
ORDERS: dict[str, Callable[[list[Index]], list[Index]]] = {
    "ascending": list,
    "descending": lambda blocks: blocks[::-1],
    "random": lambda blocks: random.Random(0).sample(blocks, len(blocks)),
}


@dataclass
class Emulator:
    """Runs every launch within `active`.

    Attributes:
        order: order of the blocks, a key of `ORDERS`.
        processors: number of multiprocessors of the device, as launchers see it.
        launched: name and grid of every launch.
        kernels: kernel of the last launch, by name.
        change: function of a kernel's name and the kernel that returns the kernel to run in its place; used to test the
            tests.
    """

    compiler: Compiler
    order: str = "ascending"
    processors: int = 2
    launched: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    change: Callable[[str, Kernel], Kernel] | None = None

    @contextmanager
    def active(self) -> Iterator[Emulator]:
        """Makes launchers find a device of the compiler's target, and executes their launches here."""
        # imported only when a test needs it, since not every machine has Triton
        from triton.runtime.interpreter import InterpretedFunction

        from hf_diffkv.ops.backend import Device
        from tools.kernels.assumed import assume_device

        def run(function: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.launch(function.fn, arguments, grid, options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpretedFunction, "run", run)
            with assume_device(Device(self.compiler.target, self.processors)):
                yield self

    def launch(self, function: Any, arguments: tuple, grid: Sequence[int], options: dict[str, Any]) -> None:
        kernel = self.compiler.compile(function, arguments, options)
        if self.change is not None:
            kernel = self.change(function.__name__, kernel)
        names = list(inspect.signature(function).parameters)
        given = dict(zip(names, arguments)) | options
        self.launched.append((function.__name__, tuple(grid)))
        if self.kernels.get(function.__name__) is not kernel:
            self.kernels[function.__name__] = kernel
            kernel.code.runs[:] = 0
        sizes = tuple(grid) + (1,) * (3 - len(grid))
        memory = GlobalMemory(value for value in given.values() if isinstance(value, torch.Tensor))
        parameters = self._parameters(kernel, given)
        blocks = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(sizes)))]
        for index in ORDERS[self.order](blocks):
            state = BlockState(kernel.code.program, parameters, memory, kernel.shared, index, sizes)
            Block(kernel.code, state, str(index)).run()

    def never_run(self, name: str) -> list[str]:
        """Copies, matrix products, barriers and stores of a kernel that no launch has reached."""
        code = self.kernels[name].code
        wanted = ("mma", "wgmma", "ldmatrix", "stmatrix", "cp.async", "bar", "st.", "atom", "prmt")
        return [
            f"{instruction.text} ({instruction.place})"
            for instruction, runs in zip(code.program.instructions, code.runs)
            if not runs and instruction.opcode.startswith(wanted)
        ]

    @staticmethod
    def _parameters(kernel: Kernel, given: dict[str, Any]) -> dict[str, bytes]:
        """Bytes by PTX name; the last ones are for scratch memory, which no kernel uses."""
        declared = kernel.code.program.parameters
        values = [given[name] for name in kernel.runtime]
        values += [0] * (len(declared) - len(values))
        return {name: _bytes(value, width) for (name, width), value in zip(declared, values)}


def _bytes(value: Any, width: int) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, float):
        if width != 4:
            raise ValueError(f"{value} as an argument of {width} bytes")
        return torch.tensor([value], dtype=torch.float32).numpy().tobytes()
    return int(value).to_bytes(width, "little", signed=value < 0)
