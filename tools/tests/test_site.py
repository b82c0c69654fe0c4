"""The documentation as a site: complete, without dead links, and with drawings that use the palette."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_drawings_are_those_of_the_tool() -> None:
    import draw_ideas

    drawn = {path.stem: path.read_text() for path in (DOCS / "drawings").glob("*.svg")}
    assert drawn == {name: draw_ideas.svg(name) for name in draw_ideas.DRAWINGS}, "run `python tools/draw_ideas.py`"
    text = (DOCS / "how-it-works.md").read_text()
    assert set(re.findall(r"!\[[^\]]+\]\(drawings/(\w+)\.svg\)", text)) == set(drawn)


def test_links_lead_to_pages_of_the_site() -> None:
    linked = pytest.importorskip("site_pages", reason="mkdocs is not installed").linked
    text = "[a](../README.md#b) ![c](d.png) [e.md](e.md) [f](../benchmarks) [g](https://h.i) [j](#k)"
    assert linked(text, "docs") == "[a](overview.md#b) ![c](d.png) [e](e.md) f [g](https://h.i) [j](#k)"
    assert linked("![a](docs/b.png) [c](CONTRIBUTING.md) [d](examples/e)", ".") == "![a](b.png) [c](contributing.md) d"


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    """Builds in strict mode: all pages are in the navigation, links and anchors resolve, API names exist."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert pages >= {path.stem for path in DOCS.glob("*.md")} | {"overview", "contributing", "changes"}
    api = (tmp_path / "api.html").read_text()
    import hf_diffkv

    documented = set(re.findall(r'id="hf_diffkv(?:_\w+)?\.([\w.]+)"', api))
    names = {name for name in documented if "." not in name} | {name.rpartition(".")[2] for name in documented}
    assert {"hf_diffkv_serving.ray.generate", "hf_diffkv_serving.ray.app"} <= set(re.findall(r'id="([\w.]+)"', api))
    assert set(hf_diffkv.__all__) - {"plot", "ray", "training"} <= names and {"levels", "text", "quality"} <= names
    # nothing is fetched from other hosts
    assert not re.findall(
        r'(?:src|href)="(?:https?:)?//[^"]+\.(?:js|css|woff2?)"', (tmp_path / "index.html").read_text()
    )
