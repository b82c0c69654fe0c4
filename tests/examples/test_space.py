"""The demo in a real browser, started by its one command, against generations made here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "space"
TINY_LM = ROOT / "examples" / "models" / "tiny-lm"
PROMPT = (ROOT / "examples" / "prompts" / "recall.txt").read_text().removesuffix("\n")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEW_TOKENS = 32
WAIT_MS = 120_000
NAMES = {0: "pruned", 1: "low", 2: "high", 3: "window"}

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


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
        ["make", "space", "READY=", f"BIN={Path(sys.executable).parent}"],
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str) -> Iterator[Any]:
    """The demo's page; whatever the console complains of fails the test."""
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.get_by_role("button", name="Generate").wait_for()
    yield page
    page.close()
    assert not complaints


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    with opened(browser, address) as page:
        yield page


def generate(page: Any, outcome: str) -> None:
    """Until the status has changed and then says `outcome`: an earlier run's may stand there and say the same."""
    page.locator("#status").evaluate(
        """status => {
            const before = status.textContent;
            window.changed = false;
            const note = () => { window.changed ||= status.textContent !== before };
            new MutationObserver(note).observe(status, {childList: true, characterData: true, subtree: true});
        }"""
    )
    page.get_by_role("button", name="Generate").click()
    page.wait_for_function(
        "said => window.changed && document.querySelector('#status').textContent.includes(said)", arg=outcome
    )


def prune(page: Any) -> None:
    """The thresholds of `runs`."""
    page.get_by_label("your own").check()
    page.get_by_label("number input for alpha_high").fill("2")
    page.get_by_label("number input for alpha_low").fill("0.05")
    page.get_by_label("number input for alpha_low").press("Tab")


def assert_written(page: Any, expected: dict[str, str]) -> None:
    from playwright.sync_api import expect

    for name, text in expected.items():
        expect(page.locator(f"#{name} textarea")).to_have_value(text)


def written(page: Any) -> dict[str, str]:
    return {name: page.locator(f"#{name} textarea").input_value() for name in ("dense", "diffkv")}


def choose(page: Any, label: str, value: int) -> None:
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=str(value), exact=True).click()


def coloured(page: Any) -> list[tuple[str, str]]:
    """Level and text of every coloured part, from the page."""
    parts = page.locator("#picture pre .level").evaluate_all("all => all.map(e => [e.classList[1], e.textContent])")
    return [(level, text.replace("↵\n", "\n")) for level, text in parts]


def expected_levels(cache: DiffKVCache, layer: int, head: int) -> list[str]:
    return [NAMES[code] for code in cache.levels(layer)[0, head].tolist()]


def per_character(parts: list[tuple[str, str]]) -> list[str]:
    return [level for level, text in parts for _ in text]


