"""Loads, stores, asynchronous copies, atomics and `ldmatrix`."""

from __future__ import annotations

import numpy as np

from . import matrix
from .cache_hints import create_policy, with_checked_hint, without_hint
from .operands import Reader, reader
from .parse import Address, Immediate, Instruction, Register, Symbol, Vector
from .state import BlockState, Step
from .values import BITS, TYPES, PtxError, UnknownInstruction, Values, as_bits, width_of


def transfer(instruction: Instruction) -> Step | None:
    """Returns the step of an instruction, or None for other kinds."""
    if instruction.opcode.startswith("createpolicy"):
        return create_policy(instruction)
    step = _transfer(without_hint(instruction))
    return step and with_checked_hint(instruction, step)


def _transfer(instruction: Instruction) -> Step | None:
    opcode = instruction.opcode.replace("shared::cta", "shared")
    name, *modifiers = opcode.split(".")
    if name == "ld" and modifiers[0] == "param":
        return _load_parameter(instruction, modifiers[1])
    if name in ("ld", "st") and modifiers[0] in ("global", "shared"):
        return _load_or_store(instruction, name, *modifiers)
    if opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
        return _copy(instruction)
    if opcode == "cp.async.commit_group":
        return lambda block, mask: block.shared.commit(block.lanes(mask))
    if opcode == "cp.async.wait_group":
        (pending,) = instruction.operands
        return lambda block, mask: block.shared.wait(block.lanes(mask), pending.bits)
    if name in ("ldmatrix", "stmatrix"):
        return _move_matrix(instruction, name)
    if name == "atom":
        return _atomic(instruction, modifiers)
    return None


def address_reader(operand: Address, space: str) -> Reader:
    """Returns a function that reads the addresses of all threads: uint64 in global, uint32 in shared memory."""
    if not isinstance(operand, Address):
        raise UnknownInstruction(f"{operand} is no address")
    type_ = "u64" if space == "global" else "u32"
    base, offset = reader(operand.base, type_), TYPES[type_](operand.offset % (1 << 8 * width_of(type_)))
    return lambda block: block.spread(base(block) + offset)


def _load_parameter(instruction: Instruction, type_: str) -> Step:
    target, source = instruction.operands
    if not isinstance(source.base, Symbol) or source.offset:
        raise UnknownInstruction(instruction.opcode)
    return lambda block, mask: block.write(target, block.parameter(source.base.name, TYPES[type_]), mask)


def _registers(operand: Register | Vector) -> tuple[Register | Immediate | None, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _load_or_store(instruction: Instruction, name: str, space: str, *modifiers: str) -> Step:
    *vector, type_ = modifiers
    if vector not in ([], ["v2"], ["v4"]) or type_ not in TYPES:
        raise UnknownInstruction(instruction.opcode)
    target, source = instruction.operands
    registers = _registers(target if name == "ld" else source)
    if len(registers) != (int(vector[0][1]) if vector else 1):
        raise UnknownInstruction(instruction.text)
    address = address_reader(source if name == "ld" else target, space)
    width = width_of(type_)
    if name == "ld":

        def load(block: BlockState, mask: Values | None) -> None:
            lanes = block.lanes(mask)
            at = address(block)[lanes]
            if space == "global":
                data = block.memory.load(at, width * len(registers))
            else:
                data = block.shared.load(lanes, at, width * len(registers))
            numbers = data.view(BITS[width])
            for part, register in enumerate(registers):
                if register is not None:
                    column = np.ascontiguousarray(numbers[:, part])
                    block.write_lanes(register, lanes, as_bits(column, register, type_[0] == "s"))

        return load

    readers = [reader(register, f"b{8 * width}") for register in registers]

    def store(block: BlockState, mask: Values | None) -> None:
        lanes = block.lanes(mask)
        numbers = np.stack([block.spread(read(block))[lanes] for read in readers], 1)
        data = numbers.view(np.uint8)
        if space == "global":
            block.memory.store(address(block)[lanes], data)
        else:
            block.shared.store(lanes, address(block)[lanes], data)

    return store


def _copy(instruction: Instruction) -> Step:
    """Returns the step of `cp.async`. Bytes past the optional fourth operand become zeros and are not read."""
    target, source, size, *rest = instruction.operands
    to, origin, width = address_reader(target, "shared"), address_reader(source, "global"), size.bits
    real = reader(rest[0], "u32") if rest else None
    if width not in (4, 8, 16) or (".cg." in instruction.opcode and width != 16) or len(rest) > 1:
        raise UnknownInstruction(instruction.text)

    def copy(block: BlockState, mask: Values | None) -> None:
        lanes = block.lanes(mask)
        data = np.zeros((lanes.size, width), np.uint8)
        count = np.full(lanes.size, width)
        if real is not None:
            count = block.spread(real(block))[lanes]
        if not np.isin(count, (0, width)).all():
            raise PtxError("an asynchronous copy of a part of its bytes")
        reading = count == width
        data[reading] = block.memory.load(origin(block)[lanes][reading], width)
        block.shared.copy(lanes, to(block)[lanes], data)

    return copy


def _move_matrix(instruction: Instruction, name: str) -> Step:
    _, _, _, shape, count, *rest = instruction.opcode.split(".")
    if shape != "m8n8" or rest[-2:] != ["shared", "b16"] or rest[:-2] not in ([], ["trans"]):
        raise UnknownInstruction(instruction.opcode)
    matrices, transposed = int(count[1]), bool(rest[:-2])
    operands = instruction.operands if name == "ldmatrix" else instruction.operands[::-1]
    registers, address = _registers(operands[0]), address_reader(operands[1], "shared")
    lanes = np.arange(8 * matrices)

    def load(block: BlockState, mask: Values | None) -> None:
        warps = block.whole_warps(mask)
        threads = (32 * warps[:, None] + lanes).ravel()
        data = block.shared.load(threads, address(block)[threads], 16)
        words = matrix.distribute(data.view(np.uint16).reshape(-1, matrices, 8, 8), transposed)
        for register, part in zip(registers, words):
            block.write_lanes(register, block.lanes(mask), part.ravel())

    readers = [reader(register, "b32") for register in registers]

    def store(block: BlockState, mask: Values | None) -> None:
        warps = block.whole_warps(mask)
        threads = (32 * warps[:, None] + lanes).ravel()
        words = np.stack([block.spread(read(block)).reshape(-1, 32)[warps] for read in readers])
        rows = np.ascontiguousarray(matrix.collect(words, transposed))
        block.shared.store(threads, address(block)[threads], rows.view(np.uint8).reshape(-1, 16))

    return load if name == "ldmatrix" else store


ATOMIC = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}


def _atomic(instruction: Instruction, modifiers: list[str]) -> Step:
    *scope, name, type_ = modifiers
    if scope != ["global", "gpu", "acq_rel"] or name not in ATOMIC or type_ not in TYPES:
        raise UnknownInstruction(instruction.opcode)
    target, where, source = instruction.operands
    address, operand, compute = address_reader(where, "global"), reader(source, type_), ATOMIC[name]

    def run(block: BlockState, mask: Values | None) -> None:
        lanes = block.lanes(mask)
        at, numbers = address(block), block.spread(operand(block))
        for lane in lanes:
            old = block.memory.load(at[lane : lane + 1], width_of(type_)).view(TYPES[type_])[:, 0]
            new = compute(old, numbers[lane : lane + 1])
            block.memory.store(at[lane : lane + 1], new.view(np.uint8).reshape(1, -1))
            block.write_lanes(target, lanes[lanes == lane], as_bits(old, target))

    return run
