"""Device memory that grows in place, over a driver that is imitated on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap

import pytest
import torch

from hf_diffkv.pages import FreeList, PagePool, cuda_reserve
from hf_diffkv.pages import reserve as reserve_module
from hf_diffkv.pages.cuda_reserve import (
    CudaDriverError,
    CudaReservation,
    DeviceMemory,
    capture_lock,
    give_back_dropped,
)

GRANULARITY = 1 << 16
TOTAL = 40 * GRANULARITY - 5
DEVICE = torch.device("cuda", 0)


class FakeDriver:
    """Answers the driver's calls from host memory and checks what the real one would check."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.fail: dict[str, list[int]] = {}
        self.limit = TOTAL
        self.capturing = self.unavailable = False
        self._host: list[mmap.mmap] = []

    def __getattr__(self, name: str):
        method = self.__dict__.get(name) or getattr(type(self), "_" + name, None)
        if method is None:
            raise AttributeError(name)

        def call(*arguments: object) -> int:
            self.calls.append(name)
            codes = self.fail.get(name)
            if codes and (code := codes.pop(0)):
                return code
            return method(self, *arguments) or 0

        return call

    def synchronize(self, device: int) -> None:
        self.calls.append(f"synchronize {device}")
        if self.unavailable:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def _cuMemGetAllocationGranularity(self, out, properties, option) -> None:
        assert (properties._obj.type, properties._obj.location.type, properties._obj.location.id) == (1, 1, 0)
        assert ctypes.sizeof(properties._obj) == 32
        out._obj.value = GRANULARITY

    def _cuMemAddressReserve(self, out, size, alignment, address, flags) -> None:
        assert size.value % GRANULARITY == 0
        self._host.append(mmap.mmap(-1, size.value))
        out._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(self._host[-1]))
        self.reserved[out._obj.value] = size.value

    def _cuMemCreate(self, out, size, properties, flags) -> int:
        assert size.value % GRANULARITY == 0
        if sum(self.handles.values()) + size.value > self.limit + GRANULARITY:
            return 2
        out._obj.value = 1 + len(self.calls)
        self.handles[out._obj.value] = size.value
        return 0

    def _cuMemMap(self, start, size, offset, handle, flags) -> None:
        assert self.handles[handle.value] == size.value and offset.value == 0
        base = max(address for address in self.reserved if address <= start.value)
        assert start.value + size.value <= base + self.reserved[base]
        assert all(start.value >= at + length or at >= start.value + size.value
                   for at, (length, _) in self.mappings.items())  # fmt: skip
        self.mappings[start.value] = (size.value, handle.value)

    def _cuMemSetAccess(self, start, size, access, count) -> None:
        assert self.mappings[start.value][0] == size.value and count.value == 1
        assert (access._obj.location.type, access._obj.location.id, access._obj.flags) == (1, 0, 3)
        self.accessible.add(start.value)

    def _cuMemUnmap(self, start, size) -> None:
        assert self.mappings.pop(start.value)[0] == size.value
        self.accessible.discard(start.value)

    def _cuMemRelease(self, handle) -> None:
        del self.handles[handle.value]

    def _cuMemAddressFree(self, address, size) -> None:
        assert self.reserved.pop(address.value) == size.value
        assert not any(address.value <= start < address.value + size.value for start in self.mappings)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()

    def as_tensor(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
        interface = memory.__cuda_array_interface__
        assert interface["shape"] == (memory.size,) and interface["typestr"] == "|u1" and memory.mapped > 0
        data = (ctypes.c_ubyte * memory.size).from_address(interface["data"][0])
        data.owner = memory
        return torch.frombuffer(data, dtype=torch.uint8)

    monkeypatch.setattr(cuda_reserve, "driver", lambda: fake)
    monkeypatch.setattr(cuda_reserve, "total_bytes", lambda device: TOTAL)
    monkeypatch.setattr(cuda_reserve, "as_tensor", as_tensor)
    monkeypatch.setattr(cuda_reserve, "_now", {})
    monkeypatch.setattr(cuda_reserve, "_peak", {})
    monkeypatch.setattr(cuda_reserve, "_dropped", [])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.calls.append("empty_cache"))
    monkeypatch.setattr(torch.version, "hip", None)
    return fake


