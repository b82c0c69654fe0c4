"""A budget on the page: the line that fills it and the heads that are precise still, against the cache's reports."""

from __future__ import annotations

import re

import pytest
from hf_diffkv_demo.generation import Entered, Generator, InputError, Result
from hf_diffkv_demo.heads import overview
from hf_diffkv_demo.memory_line import memory_line
from hf_diffkv_demo.page import FREE_PROMPT, entered
from hf_diffkv_demo.settings import OWN

from hf_diffkv.running.models import TINY_LM

PROMPT = (TINY_LM.parents[1] / "prompts" / "recall.txt").read_text()
NEW = 12


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(str(TINY_LM))


def result_of(generator: Generator, max_bytes: int | str) -> Result:
    generator.limit_to(max_bytes)
    balanced = Entered(PROMPT, NEW, generator.settings["balanced"].config, "balanced")
    *_, (_, _, found) = generator.run(generator.prepare(balanced))
    assert found is not None
    return found


def shares(html: str) -> list[int]:
    """Percents of the layers' heads, as the picture says them."""
    return [int(share) for share in re.findall(r'aria-label="layer \d+: (\d+)% of heads at K8V8"', html)]


def test_the_page_shows_a_budget_filling_and_each_layer_s_rung(generator: Generator) -> None:
    ample = result_of(generator, 10_000_000)
    html = overview(ample, (0, 0))
    layers = len(ample.memory.layers)
    assert shares(html) == [100] * layers and "K8V8: 100% of heads" in html and "fewer bits: 0%" in html
    tight = result_of(generator, int(0.85 * ample.memory.bytes))
    memory, html = tight.memory, overview(tight, (0, 0))
    counts = [sum(name == "K8V8" for name in layer.precisions) for layer in memory.layers]
    heads = len(memory.layers[0].precisions)
    assert shares(html) == [round(100 * count / heads) for count in counts]
    assert 0 < sum(counts) < layers * heads
    assert f"{memory.filled:.0%} of the budget is in use" in html and f"{memory.room:,} more tokens fit" in html
    assert f"K6V5: {1 - sum(counts) / (layers * heads):.0%}" in html
    # a line where the budget is, in the same units as the others
    drawn = memory_line(tight.dense, tight.compressed, len(tight.pieces) + 1)
    top = float(re.findall(r'<span style="top:0%">([\d.]+)</span>', drawn)[0]) * 1e6
    (y,) = re.findall(r'<line class="budget"[^>]* y1="([\d.]+)"', drawn)
    assert float(y) == pytest.approx(100 * (1 - memory.max_bytes / top), abs=0.01)
    assert (
        f"budget {memory.max_bytes / 1e6:,.2f} MB, {tight.compressed.held[-1][1] / memory.max_bytes:.0%} taken" in drawn
    )
    assert tight.compressed.held[-1][1] <= memory.max_bytes


def test_a_budget_may_be_a_share(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_diffkv.cache.free_memory.free_bytes", lambda device: 8_000_000)
    found = result_of(generator, "50%")
    assert found.memory.max_bytes == found.compressed.max_bytes == 4_000_000


def test_a_visitors_own_setting_has_the_budget(generator: Generator) -> None:
    generator.limit_to(3_000_000)
    own = entered(generator.settings, FREE_PROMPT, "", "", "", PROMPT[:400], NEW, OWN, 1.0, 0.0, "K8V4", "K4V2", 64)
    *_, (_, _, found) = generator.run(generator.prepare(own))
    assert found.memory.max_bytes == found.compressed.max_bytes == 3_000_000


def test_without_a_budget_nothing_of_it_is_shown(generator: Generator) -> None:
    generator.limit_to(None)
    balanced = Entered(PROMPT[:400], NEW, generator.settings["balanced"].config, "balanced")
    *_, (_, _, found) = generator.run(generator.prepare(balanced))
    assert found.compressed.rungs == () and "Which heads are precise" not in overview(found, (0, 0))
    assert "budget" not in memory_line(found.dense, found.compressed, 100)


def test_what_does_not_fit_is_told(generator: Generator) -> None:
    with pytest.raises(InputError, match="max_bytes=100000"):
        result_of(generator, 100_000)
