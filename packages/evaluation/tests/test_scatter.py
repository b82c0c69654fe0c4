"""Quality over bytes as a picture."""

from __future__ import annotations

import sys

import pytest
from hf_diffkv_evaluation.scatter import Point, quality
from matplotlib.text import Text


def test_quality_shows_points_intervals_and_names_apart() -> None:
    points = [Point(f"diffkv:{i}", 0.3, 0.5, 0.4, 0.6) for i in range(8)] + [Point("dense", 1.0, 1.0, 1.0, 1.0)]
    figure = quality(points, "task", "right").figure
    (axis,) = figure.axes
    marks = [
        tuple(line.get_xydata()[0]) for line in axis.lines if line.get_marker() in "o*" and len(line.get_xdata()) == 1
    ]
    assert sorted(marks) == [(30, 0.5)] * 8 + [(100, 1)]
    spans = [collection.get_segments()[0][:, 1].tolist() for collection in axis.collections]
    assert sorted(spans) == [[0.4, 0.6]] * 8 + [[1, 1]]
    assert sorted(text.get_text() for text in axis.texts) == sorted(point.name for point in points)
    figure.draw_without_rendering()
    # without the lines that lead to marks
    boxes = [Text.get_window_extent(text) for text in axis.texts]
    frame = axis.get_window_extent()
    for index, box in enumerate(boxes):
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert not any(box.overlaps(other) for other in boxes[:index])
    with pytest.raises(ValueError, match="points is empty"):
        quality([], "task", "right")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install .*\[plot\]'"):
        quality([Point("dense", 1, 1, 1, 1)], "", "")
