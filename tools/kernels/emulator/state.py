"""State of one block that instructions read and change: registers, memory, and products in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .global_memory import GlobalMemory
from .parse import Program, Register
from .products import Products
from .shared_memory import SharedMemory
from .values import BITS, PtxError, UnknownInstruction, Values, as_bits


class BlockState:
    """Registers and memory of one block.

    Attributes:
        registers: unsigned bits (bool for predicates) of all threads, by register index; all ones before the first
            write.
        threads: numbers of the block's threads, 0, 1, ...
        memory: tensors of the launch.
        shared: shared memory of the block.
        products: matrix products of warp groups that are in flight.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, bytes],
        memory: GlobalMemory,
        shared_bytes: int,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        self.memory = memory
        self.threads = np.arange(program.threads)
        self.shared = SharedMemory(shared_bytes, program.threads)
        # where it does not matter, compilers read registers that were never written
        unset = {bits: np.full(program.threads, ~bits(0)) for bits in BITS.values()}
        unset[np.bool_] = np.ones(program.threads, bool)
        self.registers: list[Values] = [
            unset[np.bool_ if register.predicate else BITS[register.width]] for register in program.registers
        ]
        self.products = Products()
        self._parameters = parameters
        axes = "xyz"
        special = {"%tid.x": self.threads, "%tid.y": 0, "%tid.z": 0, "%ntid.x": program.threads}
        special |= {f"%ctaid.{axis}": index[i] for i, axis in enumerate(axes)}
        special |= {f"%nctaid.{axis}": grid[i] for i, axis in enumerate(axes)}
        for name, register in program.special.items():
            if name not in special:
                raise UnknownInstruction(f"special register {name}")
            values = np.broadcast_to(np.asarray(special[name]), self.threads.shape)
            self.registers[register.index] = values.astype(np.uint32)

    def lanes(self, mask: Values | None) -> Values:
        """Returns the numbers of the threads that take part."""
        return self.threads if mask is None else np.flatnonzero(mask)

    def spread(self, values: Values) -> Values:
        """Returns one element per thread; constants have one for all threads."""
        return values if values.shape == self.threads.shape else np.broadcast_to(values, self.threads.shape)

    def whole_warps(self, mask: Values | None) -> Values:
        """Returns the numbers of the warps that take part. All threads of each warp must do so."""
        if mask is None:
            return np.arange(self.threads.size // 32)
        warps = mask.reshape(-1, 32)
        if np.any(warps.any(1) != warps.all(1)):
            raise PtxError("only some threads of a warp reach what all must do together")
        return np.flatnonzero(warps.all(1))

    def parameter(self, name: str, dtype: type) -> Values:
        return np.frombuffer(self._parameters[name], dtype)[:1]

    def write(self, register: Register, values: Values, mask: Values | None, signed: bool = False) -> None:
        """Sets a register of all threads, or only of those in the mask, from numbers of all threads."""
        bits = self.spread(as_bits(values, register, signed))
        if mask is not None:
            bits = np.where(mask, bits, self.registers[register.index])
        self.registers[register.index] = bits

    def write_lanes(self, register: Register, lanes: Values, bits: Values) -> None:
        """Sets a register of some threads from the same number of bits."""
        if lanes.size < self.threads.size:
            whole = self.registers[register.index].copy()
            whole[lanes] = bits
            bits = whole
        self.registers[register.index] = bits


# executes an instruction for the threads of a mask, or for all threads if it is None
Step = Callable[[BlockState, Values | None], None]
