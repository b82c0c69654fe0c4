"""Faults that the emulator must refuse like a GPU, and control flow."""

from __future__ import annotations

import numpy as np
import pytest
from snippets import run

from tools.kernels.emulator.values import PtxError, UnknownInstruction

TID = np.arange(32, dtype=np.uint32)
# %r20 is where shared memory begins, %r21 the thread's own word in it
OWN = "mov.b32 %r20, global_smem;\nshl.b32 %r22, %r0, 2;\nadd.s32 %r21, %r20, %r22;\n"
# %r23 the word of the thread 32 (of 64) or 1 (of 32) further on
NEXT = "add.s32 %r24, %r0, {step};\nand.b32 %r24, %r24, {last};\nshl.b32 %r24, %r24, 2;\nadd.s32 %r23, %r20, %r24;\n"


def refused(match: str, body: str, threads: int = 32, outputs: int = 0, **options: int) -> None:
    with pytest.raises(PtxError, match=match):
        run(body, [np.arange(threads, dtype=np.uint32)], outputs, threads, **options)


def test_global_accesses_outside_all_tensors() -> None:
    refused("outside all tensors", "ld.global.b32 { %r50 }, [ %rd3 + 4 ];")
    refused("outside all tensors", "ld.global.b32 { %r50 }, [ %rd3 + -4 ];")
    refused("outside all tensors", "st.global.b32 [ %rd2 + 0 ], { %r1 };")
    # a predicate keeps the threads away that would leave it
    body = "setp.lt.u32 %p1, %r0, 31;\nmov.b32 %r50, 7;\n@%p1 ld.global.b32 { %r50 }, [ %rd3 + 4 ];"
    assert run(body, [TID])[0].tolist() == [*range(1, 32), 7]


def test_alignment() -> None:
    refused("not aligned to 4 bytes", "ld.global.b32 { %r50 }, [ %rd1 + 2 ];")
    refused("not aligned to 8 bytes", "ld.global.v2.b32 { %r50, %r51 }, [ %rd1 + 4 ];")
    refused("not aligned to 16 bytes", OWN + "st.shared.v4.b32 [%r20+8], {%r1, %r1, %r1, %r1};")


def test_shared_accesses_outside_the_block() -> None:
    refused("lies outside the 64 bytes", OWN + "st.shared.b32 [%r21], %r1;", shared=64)
    refused("lies outside", "mov.b32 %r9, 16;\nst.shared.b32 [%r9], %r1;")


def test_reading_what_nobody_wrote() -> None:
    refused("nobody wrote", OWN + "ld.shared.b32 %r50, [%r21];")


def exchange(barrier: str, step: int, threads: int) -> str:
    later = NEXT.format(step=step, last=threads - 1)
    return OWN + later + f"st.shared.b32 [%r21], %r1;\n{barrier}\nld.shared.b32 %r50, [%r23];"


def test_barriers_between_writing_and_reading() -> None:
    refused("without a barrier", exchange("", 1, 32))
    refused("without a barrier", exchange("bar.warp.sync -1;", 32, 64), 64)
    assert run(exchange("bar.warp.sync -1;", 1, 32), [TID])[0].tolist() == [*range(1, 32), 0]
    both = np.arange(64, dtype=np.uint32)
    assert run(exchange("bar.sync 0;", 32, 64), [both], threads=64)[0].tolist() == [*range(32, 64), *range(32)]


def test_barriers_between_reading_and_overwriting() -> None:
    read = exchange("bar.sync 0;", 32, 64)
    refused("may still be read", read + "\nst.shared.b32 [%r21], %r50;", 64)
    # writing the same again harms nobody
    run(read + "\nst.shared.b32 [%r21], %r1;", [np.arange(64, dtype=np.uint32)], threads=64)
    run(read + "\nbar.sync 0;\nst.shared.b32 [%r21], %r50;", [np.arange(64, dtype=np.uint32)], threads=64)


def test_two_threads_that_write_different_data_to_one_place() -> None:
    refused("different data", OWN + "st.shared.b32 [%r20], %r1;")
    run(OWN + "mov.b32 %r2, 5;\nst.shared.b32 [%r20], %r2;", [TID], 0)


COPY = OWN + "cp.async.ca.shared.global [ %r21 + 0 ], [ %rd3 + 0 ], 0x4, %r9;\n"


