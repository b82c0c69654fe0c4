"""Imported by a file of tests that runs kernels: skips it unless Triton is installed and interprets them."""

import pytest

triton = pytest.importorskip("triton")
if isinstance(triton.language.sum, triton.JITFunction):
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
