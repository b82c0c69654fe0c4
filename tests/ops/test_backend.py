"""Where kernels run and where the reference does."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_diffkv.ops import backend

pytest.importorskip("triton")

from hf_diffkv.ops.prefill_attention import tiles  # noqa: E402


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """Makes a device of the given capability out of nothing."""

    def make(capability: tuple[int, int], hip: str | None = None) -> torch.device:
        backend._fits.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        monkeypatch.setattr(backend, "_has_triton", lambda: True)
        return torch.device("cuda", 0)

    yield make
    backend._fits.cache_clear()


@pytest.mark.parametrize("capability, runs", [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_nvidia_devices_that_are_too_old_run_the_reference(device, caplog, capability, runs) -> None:
    place = device(capability)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        assert [backend.use_kernels(place, torch.float16) for _ in range(3)] == [runs] * 3
    assert caplog.text.count("Tesla T4 is older than compute capability 8.0") == (not runs)


def test_amd_devices_run_kernels(device) -> None:
    assert backend.use_kernels(device((7, 5), hip="6.4"), torch.bfloat16)


def test_double_precision_and_cpus_run_the_reference(device) -> None:
    assert not backend.use_kernels(device((9, 0)), torch.float64)
    assert not backend.use_kernels(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "capability, target",
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_80"),
    ],
)
def test_block_sizes_by_device(device, monkeypatch, capability, target) -> None:
    monkeypatch.setattr(tiles.triton, "JITFunction", object)
    assert tiles.target_of(device(capability)) == target
    for dim in (64, 128, 256):
        for table in (tiles.FORWARD_TILES, tiles.COLUMN_TILES, tiles.PAST_TILES, tiles.MASKED_TILES):
            tile = tiles._choose(table, target, torch.bfloat16, dim)
            assert tile == table[target if target in table else "sm_90"][dim]


def test_block_sizes_on_amd_devices(device, monkeypatch) -> None:
    monkeypatch.setattr(tiles.triton, "JITFunction", object)
    assert tiles.target_of(device((9, 0), hip="6.4")) == "gfx942"
