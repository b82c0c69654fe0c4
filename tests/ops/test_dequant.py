import re

import interpreted  # noqa: F401
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hand_pages import lowest_field

from hf_diffkv.ops import dequant
from hf_diffkv.ops.narrow_kernel import load_metadata
from hf_diffkv.ops.quantize.reference import unpack as unpack_reference
from hf_diffkv.precision import CODE_BITS

BIASED, EXACT, SUBNORMAL = (form.value for form in dequant.FORMS)


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


INSTRUCTIONS = {
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "sub.f16x2": sub_f16x2,
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.u32": lambda a, n: a >> n,
}


def emulate(assembly, outputs, words):
    """Runs straight-line PTX on its input words; returns the written fp16 halves, float64 [2 * outputs]."""
    registers = {f"${outputs + i}": word for i, word in enumerate(words)}
    for statement in re.split(";", assembly.strip().strip("{}")):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name, operands = statement.split(None, 1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = INSTRUCTIONS[name](*values)
    return np.concatenate([halves(registers[f"${i}"]) for i in range(outputs)]).astype(np.float64)


def choices(bits):
    """Returns the requests to `unpack`: every piece alone for keys and values, and all pieces of a value at once."""
    alone = [(form, (piece,)) for form in (BIASED, SUBNORMAL) for piece in range(dequant.pieces(bits))]
    return alone + [(form, tuple(range(dequant.pieces(bits)))) for form in (EXACT, SUBNORMAL)]


def four_bytes(bits, rng):
    """Random packed bytes, the words passed to the assembly, and the codes of each piece: int [pieces, 4]."""
    if lowest_field(bits) == bits:
        packed = rng.integers(0, 256, 4).astype(np.uint8)
        return [packed], np.stack([packed >> (bits * piece) & (2**bits - 1) for piece in range(8 // bits)])
    words, codes, done = [], np.zeros((4, 4), int), 0
    while done < bits:
        field = lowest_field(bits - done)
        first, second = rng.integers(0, 256, (2, 4)).astype(np.uint8)
        if field == 4:
            words += [first, second]
            parts = [first & 15, second & 15, first >> 4, second >> 4]
        elif field == 2:
            words += [first]
            parts = [first >> (2 * piece) & 3 for piece in range(4)]
        else:
            # bytes of the first and second half of a quarter, as they may appear in a word if a row is odd
            later = rng.integers(0, 2, 4).astype(bool)
            words += [np.where(later, 0, first), np.where(later, first, 0)]
            parts = [first >> (2 * piece + later) & 1 for piece in range(4)]
        codes += np.stack(parts).astype(int) << done
        done += field
    return words, codes


def as_word(packed):
    return int.from_bytes(packed.astype(np.uint8).tobytes(), "little")


@pytest.mark.parametrize(
    ("bits", "form", "chosen"), [(bits, *choice) for bits in CODE_BITS for choice in choices(bits)]
)
@pytest.mark.sampled(8)
def test_assembly_unpacks_every_byte(bits, form, chosen):
    constraints = dequant.constraints(bits, len(chosen)).split(",")
    outputs = sum("=" in c for c in constraints)
    words = len(four_bytes(bits, np.random.default_rng(0))[0])
    assert outputs == 2 * len(chosen) and len(constraints) == outputs + words
    assembly = dequant.assembly(bits, form, chosen)
    bias = np.array([dequant.code_bias(bits, piece, dequant.PTX) * (form == BIASED) for piece in chosen])
    unit = np.array([dequant.code_unit(bits, piece, dequant.PTX) if form == SUBNORMAL else 1.0 for piece in chosen])
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(1000):
        packed, codes = four_bytes(bits, rng)
        got = emulate(assembly, outputs, [as_word(word) for word in packed]).reshape(-1, 4)
        np.testing.assert_array_equal(got, codes[list(chosen)] * unit[:, None] + bias[:, None])
        seen.update(codes[list(chosen)].flatten().tolist())
    assert seen >= set(range(2**bits))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_the_assembly_never_reads_its_input_after_an_output_that_may_share_its_register(bits):
    for form, chosen in choices(bits):
        constraints = dequant.constraints(bits, len(chosen)).split(",")
        shared = [i for i, c in enumerate(constraints) if c == "=r"]
        statements = [s.strip() for s in dequant.assembly(bits, form, chosen).strip("{}").split(";")]
        inputs = [f"${i}" for i, c in enumerate(constraints) if c == "r"]
        last_read = max(i for i, s in enumerate(statements) if set(re.findall(r"\$\d+", s)) & set(inputs))
        for output in shared:
            first_write = min(i for i, s in enumerate(statements) if f" ${output}," in s)
            assert first_write >= last_read


@pytest.mark.parametrize("bits", CODE_BITS)
def test_code_bias_is_what_the_biased_assembly_adds(bits):
    for piece in range(dequant.pieces(bits)):
        zero = emulate(dequant.assembly(bits, BIASED, (piece,)), 2, [0] * dequant.words(bits))
        assert (zero == dequant.code_bias(bits, piece, dequant.PTX)).all()
        assert dequant.code_bias(bits, piece, dequant.PORTABLE) == 0.0
        assert dequant.code_unit(bits, piece, dequant.PORTABLE) == 1.0


@triton.jit
def load_kernel(packed, codes, BITS: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, DIM: tl.constexpr,
                LANES: tl.constexpr):  # fmt: skip
    PIECES: tl.constexpr = dequant.pieces(BITS)
    PIECE: tl.constexpr = DIM // PIECES
    lane = tl.arange(0, LANES)
    rows = packed + tl.arange(0, 2) * (DIM * BITS // 8)
    pieces = dequant.load_codes(rows, lane, lane < PIECE, PIECE == LANES, BITS, DIM, FORM, True, 0, DTYPE, "")
    whole = dequant.stack_pieces(pieces, 0, PIECES).to(tl.float32)
    column = tl.arange(0, PIECES * LANES)
    place = tl.arange(0, 2)[:, None] * DIM + column // LANES * PIECE + column % LANES
    tl.store(codes + place, whole, mask=(column % LANES < PIECE)[None, :])


@triton.jit
def gather_kernel(packed, codes, BITS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    tl.store(codes + lane, dequant.gather_codes(packed, lane, lane < DIM, BITS, DIM).to(tl.float32), lane < DIM)


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_portable_modes_match_the_reference(bits, dim):
    generator = torch.Generator().manual_seed(bits)
    packed = torch.randint(0, 256, (2, dim * bits // 8), dtype=torch.uint8, generator=generator)
    expected = unpack_reference(packed, bits).float()
    lanes = triton.next_power_of_2(dim // dequant.pieces(bits))
    for form, dtype in ((BIASED, tl.float16), (EXACT, tl.float32), (SUBNORMAL, tl.float16)):
        codes = torch.full_like(expected, torch.nan)
        load_kernel[(1,)](packed, codes, bits, form, dtype, dim, lanes)
        assert torch.equal(codes, expected)
    codes = torch.full_like(expected, torch.nan)
    gather_kernel[(1,)](packed, codes, bits, dim, triton.next_power_of_2(dim))
    assert torch.equal(codes[0], expected[0])


@triton.jit
def metadata_kernel(pointer, out, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    scale, zero = load_metadata(pointer + 4 * lane, 4, 8)
    tl.store(out + 2 * lane, scale)
    tl.store(out + 2 * lane + 1, zero)


def test_metadata_is_scale_then_zero():
    pairs = torch.tensor([[0.5, -3.0], [6e-8, 65504.0], [0.0, 1.5], [2.0, -0.25]], dtype=torch.float16)
    out = torch.full((4, 2), torch.nan)
    metadata_kernel[(1,)](pairs.view(torch.uint8), out, 4)
    assert torch.equal(out, pairs.float())
