"""Progress that the page shows during a run, and the picture of each setting."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browser import needs_browser
from demo_page import (
    NEW_TOKENS,
    PHONE,
    PROMPT,
    SETTINGS,
    TEMPLATE,
    Gate,
    assert_fits,
    assert_readable,
    await_status,
    both_runs,
    generate,
    opened,
    served,
    start,
    written,
)
from hf_diffkv_demo.generation import CacheRun, Generator
from hf_diffkv_demo.memory_line import memory_line
from hf_diffkv_demo.settings import Setting

from hf_diffkv import DiffKVConfig

LAYERS, HEADS = 6, 2
# that are done where the gate stands
DONE = 3


def held(page: Any) -> dict[str, float]:
    """Megabytes of both caches, as the page says them."""
    said = page.locator("#memory .legend").inner_text()
    return {name: float(count) for name, count in re.findall(r"(\w+) ([\d.]+) MB", said)}


def points(page: Any, cache: str) -> list[tuple[float, float]]:
    """Returns the points of a line: tokens, and bytes as a share of the drawing's height from above."""
    found = page.locator(f'#memory polyline[data-cache="{cache}"]').get_attribute("points")
    return [tuple(map(float, point.split(","))) for point in found.split()]


@needs_browser
def test_progress_answers_and_memory_while_they_come(browser: Any) -> None:
    """The model stands still in the middle of a forward, twice for each cache."""
    generator = Generator("tiny-lm")
    gate = Gate(generator.model.get_decoder().layers[DONE])
    tokens, expected = len(PROMPT), both_runs(PROMPT, SETTINGS["balanced"].config)
    # in a layer, in megabytes
    token = expected.dense_bytes / (tokens + NEW_TOKENS - 1) / LAYERS / 1e6
    with served(generator) as address, opened(browser, address) as page:
        try:
            start(page)
            await_status(page, f"DynamicCache reads the prompt of {tokens:,} tokens: {DONE} of {LAYERS} layers done.")
            assert page.locator("#status .bar i").get_attribute("style") == "width:50.0%"
            assert held(page) == {"DynamicCache": round(DONE * tokens * token, 2), "DiffKV": 0}
            reading = points(page, "DynamicCache")
            assert len(reading) > 1 and reading == sorted(reading, key=lambda point: (point[0], -point[1]))
            assert written(page) == {"dense": "", "diffkv": ""}
            gate.let_pass(4)
            await_status(page, f"DynamicCache is generating: 4 of {NEW_TOKENS} tokens.")
            partial = written(page)
            assert partial["dense"] and expected.dense.startswith(partial["dense"]) and not partial["diffkv"]
            assert partial["dense"] != expected.dense
            # the fourth token is in the cache with the next one; the lines above the gate have that
            assert held(page)["DynamicCache"] == round(LAYERS * (tokens + 3) * token, 2)
            assert points(page, "DynamicCache")[-1][0] > reading[-1][0]
            gate.let_pass(NEW_TOKENS - 4)
            await_status(page, f"DiffKV reads the prompt of {tokens:,} tokens: {DONE} of {LAYERS} layers done.")
            half = held(page)
            assert half["DynamicCache"] == round(expected.dense_bytes / 1e6, 2)
            gate.let_pass(4)
            await_status(page, f"DiffKV is generating: 4 of {NEW_TOKENS} tokens.")
            partial = written(page)
            assert partial["dense"] == expected.dense and partial["diffkv"]
            assert expected.diffkv.startswith(partial["diffkv"]) and partial["diffkv"] != expected.diffkv
            assert half["DiffKV"] < held(page)["DiffKV"] < half["DynamicCache"]
            gate.open()
            await_status(page, "Done:")
            assert held(page)["DiffKV"] == round(expected.cache.memory().bytes / 1e6, 2)
            assert len(points(page, "DiffKV")) > 2 and not page.locator("#status .bar").count()
        finally:
            gate.open()


@needs_browser
@pytest.mark.slow
def test_the_bits_of_every_head_on_a_phone(browser: Any) -> None:
    """Shows heads of a chat whose long document stays folded. One precision for all heads has a single picture."""
    generator = Generator("tiny-lm")
    generator.tokenizer.chat_template, generator.chats, generator.limit = TEMPLATE, True, None
    bits = [["K8V4", "K4V2"]] * (LAYERS - 1) + [["K4V2", "K4V2"]]
    generator.settings["small"] = Setting(DiffKVConfig(head_precisions=bits), "measured")
    generator.settings["quality"] = Setting(DiffKVConfig(high="K16V8", low="K16V8", alpha_high=0), "wide")
    with served(generator) as address, opened(browser, address, PHONE, "dark") as page:
        for name in ("small", "quality"):
            page.get_by_label(name, exact=True).check()
            page.locator("#explanation").get_by_text(generator.settings[name].explanation).wait_for()
            generate(page, "Done:")
            # the picture before it may still be there
            page.locator("#overview .bits" if name == "quality" else "#overview .heads").first.wait_for()
            assert not page.locator("#document textarea").is_visible()
            assert not page.locator("#coloured, #overview button").count()
            assert_fits(page, PHONE)
            assert_readable(page)
            cells = page.locator("#overview .heads i")
            if name == "quality":
                assert not cells.count()
                labels = page.locator("#overview .bits").evaluate_all("all => all.map(e => e.ariaLabel)")
                assert labels == ["key: 16 of 16 bits", "value: 8 of 16 bits"]
                continue
            titles = cells.evaluate_all("all => all.map(e => e.title)")
            assert titles == [
                f"layer {layer}, KV head {head}: {bits[layer][head]}"
                for layer in range(LAYERS)
                for head in range(HEADS)
            ]
            assert "K4V2: 7 heads" in page.locator("#overview .legend").inner_text()
            colours = cells.evaluate_all("all => all.map(e => e.style.backgroundColor)")
            assert len(set(colours)) == 2 and colours[1] == colours[-1] != colours[0]


def test_the_lines_have_one_scale() -> None:
    """A dense cache of 2 bytes a token that has come to the middle, and another of half of that at the end."""
    dense, compressed = CacheRun(held=[(0.0, 0), (50.0, 100)]), CacheRun(held=[(0.0, 0), (100.0, 100)])
    shown = memory_line(dense, compressed, last_token=100)
    assert 'data-cache="DynamicCache" points="0.0,100.00 500.0,50.00"' in shown
    assert 'data-cache="DiffKV" points="0.0,100.00 1000.0,50.00"' in shown
    long = CacheRun(held=[(float(token), token) for token in range(5001)])
    assert 100 < memory_line(long, CacheRun(), 5000).count(",", 0) < 500
