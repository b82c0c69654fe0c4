"""Runs a small share of the native-code fuzzing, and checks that it finds errors."""

from __future__ import annotations

from types import ModuleType

import pytest

from hf_diffkv.native import library
from hf_diffkv.ops.decode_attention import native

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native library is not built: make native")


def test_random_caches(tool: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert tool.main(["--count", "12", "--seed", "500"]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out == "12 caches agree, 0 differ\n"


def test_a_wrong_output_is_found(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    call = native.call

    def scaled(name: str, block: object) -> None:
        block.scaling *= 1.1
        call(name, block)

    monkeypatch.setattr(native, "call", scaled)
    assert tool.main(["--count", "2", "--seed", "500"]) == 1
    shown = capsys.readouterr().out
    assert "seed 500: step 0: outputs differ" in shown and "0 caches agree, 2 differ" in shown
