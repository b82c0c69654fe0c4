"""The page of `hf-diffkv demo` in a real browser, against generations made here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from browser import needs_browser
from demo_page import (
    NAMES,
    PHONE,
    PROMPT,
    ROOT,
    SETTINGS,
    assert_fits,
    assert_levels,
    assert_readable,
    assert_written,
    both_runs,
    coloured,
    generate,
    opened,
    prune,
    unfold,
)

FOLDER = ROOT / "examples" / "space"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Served by `make space`, with the Python that runs the tests in place of a virtual environment to set up."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    server = subprocess.Popen(
        ["make", "space", "MODEL=tiny-lm", "PAGE_READY=", f"BIN={Path(sys.executable).parent}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "GRADIO_SERVER_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                break
            except (URLError, TimeoutError):
                assert server.poll() is None, server.stdout.read()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    with opened(browser, address) as page:
        yield page


@pytest.mark.slow
def test_make_space_serves_the_page(address: str) -> None:
    with urlopen(f"{address}/config", timeout=60) as answer:
        config = json.load(answer)
    labels = {component["props"].get("label") for component in config["components"]}
    assert config["title"] == "DiffKV" and {"DynamicCache wrote", "DiffKV wrote"} <= labels


@needs_browser
def test_page_shows_both_runs_and_every_head(page: Any, runs: SimpleNamespace) -> None:
    assert page.locator("#prompt textarea").input_value() == PROMPT
    assert "tiny-lm" in page.locator("#model").inner_text()
    prune(page)
    generate(page, "Done:")
    assert_written(page, {"dense": runs.dense, "diffkv": runs.diffkv})
    page.locator("#figures .big").wait_for()
    memory = runs.cache.memory()
    shown = page.locator("#figures").inner_text()
    held = [f"{count / 1e6:,.2f} MB ({count / runs.dense_bytes:.1%})" for count in (memory.bytes, memory.payload_bytes)]
    assert all(part in shown for part in (f"{runs.dense_bytes / 1e6:,.2f} MB", *held))
    assert len(re.findall(r"\d+\.\d tokens/s", shown)) == 2
    assert "tokens are equal" in shown
    # the line ends with what both hold
    for name, count in (("DynamicCache", runs.dense_bytes), ("DiffKV", memory.bytes)):
        assert f"{name} {count / 1e6:,.2f} MB" in page.locator("#memory .legend").inner_text()
    assert not page.locator("#picture pre").is_visible()
    unfold(page)
    text = PROMPT + runs.diffkv[:-1]
    first = coloured(page, 0, 0)
    assert_levels(first, text, runs.cache.levels(0)[0, 0])
    assert page.locator("#overview button").count() == 6 * 2
    levels = runs.cache.levels(3)[0, 1]
    shares = (f"{name} {(levels == code).float().mean():.0%}" for code, name in NAMES.items())
    button = page.get_by_role("button", name="layer 3, KV head 1:")
    assert {*button.get_attribute("aria-label").split(": ")[1].split(", ")} == {*shares}
    button.click()
    second = coloured(page, 3, 1)
    assert_levels(second, text, levels)
    assert second != first
    page.locator("#overview button[aria-pressed=true][data-layer='3'][data-head='1']").wait_for()
    assert page.locator("#overview button[aria-pressed=true]").count() == 1
    assert "Done:" in page.locator("#status").inner_text()


@needs_browser
@pytest.mark.parametrize("width, scheme", [(PHONE, "dark"), (1280, "light")])
@pytest.mark.sampled(100)
def test_settings_and_what_they_cost(browser: Any, address: str, width: int, scheme: str) -> None:
    """One that breaks the text, then one that does not, on a phone and on a screen; nothing of the first stays."""
    from playwright.sync_api import expect

    with opened(browser, address, width, scheme) as page:
        for name in ("pruning", "balanced"):
            page.get_by_label(name, exact=True).check()
            said = SETTINGS[name].explanation.replace("`", "")
            page.locator("#explanation").get_by_text(said).wait_for()
            assert not page.get_by_label("number input for alpha_high").is_visible()
            expected = both_runs(PROMPT, SETTINGS[name].config)
            generate(page, "Done:")
            assert_written(page, {"dense": expected.dense, "diffkv": expected.diffkv})
            big = page.locator("#figures .big")
            expect(big).to_have_text(f"{expected.cache.memory().bytes / expected.dense_bytes:.0%} of the memory")
            assert f"setting {name};" in page.locator("#figures").inner_text()
            marked = page.locator("#difference del, #difference ins").all_inner_texts()
            assert bool(marked) == (expected.dense != expected.diffkv) == (name == "pruning")
            expect(page.locator("#overview button")).to_have_count(12 if name == "pruning" else 0)
            expect(page.locator("#overview .bits i.kept")).to_have_count(0 if name == "pruning" else 5 + 4)
            expect(page.locator("#coloured")).to_be_visible(visible=name == "pruning")
            assert_fits(page, width)
            if folder := os.environ.get("DEMO_SCREENSHOTS"):
                page.screenshot(path=Path(folder) / f"{name}-{scheme}-{width}.png", full_page=True)
            assert_readable(page)
        page.locator("#prompt textarea").fill("")
        generate(page, "The prompt is empty")
        assert_written(page, {"dense": "", "diffkv": ""})
        assert not page.locator("#figures .big, #picture pre, #overview button, #overview .bits").count()
        assert_readable(page)


@needs_browser
def test_bad_input_gives_a_message(page: Any) -> None:
    prompt = page.locator("#prompt textarea")
    prompt.fill(" \n")
    generate(page, "The prompt is empty")
    prompt.fill("a" * 4090)
    generate(page, "The prompt has 4,090 tokens and 32 are to be generated, but the model's limit is 4,096 in total")
    prompt.fill("abc")
    page.get_by_label("your own").check()
    page.get_by_label("number input for alpha_low").fill("3")
    page.get_by_label("number input for alpha_low").press("Tab")
    generate(page, "alpha_low=3.0 is above alpha_high=1.0")
    assert page.locator("#status [role=alert]").is_visible()
    assert page.locator("#diffkv textarea").input_value() == ""
    page.get_by_label("number input for alpha_low").fill("0")
    page.get_by_label("number input for alpha_low").press("Tab")
    generate(page, "Done: a prompt of 3 tokens")
    assert page.locator("#diffkv textarea").input_value() == page.locator("#dense textarea").input_value() != ""


def test_readme_carries_the_space_metadata() -> None:
    yaml = pytest.importorskip("yaml")
    metadata = yaml.safe_load((FOLDER / "README.md").read_text().split("---\n")[1])
    assert metadata["sdk"] == "gradio" and (FOLDER / metadata["app_file"]).is_file()
    assert {"title", "emoji", "colorFrom", "colorTo", "license"} <= metadata.keys()
