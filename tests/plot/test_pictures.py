"""Contents of pictures, compared with counts and figures of the tests' own."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread
from measured_heads import measured
from tiny_models import tiny_model

from hf_diffkv import DiffKVConfig, plot
from hf_diffkv.cache.report import LayerReport, MemoryReport
from hf_diffkv.heads.allocation import loss_curve
from hf_diffkv.heads.lookup import keep
from hf_diffkv.plot import palette


def report_of(layers: list[LayerReport], num_layers: int | None = None) -> MemoryReport:
    return MemoryReport(3_000_000, 10_000_000, 0, 0, {}, tuple(layers), num_layers or len(layers))


def random_layer(layer_idx: int, heads: int, random_numbers: random.Random) -> LayerReport:
    """Returns a report of heads that have seen 1,000 tokens each."""
    cuts = [sorted(random_numbers.randrange(1001) for _ in range(3)) for _ in range(heads)]
    return LayerReport(layer_idx, *zip(*((a, b - a, c - b, 1000 - c) for a, b, c in cuts)))


def bars_of(picture: plot.Picture) -> dict[tuple[str, int, int], float]:
    """Length of each part of each bar, by level, row and head."""
    (axis,) = picture.figure.axes
    found = {}
    for collection in axis.collections:
        for path in collection.get_paths():
            left, top = path.vertices.min(0)
            right, bottom = path.vertices.max(0)
            assert int(top) == int(bottom) and int(left) == int(right - 1e-9)
            found[collection.get_label(), int(top), int(left)] = right - left
        assert to_hex(collection.get_facecolor()[0]) == palette.LEVELS[collection.get_label()]
    return found


@pytest.mark.parametrize(("layers", "heads"), [(2, 2), (30, 3), (80, 8), (62, 32), (2, 64), (250, 8)])
@pytest.mark.sampled(100)
def test_levels_of_4_to_2000_heads(layers: int, heads: int, tmp_path: Path) -> None:
    numbers = random.Random(layers)
    report = report_of([random_layer(index, heads, numbers) for index in range(layers)])
    picture = plot.levels(report)
    bars = bars_of(picture)
    whole = sum(length for (_, row, head), length in bars.items() if (row, head) == (0, 0))
    for row, layer in enumerate(report.layers):
        for name in palette.LEVELS:
            for head, count in enumerate(getattr(layer, name)):
                assert bars.get((name, row, head), 0) == pytest.approx(whole * count / 1000)
    shown = imread(picture.save(tmp_path / "levels.png"))
    assert shown.shape[1] == 1200 and shown.shape[0] < 2200
    # the area of a colour is the level's share of all tokens, but for the legend and rounding to pixels
    areas = {
        name: (abs(shown[..., :3] - to_rgb(colour)).max(-1) < 0.01).sum() for name, colour in palette.LEVELS.items()
    }
    for name, area in areas.items():
        share = sum(sum(getattr(layer, name)) for layer in report.layers) / (1000 * layers * heads)
        assert area / sum(areas.values()) == pytest.approx(share, abs=0.03)


def test_the_precision_of_every_head() -> None:
    names = [("K8V4", "K3V3"), ("K4V3g2/1", "K8V4"), ("K3V3", "K3V3")]
    layers = [LayerReport(index, *[(1, 1)] * 4, each) for index, each in zip((0, 4, 9), names)]
    (axis,) = plot.precisions(report_of(layers)).figure.axes
    cells, colours = {}, []
    for collection in axis.collections:
        colours.append(sum(to_rgb(collection.get_facecolor()[0])))
        for path in collection.get_paths():
            cells[tuple(path.vertices.min(0).astype(int))] = collection.get_label()
    assert cells == {(column, row): name for column, each in enumerate(names) for row, name in enumerate(each)}
    assert [collection.get_label() for collection in axis.collections] == ["K3V3", "K4V3g2/1", "K8V4"]
    assert colours == sorted(colours, reverse=True), "the more bits, the darker"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "4", "9"]


def test_layers_of_different_heads_and_numbers() -> None:
    layers = [LayerReport(3, (1, 2), (3, 2), (4, 4), (2, 2)), LayerReport(9, (5,), (0,), (5,), (0,))]
    picture = plot.levels(report_of(layers, num_layers=12))
    (axis,) = picture.figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["3", "9"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "1"]
    assert set(bars_of(picture)) == {(name, 0, head) for name in palette.LEVELS for head in (0, 1)} | {
        ("high", 1, 0),
        ("window", 1, 0),
    }
    title = picture.figure.get_suptitle()
    assert title == "3.00 MB held, 30.0% of a dense cache\n2 of 12 layers compressed, to 30.0%"


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing yet"):
        plot.levels(report_of([]))


def test_pictures_are_shown_by_notebooks_and_saved(tmp_path: Path) -> None:
    picture = plot.levels(report_of([LayerReport(0, (1,), (1,), (1,), (1,))]))
    assert picture._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    for name in ("picture.png", "picture.svg"):
        assert picture.save(tmp_path / name) == tmp_path / name and (tmp_path / name).stat().st_size > 1000
    assert picture.save(tmp_path / "picture").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nope"):
        picture.save(tmp_path / "picture.nope")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    layer = LayerReport(0, (1,), (1,), (1,), (1,))
    for draw in (
        lambda: plot.levels(report_of([layer])),
        lambda: plot.precisions(report_of([dataclasses.replace(layer, precisions=("K4V3",))])),
    ):
        with pytest.raises(ImportError, match=r"pip install .*\[plot\]'"):
            draw()


def test_imports_are_light() -> None:
    code = "import sys, hf_diffkv; before = set(sys.modules); hf_diffkv.plot.text, hf_diffkv.plot.Point; "
    code += "from hf_diffkv.plot.palette import LEVELS; hf_diffkv.plot.levels, hf_diffkv.plot.speed; "
    code += "print([n for n in ('torch', 'transformers', 'matplotlib', 'numpy') if n in sys.modules], len(LEVELS))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] 4"


def test_names() -> None:
    assert set(plot.__all__) <= set(dir(plot))
    assert all(getattr(plot, name).__name__ == name for name in plot.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        plot.nothing  # noqa: B018
    assert isinstance(
        plot.levels(SimpleNamespace(memory=lambda: report_of([LayerReport(0, (1,), (0,), (0,), (0,))]))), plot.Picture
    )


def test_predicted_loss_over_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DIFFKV_CACHE", str(tmp_path))
    model = tiny_model("llama", head_dim=64)
    keep(measured(model))
    config = DiffKVConfig.for_model(model, preset="small")
    (axis,) = plot.loss(config).figure.axes
    each, alone, own = axis.lines
    losses = [loss_curve(config.calibration)[index] for index in range(5)]
    assert list(alone.get_xdata()) == pytest.approx([100 * loss.ratio for loss in losses])
    assert list(alone.get_ydata()) == [loss.one_for_all for loss in losses]
    block = config.calibration
    assert own.get_xdata()[0] == 100 * block["ratio"] and own.get_ydata()[0] == pytest.approx(block["predicted_kl"])
    assert all(np.diff(each.get_xdata()) > 0) and all(np.diff(each.get_ydata()) <= 0)
    assert [text.get_text() for text in axis.texts] == ["K3V2", "K3V3", "K4V3", "K5V4", "K6V5"]
    with pytest.raises(ValueError, match="hf-diffkv calibrate --model MODEL"):
        plot.loss(DiffKVConfig())
