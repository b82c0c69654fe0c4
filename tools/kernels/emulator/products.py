"""Matrix products of warp groups that are in flight."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from .parse import Address, Instruction, Register, Vector
from .shared_memory import SharedMemory
from .values import PtxError, Values


class Products:
    """Products of one block that are in flight, in groups numbered in commit order.

    Attributes:
        registers: group of the product whose result a register awaits, by the register's index.
    """

    def __init__(self) -> None:
        self.registers: dict[int, int] = {}
        self._open = 0
        self._reading: list[tuple[int, Values]] = []

    def begin(self, results: Iterable[Register], offsets: Iterable[Values], shared: SharedMemory) -> None:
        self.registers |= {register.index: self._open for register in results}
        for at in offsets:
            self._reading.append((self._open, at))
            shared.hold(at)

    def commit(self) -> None:
        self._open += 1

    def wait(self, pending: int, shared: SharedMemory) -> None:
        """Completes all groups but the newest `pending`."""
        done = self._open - pending
        self.registers = {index: group for index, group in self.registers.items() if group >= done}
        self._reading = [(group, at) for group, at in self._reading if group >= done]
        shared.release()
        for _, at in self._reading:
            shared.hold(at)

    def check(self, instruction: Instruction) -> None:
        """Checks that an instruction reads no result of a product in flight.

        A move may read one; its target then awaits the same result.

        Raises:
            PtxError: the instruction reads such a result.
        """
        early = [self.registers[index] for index in sources(instruction) if index in self.registers]
        if instruction.opcode.startswith("mov."):
            target = instruction.operands[0]
            for register in target.parts if isinstance(target, Vector) else (target,):
                self.registers.pop(register.index, None)
                if early:
                    self.registers[register.index] = max(early)
        elif early and not instruction.opcode.startswith("wgmma.mma_async"):
            raise PtxError("the result of a matrix product is read before it was waited for")


@cache
def sources(instruction: Instruction) -> tuple[int, ...]:
    """Returns the indices of the registers that an instruction reads."""
    found: list[int] = [] if instruction.guard is None else [instruction.guard[0].index]
    first = 0 if instruction.opcode.startswith(("st", "cp", "bra")) else 1
    for position, operand in enumerate(instruction.operands):
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        for part in parts:
            if isinstance(part, Address):
                found += [part.base.index] if isinstance(part.base, Register) else []
            elif isinstance(part, Register) and position >= first:
                found.append(part.index)
    return tuple(found)