def test_growth_moves_nothing_and_maps_what_is_needed(driver: FakeDriver) -> None:
    memory = CudaReservation(DEVICE)
    address = memory.tensor.data_ptr()
    assert memory.tensor.numel() == 40 * GRANULARITY >= TOTAL
    assert memory.grows_in_place and memory.committed == 0
    memory.commit(100)
    memory.tensor[:100] = 7
    for size, mapped in ((GRANULARITY, 1), (GRANULARITY + 1, 2), (5 * GRANULARITY, 5), (200, 5)):
        memory.commit(size)
        assert memory.tensor.data_ptr() == address
        assert sum(driver.handles.values()) == mapped * GRANULARITY
        assert memory.slack == mapped * GRANULARITY - memory.committed
    assert bool((memory.tensor[:100] == 7).all())
    assert set(driver.mappings) == driver.accessible
    assert cuda_reserve.mapped_bytes(DEVICE) == cuda_reserve.peak_mapped_bytes(DEVICE) == 5 * GRANULARITY


def test_growth_ahead_is_by_a_sixteenth_where_there_is_memory(driver: FakeDriver) -> None:
    memory = CudaReservation(DEVICE)

    def pieces(size: int, **options: bool) -> int:
        """Memory that is mapped once `size` bytes are committed."""
        memory.commit(size, **options)
        assert memory.committed == size and memory.slack == sum(driver.handles.values()) - size
        return sum(driver.handles.values()) // GRANULARITY

    assert pieces(32 * GRANULARITY, ahead=True) == 32
    assert pieces(32 * GRANULARITY + 1, ahead=True) == 34
    created = driver.calls.count("cuMemCreate")
    assert pieces(34 * GRANULARITY, ahead=True) == 34 and driver.calls.count("cuMemCreate") == created
    assert pieces(34 * GRANULARITY + 1) == 35
    driver.fail["cuMemCreate"] = [2]
    assert pieces(35 * GRANULARITY + 1, ahead=True) == 36 and "empty_cache" not in driver.calls
    assert pieces(39 * GRANULARITY, ahead=True) == 39
    # no more than addresses
    assert pieces(39 * GRANULARITY + 1, ahead=True) == 40


def test_everything_is_given_back_once_nobody_holds_it(driver: FakeDriver) -> None:
    memory = CudaReservation(DEVICE)
    memory.commit(3 * GRANULARITY)
    view = memory.tensor[5:10]
    del memory
    gc.collect()
    assert driver.handles and "cuMemUnmap" not in driver.calls
    del view
    gc.collect()
    assert not (driver.handles or driver.mappings or driver.reserved)
    order = [name for name in driver.calls if name in ("synchronize 0", "cuMemUnmap", "cuMemAddressFree")]
    # of the memory's device, which need not be the current one; nothing waits for a device before
    assert order == ["synchronize 0", "cuMemUnmap", "cuMemUnmap", "cuMemAddressFree"]
    assert cuda_reserve.mapped_bytes(DEVICE) == 0 and cuda_reserve.peak_mapped_bytes(DEVICE) == 3 * GRANULARITY
    cuda_reserve.reset_peak_mapped(DEVICE)
    assert cuda_reserve.peak_mapped_bytes(DEVICE) == 0


def test_what_is_mapped_wholly_behind_goes(driver: FakeDriver) -> None:
    """Unmaps memory in the pieces in which it was mapped. The rest is slack for the next commit."""
    memory = CudaReservation(DEVICE)
    for size in (1, 4, 6):
        memory.commit(size * GRANULARITY)
    memory.tensor[:GRANULARITY] = 7
    memory.shrink(5 * GRANULARITY)
    assert (memory.committed, memory.slack) == (5 * GRANULARITY, GRANULARITY)
    memory.shrink(4 * GRANULARITY)
    assert (memory.committed, memory.slack) == (4 * GRANULARITY, 0) and driver.calls[-1] == "cuMemRelease"
    memory.shrink(GRANULARITY + 1)
    assert memory.slack == 3 * GRANULARITY - 1
    memory.commit(4 * GRANULARITY)
    memory.shrink(0)
    assert sum(driver.handles.values()) == memory.slack == GRANULARITY
    assert cuda_reserve.mapped_bytes(DEVICE) == GRANULARITY and set(driver.mappings) <= driver.accessible
    memory.commit(2 * GRANULARITY)
    assert (memory.tensor[:GRANULARITY] == 7).all()


def given_back(driver: FakeDriver) -> bool:
    return not (driver.handles or driver.mappings or driver.reserved)


