"""The number of programs into which a decode step is split."""

from __future__ import annotations

import math

import pytest
import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops.backend import Device
from hf_diffkv.pages.layout import UNIFORM_NUMBERS, PageLayout
from tools.kernels.assumed import assume_device

pytest.importorskip("triton")

from hf_diffkv.ops.decode_attention.scratch import KernelConfig  # noqa: E402
from hf_diffkv.ops.decode_attention.splits import choose_splits, warps_at_once  # noqa: E402


def test_splits_follow_the_load():
    # eight programs on each of 132 processors; one request of 8 heads: as many splits as have work
    assert choose_splits(8, 4096, 32, 1056) == 64
    # a full batch gives whole waves of programs
    for rows in (64, 256, 512, 1024):
        waves = rows * choose_splits(rows, 8192, 32, 1056) / 1056
        assert 0.95 < waves / math.ceil(waves) <= 1
    # one request with more tokens: merging over 64 splits takes as long as it saves
    assert choose_splits(8, 8192, 32, 1584) == 64
    # no more splits than waves need, but none with more than 2,048 tokens
    assert choose_splits(4096, 512, 32, 1056) == 1
    assert choose_splits(100_000, 8192, 32, 1056) == 4
    assert choose_splits(8, 1, 32, 1056) == 1
    assert choose_splits(1, 10**7, 32, 1056) == 256


# values from NVIDIA's calculator (cuda_occupancy.h) for sm_80 and sm_90
BY_REGISTERS = {64: 32, 128: 16, 160: 12, 168: 12, 169: 8, 176: 8, 200: 8, 224: 8, 255: 8}


@pytest.mark.parametrize("registers, warps", BY_REGISTERS.items())
def test_a_warp_takes_registers_of_one_quarter(registers, warps):
    assert warps_at_once(registers, 65536) == warps


@pytest.mark.parametrize(
    "precision, dim, numbers, processor, expected",
    [
        # three warps of 168 registers per thread in each quarter, two of 200, 224 or 255; half as many programs of two
        # warps
        ("K5V4", 128, UNIFORM_NUMBERS, (65536, 228 << 10), 12),
        ("K5V4", 128, {}, (65536, 228 << 10), 8),
        ("K5V4", 96, {}, (65536, 228 << 10), 8),
        ("K16V16", 128, {}, (65536, 228 << 10), 8),
        ("K5V4", 256, UNIFORM_NUMBERS, (65536, 228 << 10), 4),
        # 12 KiB for rows copied ahead and 3 for the rest
        ("K8V4", 128, UNIFORM_NUMBERS, (65536, 100 << 10), 6),
    ],
)
def test_programs_at_once(precision, dim, numbers, processor, expected):
    one = Precision.parse(precision)
    layout = PageLayout.build(one, one, dim, dim, 2, **numbers)
    config = KernelConfig.choose(layout, 4, torch.bfloat16, "cuda")
    with assume_device(Device("sm_90", 132, *processor)):
        assert config.programs_per_processor(layout, torch.device("cpu")) == expected


@pytest.mark.parametrize(
    "high, low, dim, stages, registers",
    [
        # pairs whose codes have two fields: one block ahead at 64 channels, except for 2-bit values
        ("K5V4", "K3V3", 64, 2, None),
        ("K5V4", "K3V2", 64, 3, None),
        ("K8V4", "K4V4", 64, 3, 200),
        # the registers needed at 128 channels if keys are far apart
        ("K6V5", "K3V3", 128, 3, None),
        ("K5V4", "K3V3", 128, 3, 200),
        ("K6V5", "K4V3", 128, 3, 200),
        ("K4V3", "K3V3", 128, 3, 168),
        ("K8V4", "K8V4", 128, 3, 168),
        ("K4V3", "K4V3", 128, 3, 200),
    ],
)
def test_what_pairs_get_to_need_no_spills(high, low, dim, stages, registers):
    layout = PageLayout.build(Precision.parse(high), Precision.parse(low), dim, dim, 2, **UNIFORM_NUMBERS)
    config = KernelConfig.choose(layout, 4, torch.bfloat16, "cuda")
    assert (config.num_stages, dict(config.options).get("maxnreg")) == (stages, registers)
    # scored tokens leave a different number of registers
    scored = PageLayout.build(Precision.parse(high), Precision.parse(low), dim, dim, 2)
    assert KernelConfig.choose(scored, 4, torch.bfloat16, "cuda").num_stages == 3
