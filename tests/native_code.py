"""Instruction sets that run here, for the tests of native code."""

from __future__ import annotations

import pytest

from hf_diffkv.native import library


def available() -> list[str]:
    if library.library() is None:
        return []
    return [name for name in library.INSTRUCTIONS if library.library().diffkv_select(name.encode())]


SETS = available()
if SETS:
    library.library().diffkv_select(SETS[0].encode())
needs_native = pytest.mark.skipif(not SETS, reason="the native library is not built: make native")
