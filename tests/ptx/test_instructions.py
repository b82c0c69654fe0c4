"""Single instructions of the emulator against formulas of the PTX ISA, written anew on Python numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from snippets import compute, narrow, run

from tools.kernels.emulator.arithmetic import odd_sum
from tools.kernels.emulator.values import PtxError, UnknownInstruction
from tools.kernels.emulator.warpgroup import element_offsets

RNG = np.random.default_rng(0)
MASK = 0xFFFFFFFF


def integers(low=0, high=1 << 32, edges=()):
    """uint32 [32], edges first."""
    drawn = RNG.integers(low, high, 32 - len(edges))
    return np.array([*(e & MASK for e in edges), *drawn], dtype=np.uint32)


def signed(x):
    return int(x) - (1 << 32) if int(x) >> 31 else int(x)


def floats(*edges):
    """float32 [32] of many magnitudes, edges first."""
    drawn = RNG.standard_normal(32 - len(edges)) * 2.0 ** RNG.integers(-30, 20, 32 - len(edges))
    return np.array([*edges, *drawn], dtype=np.float32)


EDGES = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def scalar_bfe(a, position, length, is_signed, last=31):
    """The loop of the ISA; `last` is the highest bit."""
    position, length = position & 255, length & 255
    sign = 0 if not is_signed or length == 0 else (a >> min(position + length - 1, last)) & 1
    bits = [(a >> (position + i)) & 1 if i < length and position + i <= last else sign for i in range(last + 1)]
    return sum(bit << i for i, bit in enumerate(bits))


INTEGER = {
    "add.s32": lambda a, b: signed(a) + signed(b),
    "sub.s32": lambda a, b: signed(a) - signed(b),
    "mul.lo.s32": lambda a, b: signed(a) * signed(b),
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "mul.hi.u32": lambda a, b: int(a) * int(b) >> 32,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "min.u32": lambda a, b: min(int(a), int(b)),
    "max.s32": lambda a, b: max(signed(a), signed(b)),
    "and.b32": lambda a, b: int(a) & int(b),
    "or.b32": lambda a, b: int(a) | int(b),
    "xor.b32": lambda a, b: int(a) ^ int(b),
    "div.s32": lambda a, b: abs(signed(a)) // abs(signed(b)) * (1 if (signed(a) < 0) == (signed(b) < 0) else -1),
    "rem.u32": lambda a, b: int(a) % int(b),
    "shl.b32": lambda a, b: int(a) << min(int(b), 32),
    "shr.u32": lambda a, b: int(a) >> min(int(b), 32),
    "shr.s32": lambda a, b: signed(a) >> min(int(b), 31),
    "setp.lt.s32": lambda a, b: signed(a) < signed(b),
    "setp.lt.u32": lambda a, b: int(a) < int(b),
    "setp.ge.s32": lambda a, b: signed(a) >= signed(b),
}


@pytest.mark.parametrize("opcode", INTEGER)
def test_integer_arithmetic(opcode) -> None:
    a = integers(edges=EDGES)
    b = integers(0, 40, edges=(1, 31, 32, 33)) if opcode[:3] in ("shl", "shr") else integers(edges=EDGES[1:][::-1])
    b = np.maximum(b, 1)
    assert compute(opcode, a, b).tolist() == [int(INTEGER[opcode](x, y)) & MASK for x, y in zip(a, b)]


@pytest.mark.parametrize("is_signed", [True, False])
def test_bit_fields(is_signed) -> None:
    a, position, length = integers(edges=EDGES), integers(0, 36), integers(0, 36, edges=(0, 32, 1))
    want = [scalar_bfe(int(x), int(p), int(n), is_signed) for x, p, n in zip(a, position, length)]
    assert compute("bfe.s32" if is_signed else "bfe.u32", a, position, length).tolist() == want


def test_inserting_bit_fields() -> None:
    a, b, position, length = integers(), integers(), integers(0, 36, edges=(16, 0)), integers(0, 36, edges=(8, 32))

    def inserted(a, b, position, length):
        """The loop of the ISA."""
        for i in range(length):
            if position + i <= 31:
                b = b & ~(1 << position + i) | (a >> i & 1 if i < 32 else 0) << position + i
        return b

    want = [inserted(*map(int, x)) for x in zip(a, b, position, length)]
    assert compute("bfi.b32", a, b, position, length).tolist() == want


@pytest.mark.parametrize("is_signed", [True, False])
def test_wide_bit_fields(is_signed) -> None:
    low, high = integers(edges=EDGES), integers(edges=EDGES[::-1])
    position, length = integers(0, 70, edges=(0, 63, 64)), integers(0, 70, edges=(64, 64, 1, 0))
    opcode = "bfe.s64" if is_signed else "bfe.u64"
    body = f"mov.b64 %rd8, {{%r1, %r2}};\n{opcode} %rd9, %rd8, %r3, %r4;\nmov.b64 {{%r50, %r51}}, %rd9;"
    got = run(body, [low, high, position, length], 2).astype(object)
    whole = [int(x) | int(y) << 32 for x, y in zip(low, high)]
    want = [scalar_bfe(x, int(p), int(n), is_signed, 63) for x, p, n in zip(whole, position, length)]
    assert (got[0] + (got[1] << 32)).tolist() == want


def test_wide_products() -> None:
    a, b = integers(edges=EDGES), integers(edges=EDGES[::-1])
    got = run("mul.wide.s32 %rd9, %r1, %r2;\nmov.b64 {%r50, %r51}, %rd9;", [a, b], 2).astype(object)
    assert (got[0] + (got[1] << 32)).tolist() == [signed(x) * signed(y) % 2**64 for x, y in zip(a, b)]
    body = "cvt.s64.s32 %rd8, %r1;\nmad.wide.u32 %rd9, %r1, %r2, %rd8;\nmov.b64 {%r50, %r51}, %rd9;"
    got = run(body, [a, b], 2).astype(object)
    assert (got[0] + (got[1] << 32)).tolist() == [(int(x) * int(y) + signed(x)) % 2**64 for x, y in zip(a, b)]


@pytest.mark.parametrize("type_", ["s64", "u64"])
def test_high_halves_of_long_products(type_: str) -> None:
    a, b = integers(0, 2**32 - 1), integers(0, 2**32 - 1)
    pair = "mov.b64 %rd8, {%r1, %r2};\nmov.b64 %rd9, {%r2, %r1};\n"
    got = run(f"{pair}mul.hi.{type_} %rd10, %rd8, %rd9;\nmov.b64 {{%r50, %r51}}, %rd10;", [a, b], 2).astype(object)

    def number(low: int, high: int) -> int:
        return int(low) + ((signed(high) if type_ == "s64" else int(high)) << 32)

    expected = [(number(x, y) * number(y, x) >> 64) % 2**64 for x, y in zip(a, b)]
    assert (got[0] + (got[1] << 32)).tolist() == expected


def test_high_halves_of_short_products() -> None:
    a, b = (RNG.integers(0, 1 << 16, 32).astype(np.uint16) for _ in range(2))
    assert narrow("mul.hi.u16", a, b).tolist() == [int(x) * int(y) >> 16 for x, y in zip(a, b)]


def test_pairs_of_short_integers() -> None:
    a, b = integers(edges=EDGES), integers(edges=EDGES[::-1])

    def short(x):
        return int(x) - (1 << 16) if int(x) >> 15 else int(x)

    for opcode, function in (("add.s16x2", lambda x, y: x + y), ("max.s16x2", max), ("min.s16x2", min)):
        low, high = (
            [function(short(x >> s & 0xFFFF), short(y >> s & 0xFFFF)) & 0xFFFF for x, y in zip(a, b)] for s in (0, 16)
        )
        assert compute(opcode, a, b).tolist() == [x | y << 16 for x, y in zip(low, high)], opcode


def test_byte_permutation() -> None:
    a, b, selector = integers(), integers(), integers(edges=(0x4140, 0x4342, 0x7701, 0xBA98))

    def permuted(a, b, selector):
        pool = int(a).to_bytes(4, "little") + int(b).to_bytes(4, "little")
        result = []
        for digit in f"{selector & 0xFFFF:04x}"[::-1]:
            byte = pool[int(digit, 16) % 8]
            result.append((255 if byte > 127 else 0) if int(digit, 16) >= 8 else byte)
        return int.from_bytes(result, "little")

    assert compute("prmt.b32", a, b, selector).tolist() == [permuted(*x) for x in zip(a, b, selector)]
    with pytest.raises(UnknownInstruction, match="prmt.b32.f4e"):
        compute("prmt.b32.f4e", a, b, selector)


@pytest.mark.parametrize("table", [0xEA, 0x80, 0x96, 0x1B])
def test_three_way_logic(table) -> None:
    a, b, c = integers(), integers(), integers()
    got = run(f"lop3.b32 %r50, %r1, %r2, %r3, {table:#x};", [a, b, c])[0]
    for bit in range(32):
        index = [(int(x) >> bit & 1) * 4 + (int(y) >> bit & 1) * 2 + (int(z) >> bit & 1) for x, y, z in zip(a, b, c)]
        assert ((got >> np.uint32(bit)) & 1).tolist() == [table >> i & 1 for i in index]


def test_funnel_shift() -> None:
    low, high, count = integers(), integers(), integers(0, 70)
    want = [((int(h) << 32 | int(x)) << (int(n) % 32)) >> 32 & MASK for x, h, n in zip(low, high, count)]
    assert compute("shf.l.wrap.b32", low, high, count).tolist() == want


SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 65519.99, 1e-8, 2.0**-24, 2.0**-25, 1 + 2.0**-11, 3e38)


@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_to_half_precision(name, dtype) -> None:
    x = floats(*SPECIAL, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38)
    want = torch.from_numpy(x).to(dtype)
    body = f"cvt.rn.{name}.f32 %rs1, %r1;\ncvt.f32.{name} %r50, %rs1;"
    back = run(body, [x])[0].view(np.float32)
    np.testing.assert_array_equal(back, want.float().numpy())
    # the first source is the upper half
    pair = run(f"cvt.rn.{name}x2.f32 %r50, %r1, %r2;", [x, x[::-1].copy()])[0]
    halves = [(pair >> np.uint32(16)).astype(np.uint16), pair.astype(np.uint16)]
    for got, expected in zip(halves, (want, want.flip(0))):
        bits = torch.from_numpy(got.view(np.int16)).view(dtype).float()
        np.testing.assert_array_equal(bits.numpy(), expected.float().numpy())


def test_float_to_integer() -> None:
    x = floats(0.5, -0.5, -1.99, 2.5e9, -2.5e9, np.nan, np.inf, 2147483520.0)
    want = [0 if np.isnan(v) else int(max(min(np.trunc(float(v)), 2**31 - 1), -(2**31))) for v in x]
    assert [signed(v) for v in compute("cvt.rzi.s32.f32", x)] == want
    n = integers(edges=EDGES)
    assert compute("cvt.rn.f32.s32", n).view(np.float32).tolist() == [float(np.float32(signed(v))) for v in n]
    assert compute("cvt.rn.f32.u32", n).view(np.float32).tolist() == [float(np.float32(int(v))) for v in n]


def nearest(exact, dtype):
    """An exact fraction rounded to the nearest number, ties to even."""
    guess = dtype(float(exact))
    near = {guess, np.nextafter(guess, dtype(np.inf)), np.nextafter(guess, dtype(-np.inf))}
    bits = np.uint32 if dtype is np.float32 else np.uint16
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(bits)) & 1))


def test_fused_multiply_add_rounds_once() -> None:
    a, b = floats(1 + 2.0**-23, 3.0), floats(1 + 2.0**-23, 1 / 3)
    c = (-(a.astype(np.float64) * b)).astype(np.float32)
    c[5:] = floats()[5:] * np.abs(c[5:])
    got = compute("fma.rn.f32", a, b, c).view(np.float32)
    want = [
        nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), np.float32) for x, y, z in zip(a, b, c)
    ]
    assert got.tolist() == [float(x) for x in want]


def test_a_sum_rounded_to_odd_keeps_what_a_second_rounding_needs() -> None:
    """Just above the middle between two float32 numbers: rounding to float64 first would fall on it."""
    a, b = np.array([1 + 2.0**-24]), np.array([2.0**-60])
    assert np.float32(a + b)[0] == 1 and np.float32(odd_sum(a, b))[0] == np.float32(1 + 2.0**-23)


def test_pairs_of_halves() -> None:
    # magnitudes whose products and sums stay finite
    a, b, c = (RNG.uniform(-8, 8, 32).astype(np.float16) for _ in range(3))
    words = [x.view(np.uint16).astype(np.uint32) | (x[::-1].view(np.uint16).astype(np.uint32) << 16) for x in (a, b, c)]
    for opcode, sources, function in (
        ("sub.f16x2", words[:2], lambda x, y: x - y),
        ("add.f16x2", words[:2], lambda x, y: x + y),
        ("fma.rn.f16x2", words, lambda x, y, z: x * y + z),
    ):
        exact = [function(*map(Fraction, map(float, numbers))) for numbers in zip(*(a, b, c)[: len(sources)])]
        want = np.array([nearest(x, np.float16) for x in exact])
        got = compute(opcode, *sources)
        assert got.astype(np.uint16).view(np.float16).tolist() == want.tolist()
        assert (got >> np.uint32(16)).astype(np.uint16).view(np.float16).tolist() == want[::-1].tolist()
    got = narrow("fma.rn.f16", *(x.view(np.uint16) for x in (a, b, c))).view(np.float16)
    assert got.tolist() == want.tolist()


def test_comparisons_with_nan() -> None:
    a, b = floats(np.nan, 1.0, np.nan, 2.0), floats(1.0, np.nan, np.nan, 2.0)
    missing = np.isnan(a) | np.isnan(b)
    for opcode, want in (
        ("setp.eq.f32", (a == b) & ~missing),
        ("setp.ne.f32", (a != b) & ~missing),
        ("setp.neu.f32", (a != b) | missing),
        ("setp.ltu.f32", (a < b) | missing),
        ("setp.gt.f32", a > b),
        ("setp.num.f32", ~missing),
        ("setp.nan.f32", missing),
    ):
        assert compute(opcode, a, b).tolist() == want.astype(int).tolist(), opcode
    # of a number and NaN the number
    got = compute("max.f32", a, b).view(np.float32)
    assert got[0] == 1 and got[1] == 1 and np.isnan(got[2])


def test_flushing_to_zero() -> None:
    x = floats(-140.0, -126.0, -130.5, 0.0, 10.0)
    got = compute("ex2.approx.ftz.f32", x).view(np.float32)
    assert got[:4].tolist() == [0, 2.0**-126, 0, 1] and got[4] == 1024
    assert compute("ex2.approx.f32", x).view(np.float32)[0] == 2.0**-140


@pytest.mark.parametrize("mode", ["bfly", "up", "down", "idx"])
@pytest.mark.parametrize("control", [31, 0, 0x1C1F, 0x100F])
def test_shuffles(mode, control) -> None:
    a, b = integers(), integers(0, 32)

    def source(lane):
        """The pseudocode of the ISA."""
        clamp, segment, j = control & 31, control >> 8 & 31, int(b[lane])
        most = (lane & segment) | (clamp & ~segment)
        least = lane & segment
        if mode == "up":
            j, valid = lane - j, lane - j >= most
        elif mode == "down":
            j, valid = lane + j, lane + j <= most
        elif mode == "bfly":
            j, valid = lane ^ j, lane ^ j <= most
        else:
            j = least | (j & ~segment)
            valid = j <= most
        return j if valid else lane

    got = run(f"shfl.sync.{mode}.b32 %r50, %r1, %r2, {control}, -1;", [a, b])[0]
    assert got.tolist() == [int(a[source(lane)]) for lane in range(32)]


def test_reductions_over_a_warp() -> None:
    a = integers(edges=EDGES)
    for name, function in (("add", sum), ("max", max), ("min", min)):
        got = run(f"redux.sync.{name}.s32 %r50, %r1, -1;", [a])[0]
        assert got.tolist() == [function(map(signed, a)) & MASK] * 32


def test_matrix_product_fragments() -> None:
    """Element by element as the ISA describes them: a0..a7, b0..b3 and c0..c3 of each thread."""
    a, b = RNG.integers(-9, 9, (16, 16)), RNG.integers(-9, 9, (16, 8))
    c = RNG.integers(-9, 9, (16, 8))
    registers = [np.zeros(32, np.uint32) for _ in range(10)]
    want = [np.zeros(32, np.float32) for _ in range(4)]
    for lane in range(32):
        group, place = lane >> 2, lane % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            column = place * 2 + (i & 1) + (8 if i >= 4 else 0)
            bits = int(np.float16(a[row, column]).view(np.uint16))
            registers[i // 2][lane] |= np.uint32(bits << 16 * (i & 1))
        for i in range(4):
            row = place * 2 + (i & 1) + (8 if i >= 2 else 0)
            registers[4 + i // 2][lane] |= np.uint32(int(np.float16(b[row, group]).view(np.uint16)) << 16 * (i & 1))
            row, column = group if i < 2 else group + 8, place * 2 + (i & 1)
            registers[6 + i][lane] = np.float32(c[row, column]).view(np.uint32)
            want[i][lane] = (a @ b + c)[row, column]
    body = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r50, %r51, %r52, %r53}, {%r1, %r2, %r3, %r4}, "
        "{%r5, %r6}, {%r7, %r8, %r9, %r10};"
    )
    np.testing.assert_array_equal(run(body, registers, 4).view(np.float32), want)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_loading_matrices(matrices, transposed) -> None:
    """Rows of 16 bytes at scattered places; matrix i takes its addresses from threads 8 i to 8 i + 7."""
    rows = RNG.permutation(32)
    elements = RNG.integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    words = np.ascontiguousarray(elements).view(np.uint32)
    stores = "\n".join(
        ["mov.b32 %r20, global_smem;", "shl.b32 %r21, %r5, 4;", "add.s32 %r21, %r21, %r20;"]
        + ["st.shared.v4.b32 [%r21], {%r1, %r2, %r3, %r4};", "bar.warp.sync -1;"]
    )
    into = ", ".join(f"%r{50 + i}" for i in range(matrices))
    trans = ".trans" if transposed else ""
    body = f"{stores}\nldmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 {{{into}}}, [%r21];"
    got = run(body, [*words.T.copy(), rows.astype(np.uint32)], matrices)
    for i in range(matrices):
        tile = elements[8 * i : 8 * i + 8]
        tile = tile.T if transposed else tile
        for lane in range(32):
            low, high = tile[lane // 4, 2 * (lane % 4)], tile[lane // 4, 2 * (lane % 4) + 1]
            assert got[i, lane] == int(low) | int(high) << 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 4])
def test_storing_matrices_undoes_loading_them(matrices, transposed) -> None:
    inputs = [integers() for _ in range(matrices)]
    names = ", ".join(f"%r{i + 1}" for i in range(matrices))
    into = ", ".join(f"%r{50 + i}" for i in range(matrices))
    trans = ".trans" if transposed else ""
    body = f"""
    shl.b32 %r21, %r0, 4;
    mov.b32 %r20, global_smem;
    add.s32 %r21, %r21, %r20;
    stmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 [%r21], {{{names}}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{matrices}{trans}.shared.b16 {{{into}}}, [%r21];
    """
    np.testing.assert_array_equal(run(body, inputs, matrices), inputs)


def test_swizzled_matrices_in_shared_memory() -> None:
    """An example of the ISA: rows of 64 bytes along N, ((8,4,2),(8,2)):((1,8,256),(32,512)), addresses swizzled."""
    start, leading, stride = 4096, 2 * 256, 2 * 512
    descriptor = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 2 << 62
    got = element_offsets(descriptor, 64, True)
    for n in range(64):
        for k in range(16):
            element = n % 8 + n // 8 % 4 * 8 + n // 32 * 256 + k % 8 * 32 + k // 8 * 512
            bits = f"{start + 2 * element:016b}"
            # bits 4 and 5, counted from the right, by bits 7 and 8
            high, low = bits[-9:-7], bits[-6:-4]
            mixed = "".join("1" if a != b else "0" for a, b in zip(high, low))
            assert got[n, k] == int(bits[:-6] + mixed + bits[-4:], 2)


WGMMA = """
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16
    {%r50, %r51, %r52, %r53}, {%r1, %r2, %r3, %r4}, %rd9, 0, 1, 1, 0;
"""
FENCES = "bar.sync 0;\nfence.proxy.async.shared::cta;\nwgmma.fence.sync.aligned;\n"
END = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"


def test_products_of_a_warp_group() -> None:
    """[64, 16] from registers, [8, 16] from rows of 128 bytes in shared memory, whose 16-byte pieces are exchanged."""
    a, b = RNG.integers(-9, 9, (64, 16)), RNG.integers(-9, 9, (8, 16))
    registers = [np.zeros(128, np.uint32) for _ in range(6)]
    want = np.zeros((4, 128), np.float32)
    for thread in range(128):
        warp, group, place = thread // 32, thread % 32 >> 2, thread % 4
        for i in range(8):
            row = 16 * warp + (group if i < 2 or 4 <= i < 6 else group + 8)
            column = place * 2 + (i & 1) + (8 if i >= 4 else 0)
            registers[i // 2][thread] |= np.uint32(int(np.float16(a[row, column]).view(np.uint16)) << 16 * (i & 1))
        for i in range(4):
            want[i, thread] = (a @ b.T)[16 * warp + (group if i < 2 else group + 8), place * 2 + (i & 1)]
        n, k = divmod(thread, 16)
        registers[4][thread] = int(np.float16(b[n, k]).view(np.uint16))
        registers[5][thread] = n * 128 + ((2 * k // 16) ^ n) * 16 + 2 * k % 16
    store = """
    mov.b32 %r20, global_smem;
    add.s32 %r21, %r20, %r6;
    cvt.u16.u32 %rs1, %r5;
    st.shared.b16 [%r21], %rs1;
    shr.u32 %r20, %r20, 4;
    cvt.u64.u32 %rd9, %r20;
    or.b64 %rd9, %rd9, 4611686293305294848;
    mov.b32 %r50, 0;
    mov.b32 %r51, 0;
    mov.b32 %r52, 0;
    mov.b32 %r53, 0;
    """

    def product(body):
        return run(store + body, registers, 4, 128).view(np.float32)

    np.testing.assert_array_equal(product(FENCES + WGMMA + END), want)
    for body, message in (
        (WGMMA + END, "without a barrier"),
        (FENCES.replace("fence.proxy.async.shared::cta;", "") + WGMMA + END, "fence.proxy.async"),
        (FENCES + WGMMA, "before it was waited for"),
        (FENCES + WGMMA + END.replace("group.sync.aligned 0", "group.sync.aligned 1"), "before it was waited for"),
        (FENCES + WGMMA + "add.f32 %r50, %r50, %r50;", "before it was waited for"),
        (FENCES + WGMMA + "st.shared.b16 [%r21], %rs1;", "still reads"),
    ):
        with pytest.raises(PtxError, match=message):
            product(body)


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(UnknownInstruction, match="tanh.approx.f32"):
        compute("tanh.approx.f32", floats())
    with pytest.raises(UnknownInstruction, match="cvt.rm.f16.f32"):
        run("cvt.rm.f16.f32 %rs1, %r1;", [floats()], 0)
