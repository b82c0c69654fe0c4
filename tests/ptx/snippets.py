"""A few instructions in a kernel of their own, for tests of the emulator."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from tools.kernels.emulator.block import Block
from tools.kernels.emulator.global_memory import GlobalMemory
from tools.kernels.emulator.parse import parse
from tools.kernels.emulator.state import BlockState
from tools.kernels.emulator.steps import Code

KERNEL = """
.visible .entry snippet(
    .param .u64 .ptr .global .align 1 snippet_param_0,
    .param .u64 .ptr .global .align 1 snippet_param_1
)
.reqntid {threads}
{{
    .reg .pred %p<100>;
    .reg .b16 %rs<100>;
    .reg .b32 %r<100>;
    .reg .b64 %rd<100>;
    ld.param.b64 %rd1, [snippet_param_0];
    ld.param.b64 %rd2, [snippet_param_1];
    mov.u32 %r0, %tid.x;
{load}
{body}
{store}
    ret;
}}
"""


def run(body: str, inputs: Sequence[np.ndarray], outputs: int = 1, threads: int = 32, shared: int = 4096) -> np.ndarray:
    """Executes PTX in which %r1, %r2, ... begin as the inputs of each thread and %r50, %r51, ... are the outputs.

    Args:
        inputs: [threads] each, of 4 bytes per element. %rd1 is where they stand, one behind the other, %rd2 where
            the outputs go.

    Returns:
        uint32 [outputs, threads].
    """
    given = torch.from_numpy(np.stack([np.asarray(x).view(np.int32) for x in inputs] or [np.zeros(threads, np.int32)]))
    results = torch.full((outputs, threads), -1, dtype=torch.int32)
    load = ["mad.wide.u32 %rd3, %r0, 4, %rd1;", "mad.wide.u32 %rd4, %r0, 4, %rd2;"]
    load += [f"ld.global.b32 {{ %r{i + 1} }}, [ %rd3 + {4 * threads * i} ];" for i in range(len(inputs))]
    store = [f"st.global.b32 [ %rd4 + {4 * threads * i} ], {{ %r{50 + i} }};" for i in range(outputs)]
    text = KERNEL.format(threads=threads, load="\n".join(load), body=body, store="\n".join(store))
    addresses = {
        f"snippet_param_{i}": tensor.data_ptr().to_bytes(8, "little") for i, tensor in enumerate((given, results))
    }
    memory = GlobalMemory((given, results))
    code = Code(parse(text))
    Block(code, BlockState(code.program, addresses, memory, shared, (0, 0, 0), (1, 1, 1)), "(0, 0, 0)").run()
    return results.numpy().view(np.uint32)


def compute(opcode: str, *inputs: np.ndarray) -> np.ndarray:
    """Executes one instruction on 32-bit registers and returns uint32 [threads]; predicates become 0 and 1."""
    sources = ", ".join(f"%r{i + 1}" for i in range(len(inputs)))
    if opcode.startswith("setp"):
        return run(f"{opcode} %p1, {sources};\nselp.b32 %r50, 1, 0, %p1;", inputs)[0]
    return run(f"{opcode} %r50, {sources};", inputs)[0]


def narrow(opcode: str, *inputs: np.ndarray) -> np.ndarray:
    """Executes one instruction on 16-bit registers: uint16 [threads] of uint16 [threads]."""
    moves = [f"cvt.u16.u32 %rs{i + 1}, %r{i + 1};" for i in range(len(inputs))]
    sources = ", ".join(f"%rs{i + 1}" for i in range(len(inputs)))
    body = "\n".join([*moves, f"{opcode} %rs50, {sources};", "cvt.u32.u16 %r50, %rs50;"])
    return run(body, [x.astype(np.uint32) for x in inputs])[0].astype(np.uint16)


def replaced(text: str, pattern: str, replacement: str) -> str:
    """`text` with a regular expression replaced.

    Raises:
        LookupError: it does not occur.
    """
    changed, found = re.subn(pattern, replacement, text)
    if not found:
        raise LookupError(pattern)
    return changed
