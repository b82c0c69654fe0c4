"""A demo in the browser: DiffKV beside an uncompressed cache, and the level of every token.

Run it with `python examples/space/app.py`; `--help` lists the options. Gradio's variables choose where it listens, as
`GRADIO_SERVER_PORT` does.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gradio as gr
from generation import Generator, InputError, Result
from picture import CSS, coloured_text, difference, figures, message
from settings import OWN, OWN_EXPLANATION, SETTINGS

from hf_diffkv import DiffKVConfig, Precision

EXAMPLES = Path(__file__).resolve().parents[1]
BUNDLED_MODEL = EXAMPLES / "models" / "tiny-lm"
PROMPT = EXAMPLES / "prompts" / "recall.txt"
PRECISIONS = {p.name: p for p in (Precision(k, v) for k in (16, 8, 4, 2) for v in (16, 8, 4, 2) if v <= k)}
INTRODUCTION = """# DiffKV
A KV cache that keeps important tokens precise, others coarse, and prunes the rest, beside an uncompressed one."""
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


NOTHING = coloured_text(None, 0, 0)


def own_config(alpha_high: float, alpha_low: float, high: str, low: str, window: int) -> DiffKVConfig:
    """What the sliders say. Raises `InputError` where `DiffKVConfig` refuses it."""
    try:
        return DiffKVConfig(
            alpha_high=alpha_high, alpha_low=alpha_low, high=PRECISIONS[high], low=PRECISIONS[low], window=window
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def build(generator: Generator, prompt: str) -> gr.Blocks:
    """The page."""
    with gr.Blocks(title="DiffKV", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION)
        with gr.Row():
            with gr.Column(scale=2):
                text = gr.Textbox(
                    prompt,
                    label="Prompt",
                    lines=15,
                    max_lines=15,
                    autoscroll=False,
                    elem_id="prompt",
                    elem_classes="plain",
                )
            with gr.Column(scale=1, min_width=320):
                setting = gr.Radio([*SETTINGS, OWN], value="default", label="setting", elem_id="setting")
                explanation = gr.Markdown(SETTINGS["default"].explanation, elem_id="explanation")
                own = gr.Column(visible=False)
                with own, gr.Row():
                    alpha_high = gr.Slider(0, 10, 1.0, step=0.1, label="alpha_high", info="at least this: high")
                    alpha_low = gr.Slider(0, 10, 0.0, step=0.01, label="alpha_low", info="below this: pruned")
                with own, gr.Row():
                    high = gr.Dropdown(list(PRECISIONS), value="K8V4", label="high", info="bits of keys, values")
                    low = gr.Dropdown(list(PRECISIONS), value="K4V2", label="low", info="bits of keys, values")
                with own:
                    window = gr.Slider(1, 512, 64, step=1, label="window", info="newest, uncompressed")
                new_tokens = gr.Slider(1, 256, 32, step=1, label="tokens")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary")
                    stop = gr.Button("Stop")
        status = gr.HTML(message("Ready."), elem_id="status")
        written = {"lines": 4, "max_lines": 10, "buttons": ["copy"], "elem_classes": "plain"}
        with gr.Row():
            dense_text = gr.Textbox(label="DynamicCache wrote", elem_id="dense", **written)
            diffkv_text = gr.Textbox(label="DiffKV wrote", elem_id="diffkv", **written)
        table = gr.HTML(elem_id="figures")
        differences = gr.HTML(elem_id="difference")
        gr.Markdown("## Level of every token")
        with gr.Row():
            layer = gr.Dropdown(generator.layers, value=generator.layers[0], label="layer")
            head = gr.Dropdown(list(range(generator.heads)), value=0, label="KV head")
        picture = gr.HTML(NOTHING, elem_id="picture")
        result = gr.State(None)

        # by browser session, while it waits or generates; Gradio's own way to cancel shows an error now and then
        stops: dict[str, threading.Event] = {}

        def wait(request: gr.Request) -> str:
            stops.setdefault(request.session_hash, threading.Event())
            return message("Waiting for the model ...")

        def generate(
            request: gr.Request, layer_idx: int, head_idx: int, text: str, new_tokens: int, chosen: str, *values: Any
        ) -> Iterator[dict]:
            stopped = stops.setdefault(request.session_hash, threading.Event())
            try:
                # nothing of an earlier run stays beside what this one says
                yield {dense_text: "", diffkv_text: "", table: "", differences: "", result: None, picture: NOTHING}
                config = own_config(*values) if chosen == OWN else SETTINGS[chosen].config
                task = generator.prepare(text, new_tokens, config)
                tokens = f"{task.ids.shape[1]:,} tokens"
                yield {status: message(f"Reading the prompt of {tokens} ...")}
                found: Result | None = None
                with closing(generator.run(task)) as steps:
                    while found is None and not stopped.is_set():
                        dense, compressed, found = next(steps)
                        running = "DiffKV" if compressed.arrivals else "DynamicCache"
                        yield {
                            status: message(f"{running} is generating ..."),
                            dense_text: dense.text,
                            diffkv_text: compressed.text,
                        }
                if found is None:
                    yield {status: message("Stopped.")}
                    return
                yield {
                    status: message(f"Done: a prompt of {tokens}, {len(found.compressed.tokens)} generated."),
                    table: figures(found),
                    differences: difference(found),
                    result: found,
                    picture: coloured_text(found, layer_idx, head_idx),
                }
            except InputError as error:
                yield {status: message(str(error), error=True)}
            finally:
                stops.pop(request.session_hash, None)

        def stop_generating(request: gr.Request) -> None:
            if request.session_hash in stops:
                stops[request.session_hash].set()

        def choose(chosen: str) -> tuple[str, Any]:
            shown = OWN_EXPLANATION if chosen == OWN else SETTINGS[chosen].explanation
            return shown, gr.update(visible=chosen == OWN)

        setting.change(choose, setting, [explanation, own], queue=False, show_progress="hidden")
        settings = [setting, alpha_high, alpha_low, high, low, window]
        start.click(wait, None, status, queue=False, show_progress="hidden").then(
            generate,
            [layer, head, text, new_tokens, *settings],
            [status, dense_text, diffkv_text, table, differences, result, picture],
            show_progress="hidden",
        )
        stop.click(stop_generating, None, None, queue=False)
        for choice in (layer, head):
            choice.change(coloured_text, [result, layer, head], picture, show_progress="hidden")
    return page


def main() -> int:
    """Loads the model and serves the page until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = os.environ.get("MODEL", str(BUNDLED_MODEL))
    parser.add_argument("--model", default=model, help="Hub id or folder (default: $MODEL, or the bundled tiny-lm)")
    options = parser.parse_args()
    try:
        generator = Generator(options.model)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    prompt = PROMPT.read_text(encoding="utf-8").removesuffix("\n") if PROMPT.is_file() else ""
    theme = gr.themes.Soft(**FONTS)
    build(generator, prompt).launch(theme=theme, css=CSS, footer_links=[])
    return 0


if __name__ == "__main__":
    sys.exit(main())
