"""Device memory that grows in place, on a real device."""

from __future__ import annotations

import gc

import torch

from hf_diffkv.pages import PagePool
from hf_diffkv.pages.cuda_reserve import CudaReservation, mapped_bytes


def test_a_pool_grows_in_place_and_gives_its_memory_back(device) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    before, mapped = torch.cuda.mem_get_info()[0], mapped_bytes(device)
    pool = PagePool(5824, device)
    assert type(pool._reservation) is CudaReservation and pool.grows_in_place
    address = pool.pages.data_ptr()
    for count in (10, 1000, 100_000, 500_000):
        pool.ensure_free(count)
        assert pool.pages.data_ptr() == address
        pages = pool.pages
        pages[pool.capacity - 1] = 7
        pages[1] = 3
    # beyond 2^31 bytes
    assert pool.capacity * 5824 > 2**31
    assert int(pages[pool.capacity - 1].sum()) == 7 * 5824 and int(pages[1].sum()) == 3 * 5824
    assert before - torch.cuda.mem_get_info()[0] >= pool.capacity * 5824
    assert mapped_bytes(device) - mapped >= pool.capacity * 5824
    del pool, pages
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert mapped_bytes(device) == mapped
    assert before - torch.cuda.mem_get_info()[0] < 2**28
