"""A separate process that compiles kernels as their launch would: `python compile_service.py 80`, or 90.

Tests run with TRITON_INTERPRET=1, under which kernels have no form that the compiler accepts. Requests and answers are
pickled on standard input and output; see `compiler.py`. There is no assembler step, as the PTX itself is executed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any, BinaryIO


class Stub:
    """Stands in for a tensor in a launch: Triton asks for its dtype and whether its address is a multiple of 16."""

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Driver:
    """Answers what Triton's launch code asks about a device, for a target that this machine lacks."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def prepare(capability: int) -> None:
    """Makes Triton compile for a device that this machine lacks, up to PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    CUDABackend.make_cubin = lambda *_: b"not assembled"
    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", capability, 32)))


def compile_launch(module: str, name: str, arguments: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """Compiles a kernel for these arguments, tensors given as ("tensor", dtype, address)."""
    kernel = getattr(importlib.import_module(module), name)

    def stand_in(value: Any) -> Any:
        return Stub(*value[1:]) if isinstance(value, tuple) and value[:1] == ("tensor",) else value

    arguments = tuple(map(stand_in, arguments))
    options = {key: stand_in(value) for key, value in options.items()}
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    return {
        "hash": compiled.hash,
        "ptx": compiled.asm["ptx"],
        "shared": compiled.metadata.shared,
        "scratch": compiled.metadata.global_scratch_size,
        "runtime": [name for name, type_ in compiled.src.signature.items() if type_ != "constexpr"],
    }


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = compile_launch(*request)
        except Exception as error:  # any stage of the compiler may fail, each with its own exception type
            answer = {"error": f"{type(error).__name__}: {error}"}
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # a compiler's own output must not mix with the answers
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    prepare(int(sys.argv[1]))
    serve(sys.stdin.buffer, output)
