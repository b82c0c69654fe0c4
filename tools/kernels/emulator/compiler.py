"""Client of `compile_service.py`, a process that compiles kernels."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .parse import parse
from .steps import Code


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: the code to execute, its shared memory in bytes, and the arguments it takes at run time."""

    code: Code
    shared: int
    runtime: tuple[str, ...]
    ptx: str

    @classmethod
    def read(cls, ptx: str, shared: int, runtime: Iterable[str]) -> Kernel:
        return cls(Code(parse(ptx)), shared, tuple(runtime), ptx)


class Compiler:
    """Compiles each launched specialisation once; a context manager around a process.

    Args:
        folder: folder for Triton's cache, separate from the user's because nothing is assembled.
        target: `sm_80` or `sm_90`.
    """

    def __init__(self, folder: Path, target: str = "sm_80") -> None:
        self.target = target
        self._folder = folder
        self._kernels: dict[bytes, Kernel] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Compiler:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
        # the default of the supported releases, set explicitly because newer ones warn
        environment["TRITON_DEFAULT_FP_FUSION"] = "1"
        environment["TRITON_CACHE_DIR"] = str(self._folder)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path[1:], environment.get("PYTHONPATH")]))
        command = [sys.executable, str(Path(__file__).with_name("compile_service.py")), self.target[3:]]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def compile(self, function: Any, arguments: tuple, options: dict[str, Any]) -> Kernel:
        """Returns the kernel that launching `function` (a Python function) with these arguments would run.

        Raises:
            RuntimeError: it does not compile.
        """
        request = (
            function.__module__,
            function.__name__,
            tuple(map(_described, arguments)),
            {name: _described(value) for name, value in options.items()},
        )
        key = pickle.dumps(request)
        if key not in self._kernels:
            self._process.stdin.write(key)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
            if "error" in answer:
                raise RuntimeError(f"{function.__name__} does not compile: {answer['error']}")
            if answer["scratch"]:
                raise RuntimeError(f"{function.__name__} wants scratch memory from the launcher.")
            known = [kernel for kernel in self._kernels.values() if kernel.ptx == answer["ptx"]]
            self._kernels[key] = known[0] if known else Kernel.read(answer["ptx"], answer["shared"], answer["runtime"])
        return self._kernels[key]


def _described(value: Any) -> Any:
    """Describes tensors by dtype and address modulo 16, on which a specialisation depends."""
    return ("tensor", value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else value
