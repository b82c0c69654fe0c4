"""Memory that is freed while weights are quantised goes back to the system."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import pytest

from hf_diffkv.running.bitsandbytes_weights import give_back_memory

COUNT, BLOCK = 50_000, 2000


def resident() -> int:
    """Bytes of this process in memory that are of no file."""
    return 1024 * int(re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot or need not")
def test_freed_blocks_before_a_used_one_are_given_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        library.free(block)
    before = resident()
    give_back_memory()
    assert before - resident() > COUNT * BLOCK // 2
    library.free(blocks[-1])