def test_asynchronous_copies_land_when_they_are_waited_for() -> None:
    body = "mov.b32 %r9, 4;\n" + COPY
    commit, wait, read = "cp.async.commit_group;\n", "cp.async.wait_group {};\n", "ld.shared.b32 %r50, [%r21];"
    assert run(body + commit + wait.format(0) + read, [TID])[0].tolist() == TID.tolist()
    refused("a wait is missing", body + commit + read)
    refused("a wait is missing", body + commit + wait.format(1) + read)
    # what was not committed is not waited for
    refused("a wait is missing", body + wait.format(0) + read)
    newer = "cp.async.ca.shared.global [ %r21 + 1024 ], [ %rd3 + 0 ], 0x4, %r9;\n" + commit
    assert run(body + commit + newer + wait.format(1) + read, [TID])[0].tolist() == TID.tolist()
    refused("about to write", body + "st.shared.b32 [%r21], %r1;")
    refused("a wait is missing", body + commit + newer + wait.format(1) + read.replace("r21]", "r21+1024]"))


def test_a_wait_alone_does_not_show_copies_to_other_threads() -> None:
    body = (
        "mov.b32 %r9, 4;\n" + COPY + NEXT.format(step=1, last=31) + "cp.async.commit_group;\ncp.async.wait_group 0;\n"
    )
    refused("without a barrier", body + "ld.shared.b32 %r50, [%r23];")
    run(body + "bar.sync 0;\nld.shared.b32 %r50, [%r23];", [TID])


def test_a_copy_of_no_bytes_writes_zeros_and_reads_nothing() -> None:
    body = COPY.replace("[ %rd3 + 0 ]", "[ %rd3 + 4 ]")
    wait = "cp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.b32 %r50, [%r21];"
    last = "setp.lt.u32 %p1, %r0, 31;\nselp.b32 %r9, 4, 0, %p1;\n"
    assert run(last + body + wait, [TID])[0].tolist() == [*range(1, 32), 0]
    refused("outside all tensors", "mov.b32 %r9, 4;\n" + body)


def test_hints_change_nothing_but_must_be_made() -> None:
    make = "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;\n"
    load = "ld.global.L1::evict_first.L2::cache_hint.b32 { %r50 }, [ %rd3 + 0 ], %rd9;\n"
    copy = COPY.replace("shared.global", "shared.global.L2::cache_hint").replace("%r9;", "%r9, %rd9;")
    wait = "cp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.b32 %r50, [%r21];"
    size = "mov.b32 %r9, 4;\n"
    for body in (load, size + copy + wait):
        assert run(make + body, [TID])[0].tolist() == TID.tolist()
        refused("no createpolicy has made", "mov.b64 %rd9, 1;\n" + body)
    with pytest.raises(UnknownInstruction):
        run(make.replace("first", "last") + load, [TID])


def test_threads_that_branch_apart_and_join() -> None:
    """A loop that each thread leaves after its own number of rounds, and two sides of a branch."""
    body = """
    mov.b32 %r50, 0;
$again:
    setp.ge.u32 %p1, %r50, %r1;
    @%p1 bra $left;
    add.s32 %r50, %r50, 3;
    bra.uni $again;
$left:
    and.b32 %r9, %r0, 1;
    setp.eq.b32 %p2, %r9, 0;
    @!%p2 bra $odd;
    mul.lo.s32 %r50, %r50, 2;
    bra.uni $join;
$odd:
    add.s32 %r50, %r50, 1000;
$join:
    shfl.sync.idx.b32 %r51, %r50, 31, 31, -1;
    """
    rounds = (TID * 7) % 20
    want = [-(-int(n) // 3) * 3 for n in rounds]
    want = [2 * x if i % 2 == 0 else x + 1000 for i, x in enumerate(want)]
    got = run(body, [rounds], 2)
    assert got[0].tolist() == want and got[1].tolist() == [want[31]] * 32


def test_what_all_threads_must_do_together() -> None:
    half = "setp.lt.u32 %p1, %r0, {};\n@!%p1 bra $over;\n{}\n$over:\n"
    refused("only some threads of a warp", half.format(7, "bar.sync 0;"))
    refused("only some threads of a warp", half.format(7, "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;"))
    refused("return while others wait", half.format(32, "bar.sync 0;"), 64)
    run(half.format(32, "shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;"), [np.arange(64, dtype=np.uint32)], 0, 64)


def test_atomics_see_each_other() -> None:
    values = np.array([(7 * i) % 32 for i in range(32)], dtype=np.uint32)
    body = "mov.b32 %r50, 0;\natom.global.gpu.acq_rel.max.s32 %r50, [ %rd1 + 0 ], %r1;"
    got = run(body, [values])[0].tolist()
    assert got == [max([0, *values[:i].tolist()]) for i in range(32)]


def test_scopes_of_inline_assembly() -> None:
    body = "{\n.reg .b32 low;\nadd.s32 low, %r1, 1;\nmov.b32 %r50, low;\n}\n{ .reg .b64 low; cvt.u64.u32 low, %r1; }"
    assert run(body, [TID])[0].tolist() == (TID + 1).tolist()
