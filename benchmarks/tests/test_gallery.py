"""The gallery of methods: what the generator makes of the committed results, and how its page behaves in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import launched, needs_browser

from hf_diffkv.evaluation.errors import EvaluationError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "quality"
PAGE = ROOT / "docs" / "gallery.html"


@pytest.fixture
def gallery(script) -> Any:
    return script("gallery")


def rows(page: str) -> list[dict[str, str]]:
    return [dict(re.findall(r'data-(\w+)="([^"]*)"', row)) for row in re.findall(r"<tr (data-[^>]*)>", page)]


def test_the_page_is_what_the_results_give(gallery: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == gallery.page(RESULTS), "run `python benchmarks/quality/gallery.py`"
    # nothing is fetched
    assert not re.findall(r"(?:src|href)=|url\(|@import|fetch\(", page)
    found = rows(page)
    keys = [(row["model"], row["task"], row["method"]) for row in found]
    assert len(set(keys)) == len(keys)
    assert {row["family"] for row in found} == {"hf-diffkv", "Transformers", "kvpress", "llama.cpp", "other policies"}


def test_figures_are_those_of_the_records(gallery: Any) -> None:
    records = [json.loads(line) for line in (RESULTS / "smollm2" / "heads" / "records.jsonl").read_text().splitlines()]
    mine = [record for record in records if (record["method"], record["task"]) == ("diffkv:small", "dictionary")]
    (row,) = (row for row in rows(PAGE.read_text()) if (row["model"], row["task"], row["method"]) == (
        "smollm2", "dictionary", "diffkv:small"))  # fmt: skip
    ratio = sum(record["bytes"] for record in mine) / sum(record["dense_bytes"] for record in mine)
    assert float(row["bytes"]) == pytest.approx(100 * ratio, abs=0.005)
    for name, scale in (("right", 100), ("kl", 1)):
        total, weight = (sum(record["metrics"][name][part] for record in mine) for part in (0, 1))
        assert float(row[name]) == pytest.approx(scale * total / weight, rel=1e-3)


def test_presets_of_older_studies_have_the_name_of_today(gallery: Any) -> None:
    assert gallery._today("diffkv:small", "presets") == "diffkv:small+head_precisions=null"
    assert gallery._today("diffkv:small", "heads") == "diffkv:small"
    assert gallery._today("diffkv:small+K4V2", "presets") == "diffkv:small+K4V2"


def test_a_submitted_record_appears(gallery: Any, tmp_path: Path) -> None:
    folder = tmp_path / "submitted"
    folder.mkdir()
    entry = {
        **{"method": "<mine>:3", "task": "text", "documents": 4, "digest": "0123", "bytes": 25, "dense_bytes": 100},
        **{"payload_bytes": None, "simulated": False},
        "metrics": {"kl": {"total": 2.0, "weight": 400.0, "low": 0.004, "high": 0.006}},
        "environment": {"python": "3.11", "torch": "2", "transformers": "5", "device": "a GPU", "commit": None},
    }
    run = {"format": 1, "model": "some/model", "dtype": "bfloat16", "seed": 0, "sample": False, "max_new_tokens": None}
    (folder / "ada.json").write_text(json.dumps({**run, "entries": [entry]}))
    page = gallery.page(tmp_path)
    (row,) = rows(page)
    assert row == {
        **{"model": "some/model", "task": "text", "family": "other policies", "bytes": "25.00", "right": ""},
        **{"kl": "0.005000", "method": "&lt;mine&gt;:3 (submitted: ada)"},
    }
    assert "a GPU" in page and "<option>some/model</option>" in page
    (folder / "ada.json").write_text(json.dumps({**run, "entries": [{**entry, "bytes": 0}]}))
    with pytest.raises(EvaluationError, match=r"ada.json is no record of an evaluation: entries\[0\].bytes=0 must be"):
        gallery.page(tmp_path)


@needs_browser
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1280, "light")])
@pytest.mark.sampled(100)
def test_the_page_in_a_browser(width: int, scheme: str) -> None:
    """Opens the page from a file, filters, sorts and draws, and checks that nothing extends past the window's edge."""
    with launched() as browser:
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        complaints: list[str] = []
        page.on("console", lambda line: complaints.append(line.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(PAGE.as_uri())
        everything = rows(PAGE.read_text())

        def shown(name: str) -> list[str]:
            return page.locator("tbody tr:visible").evaluate_all("(all, name) => all.map(e => e.dataset[name])", name)

        def expected(**wanted: str) -> list[dict[str, str]]:
            return [row for row in everything if all(row[name] == value for name, value in wanted.items())]

        first = expected(model="smollm2", task="dictionary")
        assert shown("method") == [row["method"] for row in first]
        assert page.locator("#plot circle").count() == len(first)
        page.get_by_role("button", name="bytes").click()
        shares = list(map(float, shown("bytes")))
        assert shares == sorted(shares, reverse=True) and len(shares) == len(first)
        page.get_by_label("kvpress").uncheck()
        assert "kvpress" not in shown("family") and len(shown("family")) == len(first) - len(
            expected(model="smollm2", task="dictionary", family="kvpress")
        )
        page.get_by_label("kvpress").check()
        page.get_by_label("method has").fill("quanto:4")
        assert shown("method") == ["quanto:4"]
        page.locator("#plot circle").click()
        (row,) = expected(model="smollm2", task="dictionary", method="quanto:4")
        said = page.locator("#said").inner_text()
        assert said.startswith(f"quanto:4, dictionary: {float(row['bytes']):.1f} % of the bytes")
        page.get_by_label("method has").fill("")
        page.get_by_label("task").select_option("text")
        # a text has no answers, so the plot shows KL, without the dense cache
        assert page.get_by_label("plot").input_value() == "kl"
        assert page.locator("#plot circle").count() == len(expected(model="smollm2", task="text")) - 1
        page.get_by_label("model").select_option("gemma3-270m")
        assert set(shown("model")) == {"gemma3-270m"}
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
    assert not complaints
