"""Choosing between kernels and the reference."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_diffkv.config import Precision
from hf_diffkv.ops import backend
from hf_diffkv.pages import PageLayout
from tools.kernels.assumed import assume_device

triton = pytest.importorskip("triton")

from hf_diffkv.ops.prefill_attention import tiles  # noqa: E402

LIMITS = SimpleNamespace(
    multi_processor_count=132, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=228 << 10
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """Fakes a device with the given capability."""

    def make(capability: tuple[int, int], hip: str | None = None) -> torch.device:
        clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: LIMITS)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        monkeypatch.setattr(backend, "_has_triton", lambda: True)
        return torch.device("cuda", 0)

    def clear() -> None:
        for function in (backend._fits, backend._real_device):
            function.cache_clear()

    yield make
    clear()


@pytest.mark.parametrize("capability, runs", [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_nvidia_devices_that_are_too_old_run_the_reference(device, caplog, capability, runs) -> None:
    place = device(capability)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        assert [backend.use_kernels(place, torch.float16) for _ in range(3)] == [runs] * 3
    assert caplog.text.count("Tesla T4 is older than compute capability 8.0") == (not runs)


@pytest.mark.parametrize("target, runs", [("gfx942:sramecc+:xnack-", True), ("gfx1100", False)])
def test_amd_devices_run_kernels_that_were_compiled_for_them(device, monkeypatch, caplog, target, runs) -> None:
    place = device((7, 5), hip="6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=target))
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        assert [backend.use_kernels(place, torch.bfloat16) for _ in range(2)] == [runs] * 2
    assert caplog.text.count("compiled for gfx942 alone, not for gfx1100") == (not runs)


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._has_triton.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        assert [backend._has_triton() for _ in range(2)] == [False] * 2
    assert caplog.text.count("Triton is not installed") == caplog.text.count("pip install -e '.[gpu]'") == 1
    backend._has_triton.cache_clear()
    with pytest.raises(ImportError, match="'kernels' needs Triton: pip install"), backend.use_backend("kernels"):
        pass
    assert backend.forced is None


@pytest.mark.parametrize("version, runs", [("3.4.0", False), ("3.6.0", True), ("3.10.1+git1", True), ("4.0", True)])
def test_an_old_triton_is_not_used(monkeypatch, caplog, version, runs) -> None:
    backend._has_triton.cache_clear()
    monkeypatch.setattr(triton, "__version__", version)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        assert [backend._has_triton() for _ in range(2)] == [runs] * 2
    assert caplog.text.count(f"Triton {version} is older than 3.6") == (not runs)
    backend._has_triton.cache_clear()


def test_double_precision_and_cpus_run_the_reference(device) -> None:
    assert not backend.use_kernels(device((9, 0)), torch.float64)
    assert not backend.use_kernels(torch.device("cpu"), torch.float32)


def test_cpus_run_native_code_where_it_is_built_and_has_a_form(monkeypatch) -> None:
    cpu = torch.device("cpu")
    layout = PageLayout.build(Precision(6, 4), Precision(5, 3), 64, 64, 2)
    wide = PageLayout.build(Precision(8, 4), Precision(4, 2), 576, 576, 2)
    monkeypatch.setattr(backend.library, "library", lambda: object())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert backend.choose(cpu, dtype, layout.high, layout.low) == "native"
    assert backend.choose(cpu, torch.float64, layout.high) == "reference"
    assert backend.choose(cpu, torch.float32, wide.high) == "reference"
    with backend.use_backend("reference"):
        assert backend.choose(cpu, torch.float32, layout.high) == "reference"
    with backend.use_backend("native"):
        assert backend.choose(cpu, torch.float64, layout.high) == "reference"
    monkeypatch.setattr(backend.library, "library", lambda: None)
    assert backend.choose(cpu, torch.float32, layout.high) == "reference"


def test_a_library_that_is_not_there_is_said_once(monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setattr(backend.library, "PATH", tmp_path / "_lib.so")
    for content, reason in ((None, "was not built"), (b"no library", "cannot be loaded")):
        caplog.clear()
        backend.library.library.cache_clear()
        if content is not None:
            backend.library.PATH.write_bytes(content)
        with caplog.at_level(logging.WARNING, "hf_diffkv"):
            assert [backend.choose(torch.device("cpu"), torch.float32) for _ in range(3)] == ["reference"] * 3
        assert caplog.text.count(reason) == 1
    backend.library.library.cache_clear()


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
def test_block_sizes_by_device(device, capability, target) -> None:
    assert backend.device_of(device(capability)) == backend.Device(target, 132, 65536, 228 << 10)
    for dim in (64, 128, 256):
        for table in (tiles.FORWARD_TILES, tiles.COLUMN_TILES, tiles.PAST_TILES, tiles.MASKED_TILES):
            tile = tiles._choose(table, target, torch.bfloat16, dim)
            assert tile == table[target if target in table else "sm_90"][dim]


def test_amd_devices_are_what_kernels_were_compiled_for(device) -> None:
    assert backend.device_of(device((9, 0), hip="6.4")) == backend.Device("gfx942", 132)


def test_a_device_can_be_assumed() -> None:
    cpu, assumed = torch.device("cpu"), backend.Device("sm_90", 2)
    assert backend.device_of(cpu) == backend.Device(backend.INTERPRETER)
    with pytest.raises(KeyError), assume_device(assumed):
        assert backend.device_of(cpu) == backend.device_of(torch.device("meta")) == assumed
        raise KeyError
    assert backend.device_of(cpu).target == backend.INTERPRETER
