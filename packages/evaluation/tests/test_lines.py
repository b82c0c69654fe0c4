"""Curves over the length of the context as a picture."""

from __future__ import annotations

import sys

import pytest
from hf_diffkv_evaluation import lines as plot

from hf_diffkv.plot import palette


def test_memory_and_speed_show_their_points() -> None:
    held = {"dense": [(2000, 8e6), (1000, 4e6)], "DiffKV": [(1000, 1e6), (2000, 3e6)]}
    (axis,) = plot.memory(held, title="a model").figure.axes
    lines = {line.get_label(): line for line in axis.lines}
    assert lines["dense"].get_xydata().tolist() == [[1000, 4], [2000, 8]]
    assert lines["DiffKV"].get_xydata().tolist() == [[1000, 1], [2000, 3]]
    assert (axis.get_title(), axis.get_ylabel()) == ("a model", "MB held")
    assert {name: line.get_color() for name, line in lines.items()} == {
        name: palette.style_of(name).colour for name in held
    }
    panels = plot.speed({"one": {"dense": [(1, 5.0)]}, "two": {"DiffKV": [(1, 6.0)], "dense": [(1, 7.0)]}}).figure
    assert [axis.get_title() for axis in panels.axes] == ["one", "two"]
    shown = [{line.get_label(): line.get_ydata()[0] for line in axis.lines} for axis in panels.axes]
    assert shown == [{"dense": 5.0}, {"dense": 7.0, "DiffKV": 6.0}]
    assert [text.get_text() for text in panels.legends[0].get_texts()] == ["dense", "DiffKV"]
    assert plot.memory({"dense": [(1, 2e9)]}).figure.axes[0].get_ylabel() == "GB held"
    with pytest.raises(ValueError, match="curves is empty"):
        plot.memory({})


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .*\[plot\]'"):
        plot.speed({"dense": [(1, 1)]})