@pytest.fixture(scope="module")
def runs() -> tuple[str, int, str, DiffKVCache]:
    """Text and bytes of a DynamicCache, text and cache of DiffKV; alpha_low prunes some tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY_LM), AutoTokenizer.from_pretrained(TINY_LM)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    texts = []
    dense, compressed = DynamicCache(config=model.config), DiffKVCache(model.config, alpha_high=2.0, alpha_low=0.05)
    for cache in (dense, compressed):
        ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    dense_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
    return texts[0], dense_bytes, texts[1], compressed


@pytest.mark.slow
def test_make_space_serves_the_page(address: str) -> None:
    with urlopen(f"{address}/config", timeout=60) as answer:
        config = json.load(answer)
    labels = {component["props"].get("label") for component in config["components"]}
    assert config["title"] == "DiffKV" and {"DynamicCache wrote", "DiffKV wrote"} <= labels


@needs_browser
def test_page_shows_both_runs_and_every_level(page: Any, runs: tuple[str, int, str, DiffKVCache]) -> None:
    dense_text, dense_bytes, text, cache = runs
    assert page.locator("#prompt textarea").input_value() == PROMPT
    prune(page)
    generate(page, "Done:")
    assert_written(page, {"dense": dense_text, "diffkv": text})
    memory = cache.memory()
    shown = page.locator("#figures").inner_text()
    for held in (dense_bytes, memory.bytes, memory.payload_bytes):
        assert f"{held / 1e6:,.2f} MB ({held / dense_bytes:.1%})" in shown
    assert len(re.findall(r"\d+\.\d tokens/s", shown)) == 2
    assert "tokens are equal" in shown
    page.locator("#picture pre").wait_for()
    first = coloured(page)
    assert "".join(text for _, text in first) == PROMPT + text[:-1]
    assert per_character(first) == expected_levels(cache, 0, 0)
    assert {level for level, _ in first} == set(NAMES.values())
    for label, value, layer, head in (("layer", 3, 3, 0), ("KV head", 1, 3, 1)):
        choose(page, label, value)
        page.get_by_label(f"layer {layer}, KV head {head}", exact=True).wait_for()
        assert per_character(coloured(page)) == expected_levels(cache, layer, head) != per_character(first)
    assert "Done:" in page.locator("#status").inner_text()


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_settings_and_what_they_cost(page: Any, generation: Any, width: int) -> None:
    """One that breaks the text, then one that does not, on a phone and on a screen; nothing of the first stays."""
    from settings import SETTINGS

    page.set_viewport_size({"width": width, "height": 900})
    generator = generation.Generator(str(TINY_LM))
    for name in ("brutal", "default"):
        page.get_by_label(name, exact=True).check()
        said = SETTINGS[name].explanation.replace("`", "")
        page.locator("#explanation").get_by_text(said).wait_for()
        assert not page.get_by_label("number input for alpha_high").is_visible()
        *_, (dense, compressed, found) = generator.run(generator.prepare(PROMPT, NEW_TOKENS, SETTINGS[name].config))
        generate(page, "Done:")
        assert_written(page, {"dense": dense.text, "diffkv": compressed.text})
        big = page.locator("#figures .big").inner_text()
        assert big == f"{compressed.cache_bytes / dense.cache_bytes:.0%} of the memory"
        marked = page.locator("#difference del, #difference ins").all_inner_texts()
        assert bool(marked) == (dense.text != compressed.text) == (name == "brutal")
        page.locator("#picture pre").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("DEMO_SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"{name}-{width}.png", full_page=True)
    page.locator("#prompt textarea").fill("")
    generate(page, "The prompt is empty")
    assert_written(page, {"dense": "", "diffkv": ""})
    assert not page.locator("#figures .big").count()
    assert not page.locator("#picture pre").count()


@pytest.fixture(scope="module")
def generation() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    import generation

    yield generation
    sys.path.remove(str(FOLDER))


class Gate:
    """Lets the forwards of a model pass one by one, or all.

    Attributes:
        passed: how many have passed.
        thread: that of the newest.
    """

    def __init__(self, model: Any) -> None:
        self.passed, self.thread = 0, threading.current_thread()
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()
        model.register_forward_pre_hook(self._wait)

    def _wait(self, *args: Any) -> None:
        self.thread = threading.current_thread()
        if not self._is_open.is_set():
            self._permits.acquire()
        self.passed += 1

    def let_pass(self, count: int) -> None:
        self._permits.release(count)

    def open(self) -> None:
        self._is_open.set()
        self._permits.release(10_000)


@pytest.fixture
def gated(generation: Any) -> Iterator[tuple[str, Gate]]:
    """The address of a demo in this process, and the gate before its model."""
    from app import build

    generator = generation.Generator(str(TINY_LM))
    gate = Gate(generator.model)
    page = build(generator, PROMPT)
    try:
        yield page.launch(prevent_thread_lock=True, quiet=True)[1], gate
    finally:
        gate.open()
        page.close()


@needs_browser
@pytest.mark.parametrize("stopped", ["dense", "diffkv"])
@pytest.mark.slow
def test_stop(browser: Any, gated: tuple[str, Gate], stopped: str, runs: tuple[str, int, str, DiffKVCache]) -> None:
    """Partial texts stay, nothing is computed any more, and the next run is right."""
    address, gate = gated
    expected = {"dense": runs[0], "diffkv": runs[2]}
    with opened(browser, address) as page:
        prune(page)
        gate.let_pass(10 if stopped == "dense" else NEW_TOKENS + 10)
        page.get_by_role("button", name="Generate").click()
        running = "DynamicCache" if stopped == "dense" else "DiffKV"
        page.locator("#status").get_by_text(f"{running} is generating").wait_for()
        page.get_by_role("button", name="Stop").click()
        # steps in which Stop is noticed, far fewer than the text has left
        while gate.thread.is_alive():
            page.wait_for_timeout(300)
            gate.let_pass(1)
        stopped_at = gate.passed
        assert stopped_at < (NEW_TOKENS if stopped == "dense" else 2 * NEW_TOKENS)
        page.locator("#status").get_by_text("Stopped.").wait_for()
        partial = written(page)
        assert partial[stopped] and expected[stopped].startswith(partial[stopped])
        assert partial[stopped] != expected[stopped]
        assert partial["dense"] == expected["dense"] if stopped == "diffkv" else partial["diffkv"] == ""
        gate.open()
        choose(page, "KV head", 1)
        assert gate.passed == stopped_at and written(page) == partial
        assert page.locator("#status").inner_text() == "Stopped."
        generate(page, "Done:")
        assert_written(page, expected)
        assert gate.passed == stopped_at + 2 * NEW_TOKENS


@needs_browser
def test_bad_input_gives_a_message(page: Any) -> None:
    prompt = page.locator("#prompt textarea")
    prompt.fill(" \n")
    generate(page, "The prompt is empty")
    prompt.fill("a" * 4090)
    generate(page, "The prompt has 4,090 tokens and 32 are to be generated, but the model takes 4,096 together")
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


def test_closing_a_run_stops_the_model(generation: Any) -> None:
    generator = generation.Generator(str(TINY_LM))
    task = generator.prepare("x" * 200, 3000, DiffKVConfig())
    cache = DiffKVCache(generator.model.config, DiffKVConfig())
    stream = generation.stream_tokens(generator.model, task, cache)
    next(stream)
    stream.close()
    assert cache.get_seq_length() < 3000


@pytest.mark.parametrize("name", ["no/such folder", str(FOLDER)])
def test_model_that_cannot_be_used_is_named(generation: Any, name: str) -> None:
    with pytest.raises(generation.InputError, match=f"cannot use the model {re.escape(name)}"):
        generation.Generator(name)


def test_readme_carries_the_space_metadata() -> None:
    yaml = pytest.importorskip("yaml")
    metadata = yaml.safe_load((FOLDER / "README.md").read_text().split("---\n")[1])
    assert metadata["sdk"] == "gradio" and (FOLDER / metadata["app_file"]).is_file()
    assert {"title", "emoji", "colorFrom", "colorTo", "license"} <= metadata.keys()
