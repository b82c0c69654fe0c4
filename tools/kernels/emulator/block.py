"""Runs one block: its threads in lock step where they agree, and by masks where they do not.

Of the threads that can go on, those at the earliest instruction go first, so that branches join again where the
compiler lets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .arithmetic import operation
from .exchange import exchange
from .global_memory import GlobalMemory
from .parse import Immediate, Instruction, Program, Register, Symbol, Vector
from .shared_memory import SharedMemory
from .transfers import transfer
from .values import BITS, TYPES, PtxError, UnknownInstruction, Values, as_bits, reader, width_of
from .warpgroup import Products, warpgroup

Step = Callable[["Block", Values | None], None]
CONTROL = ("bra", "ret", "bar.sync")
NEVER = 1 << 30


class Code:
    """A program made executable.

    Attributes:
        runs: how often each instruction was reached.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.runs = np.zeros(len(program.instructions), np.int64)
        self.steps = [self._explained(instruction) for instruction in program.instructions]

    def _explained(self, instruction: Instruction) -> Step | None:
        try:
            return _step(instruction)
        except UnknownInstruction as error:
            raise UnknownInstruction(f"{instruction.text} ({instruction.place}): {error}") from error


def is_control(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(CONTROL)


def _step(instruction: Instruction) -> Step | None:
    """None for control flow, which the block itself does."""
    if is_control(instruction):
        return None
    kinds = (_special, transfer, exchange, warpgroup, _arithmetic)
    step = next(step for kind in kinds if (step := kind(instruction)) is not None)
    if instruction.guard is None:
        return step
    register, negated = instruction.guard

    def guarded(block: Block, mask: Values | None) -> None:
        chosen = block.registers[register.index] ^ negated
        chosen = chosen if mask is None else chosen & mask
        if chosen.all():
            step(block, None)
        elif chosen.any():
            step(block, chosen)

    return guarded


def _special(instruction: Instruction) -> Step | None:
    """Barriers of a warp, and moves that pack or unpack registers."""
    if instruction.opcode == "bar.warp.sync":
        if instruction.operands != (Immediate(-1),):
            raise UnknownInstruction(instruction.text)
        return lambda block, mask: block.shared.barrier(block.whole_warps(mask))
    if not instruction.opcode.startswith("mov."):
        return None
    target, source = instruction.operands
    if isinstance(source, Vector):
        width = width_of(instruction.opcode[4:]) // len(source.parts)
        readers = [reader(part, f"b{8 * width}") for part in source.parts]

        def pack(block: Block, mask: Values | None) -> None:
            parts = np.stack([block.spread(read(block)) for read in readers], 1)
            block.write(target, parts.view(BITS[width * len(readers)])[:, 0], mask)

        return pack
    if isinstance(target, Vector):
        width = width_of(instruction.opcode[4:]) // len(target.parts)
        whole = reader(source, instruction.opcode[4:])

        def unpack(block: Block, mask: Values | None) -> None:
            parts = block.spread(whole(block)).copy().view(BITS[width])
            for register, values in zip(target.parts, parts.reshape(-1, len(target.parts)).T):
                if register is not None:
                    block.write(register, np.ascontiguousarray(values), mask)

        return unpack
    return None


def _arithmetic(instruction: Instruction) -> Step:
    found = operation(instruction.opcode)
    if found is None:
        raise UnknownInstruction(instruction.opcode)
    target, *sources = instruction.operands
    if len(sources) != len(found.sources):
        raise UnknownInstruction(instruction.text)
    readers = [reader(source, type_) for source, type_ in zip(sources, found.sources)]
    signed = found.result[0] == "s"
    compute, dtype = found.compute, np.dtype(TYPES[found.result])

    def run(block: Block, mask: Values | None) -> None:
        values = compute(*[read(block) for read in readers])
        if values.dtype != dtype and found.result != "pred":
            raise TypeError(f"{instruction.opcode} gives {values.dtype}")
        if isinstance(target, Vector):
            # one predicate for each half
            for register, part in zip(target.parts, values.T):
                block.write(register, np.ascontiguousarray(part), mask)
        else:
            block.write(target, values, mask, signed)

    return run


class Block:
    """The state of one block.

    Attributes:
        registers: by index, unsigned bits (bool for predicates) of all threads; all ones before they are written.
        threads: 0, 1, ... of the block.
        products: of warp groups, under way.
    """

    def __init__(
        self,
        code: Code,
        parameters: Mapping[str, bytes],
        memory: GlobalMemory,
        shared_bytes: int,
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        program = code.program
        self.code, self.memory, self.index = code, memory, index
        self.threads = np.arange(program.threads)
        self.shared = SharedMemory(shared_bytes, program.threads)
        # compilers read registers that nothing was written to where it does not matter
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
        self._at = np.zeros(program.threads, np.int64)
        self._waiting = np.zeros(program.threads, bool)
        self._done = np.zeros(program.threads, bool)

    def lanes(self, mask: Values | None) -> Values:
        """Numbers of the threads that take part."""
        return self.threads if mask is None else np.flatnonzero(mask)

    def spread(self, values: Values) -> Values:
        """One element per thread; constants have one for all."""
        return values if values.shape == self.threads.shape else np.broadcast_to(values, self.threads.shape)

    def whole_warps(self, mask: Values | None) -> Values:
        """Numbers of the warps that take part, with all their threads."""
        if mask is None:
            return np.arange(self.threads.size // 32)
        warps = mask.reshape(-1, 32)
        if np.any(warps.any(1) != warps.all(1)):
            raise PtxError("only some threads of a warp reach what all must do together")
        return np.flatnonzero(warps.all(1))

    def parameter(self, name: str, dtype: type) -> Values:
        return np.frombuffer(self._parameters[name], dtype)[:1]

    def write(self, register: Register, values: Values, mask: Values | None, signed: bool = False) -> None:
        """Sets a register of all threads, or of those in the mask, from numbers of all threads."""
        bits = self.spread(as_bits(values, register, signed))
        if mask is not None:
            bits = np.where(mask, bits, self.registers[register.index])
        self.registers[register.index] = bits

    def write_lanes(self, register: Register, lanes: Values, bits: Values) -> None:
        """Sets a register of some threads from as many bits."""
        if lanes.size < self.threads.size:
            whole = self.registers[register.index].copy()
            whole[lanes] = bits
            bits = whole
        self.registers[register.index] = bits

    def run(self) -> None:
        """Until every thread has returned.

        Raises:
            PtxError: names the instruction, its line in the source and the block.
        """
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        while not self._done.all():
            ready = ~self._done & ~self._waiting
            if not ready.any():
                self._waiting[:] = False
                self.shared.barrier()
                continue
            position = int(self._at[ready].min())
            mask = ready & (self._at == position)
            others = ready & ~mask
            self._advance(position, int(self._at[others].min()) if others.any() else NEVER, mask)

    def _advance(self, position: int, stop: int, mask: Values) -> None:
        """Runs the threads of a mask up to where others stand, a branch, a barrier or the end."""
        instructions, steps = self.code.program.instructions, self.code.steps
        given = None if mask.all() else mask
        runs = self.code.runs
        while position < stop:
            step = steps[position]
            runs[position] += 1
            try:
                if step is None:
                    self._control(instructions[position], position, mask)
                    return
                if self.products.registers:
                    self.products.check(instructions[position])
                step(self, given)
            except Exception as error:
                instruction = instructions[position]
                kind = type(error) if isinstance(error, PtxError) else PtxError
                where = f"{instruction.text} ({instruction.place}), block {self.index}"
                raise kind(f"{self.code.program.name}: {where}: {error}") from error
            position += 1
        self._at[mask] = position

    def _control(self, instruction: Instruction, position: int, mask: Values) -> None:
        taken = mask
        if instruction.guard is not None:
            register, negated = instruction.guard
            taken = mask & (self.registers[register.index] ^ negated)
        self._at[mask] = position + 1
        if instruction.opcode in ("bra", "bra.uni"):
            (target,) = instruction.operands
            self._at[taken] = self._label(target)
        elif instruction.opcode == "ret":
            self._done |= taken
            if np.any(self._waiting):
                raise PtxError("some threads return while others wait at a barrier")
        elif instruction.opcode == "bar.sync" and instruction.operands == (Immediate(0),):
            self.whole_warps(taken)
            if np.any(self._done):
                raise PtxError("some threads have returned before others reach this barrier")
            self._waiting |= taken
        else:
            raise UnknownInstruction(instruction.text)

    def _label(self, target: Symbol) -> int:
        return self.code.program.labels[target.name]
