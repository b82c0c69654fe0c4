"""The demo in this process: visitors who stop, wait and chat, and the models it runs on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
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
    assert_levels,
    assert_written,
    await_status,
    both_runs,
    coloured,
    generate,
    opened,
    prune,
    served,
    start,
    unfold,
    written,
)
from hf_diffkv_demo import generation, streaming
from hf_diffkv_demo.generation import Entered, Generator, InputError

from hf_diffkv import DiffKVCache, DiffKVConfig


@pytest.fixture
def gated() -> Iterator[tuple[str, Gate]]:
    """The address of a demo, and the gate before its model."""
    generator = Generator("tiny-lm")
    gate = Gate(generator.model)
    with served(generator) as address:
        yield address, gate
        gate.open()


@needs_browser
@pytest.mark.parametrize("stopped", ["dense", "diffkv"])
@pytest.mark.slow
def test_stop(browser: Any, gated: tuple[str, Gate], stopped: str, runs: SimpleNamespace) -> None:
    """Partial texts stay, nothing is computed any more, and the next run is right."""
    address, gate = gated
    expected = {"dense": runs.dense, "diffkv": runs.diffkv}
    with opened(browser, address) as page:
        prune(page)
        gate.let_pass(10 if stopped == "dense" else NEW_TOKENS + 10)
        start(page)
        await_status(page, ("DynamicCache" if stopped == "dense" else "DiffKV") + " is generating")
        if stopped == "diffkv":
            page.wait_for_function("document.querySelector('#diffkv textarea').value")
        page.get_by_role("button", name="Stop").click()
        await_status(page, "Stopping ...")
        # steps in which Stop is noticed, far fewer than the text has left
        while gate.thread.is_alive():
            page.wait_for_timeout(300)
            gate.let_pass(1)
        stopped_at = gate.passed
        assert stopped_at < (NEW_TOKENS if stopped == "dense" else 2 * NEW_TOKENS)
        await_status(page, "Stopped.")
        partial = written(page)
        assert partial[stopped] and expected[stopped].startswith(partial[stopped])
        assert partial[stopped] != expected[stopped]
        assert partial["dense"] == expected["dense"] if stopped == "diffkv" else partial["diffkv"] == ""
        assert not page.locator("#figures .big, #picture pre, #overview button").count()
        gate.open()
        assert gate.passed == stopped_at and written(page) == partial
        generate(page, "Done:")
        assert_written(page, expected)
        assert gate.passed == stopped_at + 2 * NEW_TOKENS


@needs_browser
@pytest.mark.slow
def test_visitors_wait_for_each_other_and_get_their_own(browser: Any, gated: tuple[str, Gate]) -> None:
    """Two are served, a third has had enough while it waits."""
    address, gate = gated
    prompts = [f"{PROMPT[:400]}\n?{key}=" for key in ("red", "oak")]
    expected = [both_runs(prompt, SETTINGS["pruning"].config) for prompt in prompts]
    assert expected[0].diffkv != expected[1].diffkv
    with ExitStack() as stack:
        pages = [stack.enter_context(opened(browser, address)) for _ in range(3)]
        for waiting, page in enumerate(pages):
            page.locator("#prompt textarea").fill(prompts[waiting % 2])
            page.get_by_label("pruning", exact=True).check()
            page.locator("#explanation").get_by_text("Tokens that get less").wait_for()
            start(page)
            await_status(page, f"Waiting for the model: {waiting} before you." if waiting else "reads the prompt")
        pages[2].get_by_role("button", name="Stop").click()
        await_status(pages[2], "Stopped.")
        assert not gate.passed
        gate.let_pass(2)
        await_status(pages[0], "DynamicCache is generating")
        assert written(pages[1]) == {"dense": "", "diffkv": ""}
        gate.open()
        for page, prompt, own in zip(pages, prompts, expected):
            await_status(page, "Done:")
            assert_written(page, {"dense": own.dense, "diffkv": own.diffkv})
            unfold(page)
            assert_levels(coloured(page, 0, 0), prompt + own.diffkv[:-1], own.cache.levels(0)[0, 0])
        assert written(pages[2]) == {"dense": "", "diffkv": ""}
        assert gate.passed == 2 * 2 * NEW_TOKENS


@needs_browser
def test_chat_puts_the_fields_into_the_template(browser: Any) -> None:
    generator = Generator("tiny-lm")
    generator.tokenizer.chat_template, generator.chats = TEMPLATE, True
    with served(generator) as address, opened(browser, address) as page:
        from playwright.sync_api import expect

        page.get_by_role("button", name="Who was the last keeper?").click()
        expect(page.locator("#question textarea")).to_have_value("Who was the last keeper?")
        assert not page.locator("#document textarea").is_visible()
        page.get_by_role("button", name="Document and system prompt").click()
        assert "Agnes Morrow" in page.locator("#document textarea").input_value()
        page.locator("#document textarea").fill("@red=3160")
        page.locator("#system textarea").fill("Be brief.")
        generate(page, "Done:")
        text = "[system]\nBe brief.\n[user]\n@red=3160\n\nWho was the last keeper?\n[assistant]\n"
        expected = both_runs(text, SETTINGS["balanced"].config)
        assert_written(page, {"dense": expected.dense, "diffkv": expected.diffkv})
        page.get_by_label("free prompt").check()
        page.get_by_role("button", name="Once upon a time").click()
        expect(page.locator("#prompt textarea")).to_have_value("Once upon a time")
        assert not page.locator("#document textarea").is_visible()
        generate(page, "Done: a prompt of 16 tokens")
        expected = both_runs("Once upon a time", SETTINGS["balanced"].config)
        assert_written(page, {"dense": expected.dense, "diffkv": expected.diffkv})


def test_closing_a_run_stops_the_model() -> None:
    generator = Generator("tiny-lm")
    task = generator.prepare(Entered("x" * 200, 3000, DiffKVConfig(alpha_high=1.0), "own"))
    cache = DiffKVCache(generator.model.config, DiffKVConfig(alpha_high=1.0))
    stream = streaming.stream_steps(generator.model, task.ids, cache, task.max_new_tokens, lambda: 0)
    next(stream)
    stream.close()
    assert cache.get_seq_length() < 3000


@pytest.mark.parametrize("name", ["no/such folder", str(Path(__file__).parent)])
def test_model_that_cannot_be_used_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"cannot use the model {re.escape(name)}"):
        Generator(name)


def test_a_chat_template_that_fails_is_explained() -> None:
    generator = Generator("tiny-lm")
    generator.tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(InputError, match="The chat template cannot be used: no system message"):
        generator.prepare(Entered("a", 1, DiffKVConfig(), "own", chat=True, system="b"))


@pytest.mark.parametrize("texts", [{"text": "a\ud83d"}, {"text": "a", "system": "\ude00"}], ids=["text", "system"])
def test_half_a_character_is_explained(texts: dict[str, str]) -> None:
    with pytest.raises(InputError, match="The text has half a character"):
        Generator("tiny-lm").prepare(Entered(max_new_tokens=1, config=DiffKVConfig(), setting="own", **texts))


def test_the_bundled_model_stands_in_for_the_default_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resolve = generation.resolve_model
    monkeypatch.setattr(generation, "resolve_model", lambda name: str(tmp_path) if name == "smollm2" else resolve(name))
    generator, note = generation.load(None)
    assert generator.title == "tiny-lm"
    assert note.startswith("HuggingFaceTB/SmolLM2-135M-Instruct is not available here; this is tiny-lm")
    monkeypatch.setattr(generation, "resolve_model", lambda name: str(tmp_path))
    with pytest.raises(InputError, match="give --model a folder or a Hub id"):
        generation.load(None)


@needs_browser
@pytest.mark.slow
def test_a_real_model_is_the_default_and_chats(browser: Any, smollm2: Path) -> None:
    """A document of two sentences, of which the model is asked."""
    generator, note = generation.load(None)
    assert generator.title == "HuggingFaceTB/SmolLM2-135M-Instruct" and not note
    document, question = "Anna has a red boat. Tom has a green car.", "What does Tom have?"
    tokenizer = generator.tokenizer
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = generator.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    answer = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    with served(generator) as address, opened(browser, address, PHONE) as page:
        page.get_by_role("button", name="Document and system prompt").click()
        page.locator("#document textarea").fill(document)
        page.locator("#question textarea").fill(question)
        generate(page, "Done:")
        assert_written(page, {"dense": answer})
        assert page.locator("#overview .heads i").count() == 30 * 3
        page.get_by_role("button", name="Document and system prompt").click()
        page.locator("#document textarea").wait_for(state="hidden")
        assert_fits(page, PHONE)
        page.get_by_label("paper", exact=True).check()
        generate(page, "Done:")
        unfold(page)
        page.get_by_role("button", name="layer 29, KV head 2:").click()
        assert "".join(part for _, part in coloured(page, 29, 2)).startswith(text)
