import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import re

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
if isinstance(triton.language.sum, triton.JITFunction):
    pytest.skip("triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True)

import triton.language as tl  # noqa: E402

from hf_diffkv.ops import dequant  # noqa: E402
from hf_diffkv.ops.quantize.reference import unpack as unpack_reference  # noqa: E402

BITS = (1, 2, 4, 8)


def halves(word):
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16)


def prmt(a, b, selector):
    data = list(a.to_bytes(4, "little") + b.to_bytes(4, "little"))
    return int.from_bytes(bytes(data[(selector >> 4 * i) & 7] for i in range(4)), "little")


def lop3(a, b, c, table):
    result = 0
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result & 0xFFFFFFFF


def sub_f16x2(a, b):
    low, high = (halves(a) - halves(b)).view(np.uint16)
    return int(low) | int(high) << 16


INSTRUCTIONS = {"prmt.b32": prmt, "lop3.b32": lop3, "sub.f16x2": sub_f16x2, "mov.b32": lambda a: a}


def emulate(assembly, outputs, word):
    """Runs straight-line PTX on one input word; float64 [2 * outputs] of the fp16 halves written."""
    registers = {f"${outputs}": word}
    for statement in re.split(";", assembly.strip().strip("{}")):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name, operands = statement.split(None, 1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return np.concatenate([halves(registers[f"${i}"]) for i in range(outputs)]).astype(np.float64)


def plane_choices(bits):
    """What `unpack` asks for: every plane alone for keys, all at once for values."""
    return [(False, (plane,)) for plane in range(8 // bits)] + [(True, tuple(range(8 // bits)))]


@pytest.mark.parametrize(
    ("bits", "exact", "planes"), [(bits, *choice) for bits in BITS for choice in plane_choices(bits)]
)
def test_assembly_unpacks_every_byte(bits, exact, planes):
    constraints = dequant.constraints(len(planes)).split(",")
    outputs = sum("=" in c for c in constraints)
    assert outputs == 2 * len(planes) and len(constraints) == outputs + 1
    assembly = dequant.assembly(bits, exact, planes)
    bias = np.array([0.0 if exact else 1024.0 / 2 ** (bits * plane) for plane in planes])
    rng = np.random.default_rng(0)
    for packed in np.stack([rng.permutation(256) for _ in range(4)], 1).astype(np.uint8):
        word = int.from_bytes(packed.tobytes(), "little")
        codes = np.stack([packed >> (bits * plane) & (2**bits - 1) for plane in planes]).astype(np.float64)
        np.testing.assert_array_equal(emulate(assembly, outputs, word).reshape(-1, 4), codes + bias[:, None])


@pytest.mark.parametrize("bits", BITS)
def test_the_assembly_never_reads_its_input_after_an_output_that_may_share_its_register(bits):
    for exact, planes in plane_choices(bits):
        shared = [i for i, c in enumerate(dequant.constraints(len(planes)).split(",")[:-1]) if c == "=r"]
        statements = [s.strip() for s in dequant.assembly(bits, exact, planes).strip("{}").split(";")]
        last_read = max(i for i, s in enumerate(statements) if f"${2 * len(planes)}," in s)
        for output in shared:
            first_write = min(i for i, s in enumerate(statements) if f" ${output}," in s)
            assert first_write >= last_read


@pytest.mark.parametrize("bits", BITS)
def test_code_bias_is_what_the_inexact_assembly_adds(bits):
    for plane in range(8 // bits):
        zero = emulate(dequant.assembly(bits, False, (plane,)), 2, 0)
        assert (zero == dequant.code_bias(bits, plane, dequant.PTX)).all()
        assert dequant.code_bias(bits, plane, dequant.PORTABLE) == 0.0


@triton.jit
def unpack_kernel(packed, codes, BITS: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, ROW: tl.constexpr):
    lane = tl.arange(0, ROW)
    planes = dequant.unpack(tl.load(packed + lane), BITS, EXACT, 0, DTYPE)
    for plane in tl.static_range(8 // BITS):
        tl.store(codes + plane * ROW + lane, planes[plane].to(tl.float32))


@triton.jit
def extract_kernel(packed, codes, BITS: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr):
    lane = tl.arange(0, DIM)
    code = dequant.extract(tl.load(packed + lane % ROW), lane // ROW * BITS, BITS, tl.float32)
    tl.store(codes + lane, code)


@triton.jit
def metadata_kernel(pointer, out, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    scale, zero = dequant.load_metadata(pointer + 4 * lane)
    tl.store(out + 2 * lane, scale)
    tl.store(out + 2 * lane + 1, zero)


@pytest.mark.parametrize("bits", BITS)
def test_portable_modes_match_the_reference(bits):
    row = 32
    packed = torch.randint(0, 256, (row,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    expected = unpack_reference(packed, bits).float()
    for exact, dtype in ((False, tl.float16), (True, tl.float16), (True, tl.float32)):
        codes = torch.full_like(expected, torch.nan)
        unpack_kernel[(1,)](packed, codes, bits, exact, dtype, row)
        assert torch.equal(codes, expected)
    codes = torch.full_like(expected, torch.nan)
    extract_kernel[(1,)](packed, codes, bits, row, row * (8 // bits))
    assert torch.equal(codes, expected)


def test_metadata_is_scale_then_zero():
    pairs = torch.tensor([[0.5, -3.0], [6e-8, 65504.0], [0.0, 1.5], [2.0, -0.25]], dtype=torch.float16)
    out = torch.full((4, 2), torch.nan)
    metadata_kernel[(1,)](pairs.view(torch.uint8), out, 4)
    assert torch.equal(out, pairs.float())
