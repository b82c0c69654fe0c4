"""Runs one block: its threads run in lock step where they agree and are masked where they diverge.

Among the threads that can continue, those at the earliest instruction run first, so that branches reconverge where the
compiler allows it.
"""

from __future__ import annotations

import numpy as np

from .parse import Immediate, Instruction, Symbol
from .state import BlockState
from .steps import Code
from .values import PtxError, UnknownInstruction, Values

NEVER = 1 << 30


class Block:
    """One block: where its threads are, and the state that they share.

    Args:
        name: name of the block in errors.
    """

    def __init__(self, code: Code, state: BlockState, name: str) -> None:
        threads = code.program.threads
        self._code, self._state, self._name = code, state, name
        self._at = np.zeros(threads, np.int64)
        self._waiting = np.zeros(threads, bool)
        self._done = np.zeros(threads, bool)

    def run(self) -> None:
        """Runs until every thread has returned.

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
                self._state.shared.barrier()
                continue
            position = int(self._at[ready].min())
            mask = ready & (self._at == position)
            others = ready & ~mask
            self._advance(position, int(self._at[others].min()) if others.any() else NEVER, mask)

    def _advance(self, position: int, stop: int, mask: Values) -> None:
        """Runs the threads of a mask until they reach the position of others, a branch, a barrier or the end."""
        instructions, steps = self._code.program.instructions, self._code.steps
        given = None if mask.all() else mask
        runs = self._code.runs
        while position < stop:
            step = steps[position]
            runs[position] += 1
            try:
                if step is None:
                    self._control(instructions[position], position, mask)
                    return
                if self._state.products.registers:
                    self._state.products.check(instructions[position])
                step(self._state, given)
            except Exception as error:
                instruction = instructions[position]
                kind = type(error) if isinstance(error, PtxError) else PtxError
                where = f"{instruction.text} ({instruction.place}), block {self._name}"
                raise kind(f"{self._code.program.name}: {where}: {error}") from error
            position += 1
        self._at[mask] = position

    def _control(self, instruction: Instruction, position: int, mask: Values) -> None:
        taken = mask
        if instruction.guard is not None:
            register, negated = instruction.guard
            taken = mask & (self._state.registers[register.index] ^ negated)
        self._at[mask] = position + 1
        if instruction.opcode in ("bra", "bra.uni"):
            (target,) = instruction.operands
            self._at[taken] = self._label(target)
        elif instruction.opcode == "ret":
            self._done |= taken
            if np.any(self._waiting):
                raise PtxError("some threads return while others wait at a barrier")
        elif instruction.opcode == "bar.sync" and instruction.operands == (Immediate(0),):
            self._state.whole_warps(taken)
            if np.any(self._done):
                raise PtxError("some threads have returned before others reach this barrier")
            self._waiting |= taken
        else:
            raise UnknownInstruction(instruction.text)

    def _label(self, target: Symbol) -> int:
        return self._code.program.labels[target.name]