def test_memory_that_cannot_be_waited_for_is_given_back_later(driver: FakeDriver) -> None:
    memory = CudaReservation(DEVICE)
    driver.unavailable = True
    del memory
    gc.collect()
    assert driver.mappings and "cuMemUnmap" not in driver.calls
    driver.unavailable = False
    give_back_dropped()
    assert given_back(driver) and cuda_reserve.mapped_bytes(DEVICE) == 0
    calls = list(driver.calls)
    give_back_dropped()
    assert driver.calls == calls


@pytest.mark.parametrize("whose", ["ours", "another"])
def test_a_capture_is_not_disturbed(driver: FakeDriver, whose: str) -> None:
    """Does not wait for the device, which would invalidate the capture."""
    first, second = CudaReservation(DEVICE), CudaReservation(DEVICE)
    with capture_lock if whose == "ours" else contextlib.nullcontext():
        driver.capturing = whose == "another"
        del first, second
        gc.collect()
        give_back_dropped()
        assert driver.mappings and "synchronize 0" not in driver.calls
    driver.capturing = False
    give_back_dropped()
    assert given_back(driver)


def test_a_full_device_is_a_memory_error(driver: FakeDriver) -> None:
    memory = CudaReservation(DEVICE)
    memory.commit(2 * GRANULARITY)
    driver.fail["cuMemCreate"] = [2]
    memory.commit(3 * GRANULARITY)
    assert driver.calls.count("empty_cache") == 1 and memory.committed == 3 * GRANULARITY
    driver.fail["cuMemCreate"] = [2, 2]
    with pytest.raises(MemoryError, match="cuda:0 has no memory left for .* bytes of cache; use a smaller batch"):
        memory.commit(4 * GRANULARITY)
    assert memory.committed == 3 * GRANULARITY and sum(driver.handles.values()) == 3 * GRANULARITY
    with pytest.raises(MemoryError, match="more than the device's memory"):
        memory.commit(41 * GRANULARITY)


def test_a_full_device_does_not_make_the_pool_grow_by_copying(driver: FakeDriver) -> None:
    driver.fail["cuMemCreate"] = [2]
    assert reserve_module.reserve(DEVICE).grows_in_place
    driver.fail["cuMemCreate"] = [2, 2]
    with pytest.raises(MemoryError, match="cuda:0 has no memory left"):
        reserve_module.reserve(DEVICE)
    gc.collect()
    assert given_back(driver)


@pytest.mark.parametrize("step", ["cuMemMap", "cuMemSetAccess"])
def test_a_failed_step_leaves_nothing_behind(driver: FakeDriver, step: str) -> None:
    memory = CudaReservation(DEVICE)
    driver.fail[step] = [1]
    with pytest.raises(CudaDriverError, match=f"{step} failed with CUDA error 1"):
        memory.commit(2 * GRANULARITY)
    assert sum(driver.handles.values()) == GRANULARITY == sum(size for size, _ in driver.mappings.values())
    memory.commit(2 * GRANULARITY)
    assert sum(driver.handles.values()) == 2 * GRANULARITY


def test_a_pool_uses_it_and_counts_what_is_mapped(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_diffkv.pages.pool.FreeList", lambda device: FreeList(torch.device("cpu")))
    pool = PagePool(1024, DEVICE)
    assert pool.grows_in_place and pool.granularity == GRANULARITY
    address = pool.pages.data_ptr()
    pool.ensure_free(100)
    assert pool.pages.data_ptr() == address
    assert pool.bytes >= 2 * GRANULARITY > 101 * 1024


@pytest.mark.parametrize("failure", ["no library", "old driver", "refused"])
def test_without_it_the_pool_grows_by_copying(driver: FakeDriver, monkeypatch, caplog, failure: str) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    if failure == "no library":
        monkeypatch.setattr(cuda_reserve, "driver", missing)
    elif failure == "old driver":
        monkeypatch.setattr(cuda_reserve, "driver", lambda: object())
    else:
        driver.fail["cuMemAddressReserve"] = [801]
    monkeypatch.setattr(reserve_module, "Reservation", lambda device: "by copying")
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        assert reserve_module.reserve(DEVICE) == "by copying"
    assert "grows by copying" in caplog.text
    assert not driver.mappings


def test_amd_devices_grow_by_copying(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(reserve_module, "Reservation", lambda device: "by copying")
    assert reserve_module.reserve(DEVICE) == "by copying"
    assert not driver.calls
