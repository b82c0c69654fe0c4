"""The list of shipped kernels matches what launchers launch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from hf_diffkv.ops.backend import INTERPRETER, device_of  # noqa: E402
from hf_diffkv.ops.decode_attention import launch as decode  # noqa: E402
from hf_diffkv.ops.decode_attention.scratch import KernelConfig  # noqa: E402
from hf_diffkv.ops.prefill_attention import tiles  # noqa: E402
from hf_diffkv.ops.quantize import launch as quantize  # noqa: E402
from tools.kernels import report as kernel_report  # noqa: E402
from tools.kernels.record import record  # noqa: E402
from tools.kernels.variant import KernelVariant  # noqa: E402

CPU = torch.device("cpu")
ARGUMENTS = {
    **{name: torch.zeros(4, dtype=getattr(torch, name)) for name in ("uint8", "int32", "int64")},
    **{name: torch.zeros(4, dtype=getattr(torch, name)) for name in ("float16", "bfloat16", "float32")},
    **{"absent": None, "one": 1, "one_of_many": 1, "many": 2**31, "few": 3, "number": 0.5},
}


@triton.jit(do_not_specialize=["one_of_many"])
def fill_kernel(
    uint8, int32, int64, float16, bfloat16, float32, absent, one, one_of_many, many, few, number,
    SIZE: tl.constexpr,
):  # fmt: skip
    tl.store(float32 + tl.arange(0, SIZE), number)


def fill(size: int = 4, **options: int) -> None:
    fill_kernel[(1,)](*ARGUMENTS.values(), SIZE=size, **options)


def test_a_launch_is_noted_as_triton_would_compile_it() -> None:
    # as documented: a pointer by its element type, integers by their size, a 1 as a constant unless excepted
    expected = KernelVariant(
        name="fill",
        kernel=fill_kernel,
        signature={
            **{"uint8": "*u8", "int32": "*i32", "int64": "*i64"},
            **{"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"},
            **{"one_of_many": "i32", "many": "i64", "few": "i32", "number": "fp32"},
        },
        constexprs={"absent": None, "one": 1, "SIZE": 4},
        num_warps=8,
        num_stages=3,
        options={"maxnreg": 128},
        targets=("sm_80",),
    )
    assert record(lambda: fill(num_warps=8, num_stages=3, maxnreg=128), targets=("sm_80",)) == [expected]
    # Triton chooses what a launch leaves open
    (plain,) = record(fill)
    assert (plain.num_warps, plain.num_stages, plain.options, plain.targets) == (4, None, {}, kernel_report.TARGETS)


def test_recording_runs_nothing_and_leaves_no_trace() -> None:
    runs = JITFunction.run, InterpretedFunction.run

    def launch(fails: bool) -> None:
        assert device_of(CPU).target == "sm_90"
        fill()
        if fails:
            raise KeyError

    record(launch, False, targets=("sm_90",))
    with pytest.raises(KeyError):
        record(launch, True, targets=("sm_90",))
    assert not ARGUMENTS["float32"].any()
    assert (JITFunction.run, InterpretedFunction.run) == runs
    assert device_of(CPU).target == INTERPRETER
    fill()
    assert ARGUMENTS["float32"].tolist() == [0.5] * 4
    ARGUMENTS["float32"].zero_()


def test_targets_that_compile_something_else_are_recorded_one_by_one() -> None:
    with pytest.raises(ValueError, match="gfx942"):
        record(lambda: fill(num_warps=4 + 4 * (device_of(CPU).target == "gfx942")))


def listed(op: str) -> dict[str, KernelVariant]:
    return {variant.name: variant for variant in kernel_report.collect_variants([op])}


def test_the_list_changes_with_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listed("quantize") | listed("decode_attention") | listed("prefill_attention")
    monkeypatch.setattr(quantize, "COPY_BYTES", 2 * quantize.COPY_BYTES)
    monkeypatch.setattr(quantize, "NUM_WARPS", 2)
    monkeypatch.setattr(decode, "SHARE_TOKENS", 64)
    tile = tiles.FORWARD_TILES["sm_90"][128]
    monkeypatch.setitem(tiles.FORWARD_TILES["sm_90"], 128, tiles.Tile(64, tile.block_n, tile.num_warps, 1))
    choose = KernelConfig.choose

    def choose_others(*arguments: object) -> KernelConfig:
        chosen = choose(*arguments)
        return KernelConfig(**{**vars(chosen), "options": (("maxnreg", 99),)})

    monkeypatch.setattr(KernelConfig, "choose", choose_others)
    after = listed("quantize") | listed("decode_attention") | listed("prefill_attention")
    assert before.keys() == after.keys()
    copy, store = "copy_tokens-K8V4-g11-d128", "store_tokens-K8V4-g11-d128"
    assert after[copy].constexprs["BLOCK"] == 2 * before[copy].constexprs["BLOCK"]
    assert (before[store].num_warps, after[store].num_warps) == (4, 2)
    finish = "decode_finish-K8V4-K4V2-d128-g4-cuda"
    assert (before[finish].constexprs["TOKENS"], after[finish].constexprs["TOKENS"]) == (512, 64)
    assert after["decode_attend-K8V4-K4V2-d128-g4-hip"].options == {"maxnreg": 99}
    forward = "flash_forward-bf16-d128-padding-sm_90"
    assert (before[forward].constexprs["BLOCK_M"], after[forward].constexprs["BLOCK_M"]) == (128, 64)
    assert (before[forward].num_stages, after[forward].num_stages) == (3, 1)
