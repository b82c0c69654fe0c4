"""Actions on the demo's page, and expected values, for its tests."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from browser import WAIT_MS
from hf_diffkv_demo.generation import Generator
from hf_diffkv_demo.settings import settings_for
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

ROOT = Path(__file__).parents[3]
TINY_LM = ROOT / "examples" / "models" / "tiny-lm"
PROMPT = (ROOT / "examples" / "prompts" / "recall.txt").read_text().removesuffix("\n")
NEW_TOKENS = 32
SETTINGS = settings_for(AutoConfig.from_pretrained(TINY_LM))
# of a phone's screen, in pixels
PHONE, HEIGHT = 390, 844
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
NAMES = {0: "pruned", 1: "low", 2: "high", 3: "window"}


class Gate:
    """Lets the forwards of a model pass one by one, or all.

    Attributes:
        passed: number of forwards that have passed.
        thread: thread of the newest forward.
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


@contextmanager
def served(generator: Generator) -> Iterator[str]:
    """The address of a demo in this process."""
    from hf_diffkv_demo.page import build, launched

    page = build(generator)
    try:
        yield launched(page)
    finally:
        page.close()


@contextmanager
def opened(browser: Any, address: str, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """The demo's page as a visitor of its own sees it; whatever the console complains of fails the test."""
    context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.get_by_role("button", name="Generate").wait_for()
    yield page
    context.close()
    assert not complaints


def start(page: Any) -> None:
    """Clicks Generate, and notes whether the status has changed since: an earlier run's may say the same."""
    # found anew each time, as the page may make another element in its place
    page.evaluate(
        """() => {
            const said = () => document.querySelector('#status')?.textContent;
            const before = said();
            window.changed = false;
            const note = () => { window.changed ||= said() !== undefined && said() !== before };
            new MutationObserver(note).observe(document.body, {childList: true, characterData: true, subtree: true});
        }"""
    )
    page.get_by_role("button", name="Generate").click()


def await_status(page: Any, outcome: str) -> None:
    """Waits until the status has changed since `start` and says `outcome`."""
    page.wait_for_function(
        "said => window.changed && document.querySelector('#status').textContent.includes(said)", arg=outcome
    )


def generate(page: Any, outcome: str) -> None:
    start(page)
    await_status(page, outcome)


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


def unfold(page: Any) -> None:
    """Opens the coloured text, which begins folded."""
    page.get_by_role("button", name="The text coloured by level").click()


def coloured(page: Any, layer: int, head: int) -> list[tuple[str, str]]:
    """Waits for a head's coloured text and returns, for each part of it, the description and the text."""
    shown = page.locator(f'#picture pre[aria-label="layer {layer}, KV head {head}"]')
    shown.wait_for()
    parts = shown.locator(".level").evaluate_all("all => all.map(e => [e.title.split(';')[0], e.textContent])")
    return [(said, text.replace("↵\n", "\n")) for said, text in parts]


def assert_levels(parts: list[tuple[str, str]], text: str, levels: torch.Tensor) -> None:
    """Each part has the shares of its tokens, which are characters here.

    Args:
        levels: int8 [tokens].
    """
    assert "".join(part for _, part in parts) == text
    start = 0
    for said, part in parts:
        codes = levels[start : start + len(part)].tolist()
        shares = {name: codes.count(code) / len(codes) for code, name in NAMES.items() if code in codes}
        assert {*said.split(", ")} == {name if share == 1 else f"{name} {share:.0%}" for name, share in shares.items()}
        start += len(part)


@functools.cache
def both_runs(prompt: str, config: DiffKVConfig, new_tokens: int = NEW_TOKENS) -> SimpleNamespace:
    """Texts of a DynamicCache and of DiffKV (`dense`, `diffkv`), bytes of the one and the other itself."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY_LM), AutoTokenizer.from_pretrained(TINY_LM)
    inputs = tokenizer(prompt, return_tensors="pt")
    texts = []
    dense, compressed = DynamicCache(config=model.config), DiffKVCache(model.config, config)
    for cache in (dense, compressed):
        ids = model.generate(**inputs, **passing(cache), max_new_tokens=new_tokens, do_sample=False)
        texts.append(tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    dense_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
    return SimpleNamespace(dense=texts[0], diffkv=texts[1], dense_bytes=dense_bytes, cache=compressed)


# of every element that has a text of its own: the text, its colour, those behind it from the nearest on, its opacity
COLOURS = """root => [...root.querySelectorAll('*')].filter(
    e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
        const behind = [];
        let opacity = 1;
        for (let at = e; at; at = at.parentElement) {
            behind.push(getComputedStyle(at).backgroundColor);
            opacity *= Number(getComputedStyle(at).opacity);
        }
        return [e.textContent.slice(0, 40), getComputedStyle(e).color, behind, opacity];
    })"""


def contrast(colour: str, behind: list[str], opacity: float) -> float:
    """WCAG 2.1's ratio of a text and the first colour behind it that is not clear."""

    def channels(text: str) -> list[float]:
        numbers = [float(number) for number in re.findall(r"[\d.]+", text)]
        return [*(number / 255 for number in numbers[:3]), *(numbers[3:] or [1.0])]

    def luminance(values: list[float]) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = next(channels(one) for one in behind if channels(one)[3] > 0.99)[:3]
    ink = [opacity * a + (1 - opacity) * b for a, b in zip(channels(colour)[:3], paper)]
    low, high = sorted((luminance(ink), luminance(paper)))
    return (high + 0.05) / (low + 0.05)


def assert_fits(page: Any, width: int) -> None:
    """Nothing stands beyond the side, and on a phone all of it takes three screens at most."""
    size = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert size[0] <= width and (width > PHONE or size[1] <= 3 * HEIGHT)


def assert_readable(page: Any) -> None:
    """All that the page says has the contrast that WCAG 2.1 asks of texts (AA)."""
    parts = ("model", "explanation", "status", "memory", "figures", "difference", "overview", "picture")
    # what is folded is not there
    shown = [part for part in (page.locator(f"#{name}") for name in parts) if part.count()]
    texts = [text for part in shown for text in part.evaluate(COLOURS)]
    assert texts and not [text for text in texts if contrast(*text[1:]) < 4.5]
