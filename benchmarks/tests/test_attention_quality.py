"""Plots of what a model's heads attend to."""

from __future__ import annotations

import sys

import numpy as np
import pytest


def test_heads_by_layer(script) -> None:
    by_layer = script("attention").by_layer
    groups = {"a": [(0, 1.0), (1, 2.0)], "b": [(0, 3.0)]}
    (axis,) = by_layer(groups, "figure").figure.axes
    assert [np.asarray(dots.get_offsets()).tolist() for dots in axis.collections] == [[[0, 1], [1, 2]], [[0, 3]]]
    with pytest.raises(ValueError, match="groups has 0 entries"):
        by_layer({}, "figure")


def test_without_matplotlib(script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .*\[plot\]'"):
        script("attention").by_layer({"a": [(0, 1)]}, "")
