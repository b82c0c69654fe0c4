"""The page: its layout, and what each part does."""

# without `from __future__ import annotations`: Gradio inspects the types of handlers, and is imported on use
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.precision import Precision

from .documents import Example, chats, free_prompts
from .figures import message
from .generation import Entered, Generator, InputError
from .heads import NOTHING, ON_LOAD, Place
from .runs import Runs, Update, look
from .settings import OWN, OWN_EXPLANATION, Setting, setting_of
from .style import CSS, FONTS

CHAT, FREE_PROMPT = "chat", "free prompt"
PRECISIONS = {p.name: p for p in (Precision(k, v) for k in (16, 8, 4, 2) for v in (16, 8, 4, 2) if v <= k)}
INTRODUCTION = """# DiffKV
A KV cache that stores keys and values in few bits, as many as each attention head needs, next to a dense one.
`docs/how-it-works.md` explains it."""
FOLDED, COLOURED = "Document and system prompt", "The text coloured by level"
WRITTEN: dict[str, Any] = {"lines": 2, "max_lines": 6, "buttons": ["copy"], "elem_classes": "plain", "min_width": 220}
# visitors who may wait or generate at once; each takes one of Gradio's forty threads
MOST_VISITORS = 30


def entered(
    settings: Mapping[str, Setting], mode: str, system: str, document: str, question: str, prompt: str, *rest: Any
) -> Entered:
    """Reads the fields of the page.

    Args:
        settings: settings by name.
        rest: tokens to generate, name of the setting, and the values of the visitor's own setting.

    Raises:
        InputError: `DiffKVConfig` refuses the values, or a precision is not on the page's list.
    """
    new_tokens, chosen, alpha_high, alpha_low, high, low, window = rest
    if chosen != OWN:
        config = settings[chosen].config
    else:
        try:
            config = DiffKVConfig(
                alpha_high=alpha_high, alpha_low=alpha_low, high=PRECISIONS[high], low=PRECISIONS[low], window=window
            )
        except KeyError as error:
            raise InputError(f"{error} is not in the list of precisions; choose one from it.") from error
        except ValueError as error:
            raise InputError(str(error)) from error
    if mode == FREE_PROMPT:
        return Entered(prompt, new_tokens, config, chosen)
    return Entered("\n\n".join(filter(str.strip, (document, question))), new_tokens, config, chosen, True, system)


def build(generator: Generator, note: str = "", preset: str | None = None) -> Any:
    """Builds the page, a `gradio.Blocks`.

    Args:
        note: text about the model.
        preset: setting that is selected at first; None selects the one that `DiffKVCache(model)` uses.

    Raises:
        ImportError: gradio is not installed.
    """
    import gradio as gr

    chosen = setting_of(preset, generator.settings)
    runs = Runs(generator)
    prompts, talks = free_prompts(generator.chats), chats()
    said = f"Model: **{generator.title}**, {len(generator.layers)} layers with {generator.heads} KV heads each"
    with gr.Blocks(title="DiffKV", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION, elem_id="introduction")
        gr.Markdown(f"{said}. {note}".rstrip(), elem_id="model")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                mode = gr.Radio(
                    [CHAT, FREE_PROMPT],
                    value=CHAT if generator.chats else FREE_PROMPT,
                    show_label=False,
                    visible=generator.chats,
                    elem_id="mode",
                )
                with gr.Column(visible=generator.chats) as chat_fields:
                    with gr.Accordion(FOLDED, open=False, elem_id="folded"):
                        # with a value, as a field that is not shown yet has none
                        hint = "the template's own"
                        system = gr.Textbox("", label="System prompt", placeholder=hint, elem_id="system")
                        document = _text_field(talks[0].document, "Document", "document", 11)
                    question = gr.Textbox(talks[0].question, label="Question", elem_id="question")
                    _offer(talks, document, question)
                with gr.Column(visible=not generator.chats) as free_fields:
                    prompt = _text_field(prompts[0].document, "Prompt", "prompt", 6, prompts[0].hint)
                    _offer(prompts, prompt)
                setting = gr.Radio([*generator.settings, OWN], value=chosen, label="setting", elem_id="setting")
                explanation = gr.Markdown(generator.settings[chosen].explanation, elem_id="explanation")
                with gr.Column(visible=False) as own:
                    values = _sliders()
                new_tokens = gr.Slider(1, 256, 32, step=1, label="tokens to generate")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary", min_width=120)
                    stop = gr.Button("Stop", min_width=120)
            with gr.Column(scale=3, min_width=320):
                shown: dict[str, Any] = {"status": gr.HTML(message("Ready."), padding=False, elem_id="status")}
                shown["memory"] = gr.HTML(padding=False, elem_id="memory")
                with gr.Row():
                    shown["dense"] = gr.Textbox(label="DynamicCache wrote", elem_id="dense", **WRITTEN)
                    shown["diffkv"] = gr.Textbox(label="DiffKV wrote", elem_id="diffkv", **WRITTEN)
                shown["difference"] = gr.HTML(padding=False, elem_id="difference")
                shown["figures"] = gr.HTML(padding=False, elem_id="figures")
                shown["overview"] = gr.HTML(NOTHING, js_on_load=ON_LOAD, padding=False, elem_id="overview")
                with gr.Accordion(COLOURED, open=False, visible=False, elem_id="coloured") as shown["fold"]:
                    shown["text"] = gr.HTML(padding=False, elem_id="picture")
        result = shown["result"] = gr.State(None)
        place = shown["place"] = gr.State((generator.layers[0], 0))

        def on_page(update: Update) -> dict[Any, Any]:
            # the fold is visible if it has a text
            return {
                shown[name]: gr.update(visible=value) if name == "fold" else value for name, value in update.items()
            }

        def generate(request: gr.Request, place: Place, *fields: Any) -> Iterator[dict[Any, Any]]:
            for update in runs.run(request.session_hash or "", lambda: entered(generator.settings, *fields), place):
                yield on_page(update)

        def end(request: gr.Request) -> None:
            runs.stop(request.session_hash or "")

        def choose_head(event: gr.EventData, result: Any) -> dict[Any, Any]:
            clicked = tuple(event.place)
            return on_page({"place": clicked, **look(result, clicked)})

        def choose_setting(chosen: str) -> tuple[str, Any]:
            explained = OWN_EXPLANATION if chosen == OWN else generator.settings[chosen].explanation
            return explained, gr.update(visible=chosen == OWN)

        def choose_mode(chosen: str) -> tuple[Any, Any]:
            return gr.update(visible=chosen == CHAT), gr.update(visible=chosen == FREE_PROMPT)

        fields = [mode, system, document, question, prompt, new_tokens, setting, *values]
        quiet = {"queue": False, "show_progress": "hidden"}
        setting.change(choose_setting, setting, [explanation, own], **quiet)
        mode.change(choose_mode, mode, [chat_fields, free_fields], **quiet)
        start.click(
            generate, [place, *fields], list(shown.values()), show_progress="hidden", concurrency_limit=MOST_VISITORS
        )
        stop.click(end, None, None, queue=False)
        page.unload(end)
        chosen_head = [place, shown["overview"], shown["text"], shown["fold"]]
        shown["overview"].click(choose_head, result, chosen_head, **quiet)
    return page


def _text_field(text: str, label: str, name: str, lines: int, hint: str = "") -> Any:
    import gradio as gr

    look = {"lines": lines, "max_lines": lines, "autoscroll": False, "elem_classes": "plain"}
    return gr.Textbox(text, label=label, info=hint or None, elem_id=name, **look)


def _offer(examples: Sequence[Example], *fields: Any) -> None:
    """Adds a button for each example, which fills the fields with its document and question."""
    import gradio as gr

    with gr.Row(elem_classes="examples"):
        for example in examples:
            texts = [example.document, example.question][: len(fields)]
            filled = texts if len(fields) > 1 else texts[0]
            gr.Button(example.name, size="sm").click(
                lambda filled=filled: filled, None, list(fields), queue=False, show_progress="hidden"
            )


def _sliders() -> list[Any]:
    """Returns fields for alpha_high, alpha_low, high, low and window of a custom setting."""
    import gradio as gr

    with gr.Row():
        alpha_high = gr.Slider(0, 10, 1.0, step=0.1, label="alpha_high", info="at least this: high")
        alpha_low = gr.Slider(0, 10, 0.0, step=0.01, label="alpha_low", info="below this: pruned")
    with gr.Row():
        high = gr.Dropdown(list(PRECISIONS), value="K8V4", label="high", info="bits of keys, values")
        low = gr.Dropdown(list(PRECISIONS), value="K4V2", label="low", info="bits of keys, values")
    window = gr.Slider(1, 512, 64, step=1, label="window", info="newest tokens, uncompressed")
    return [alpha_high, alpha_low, high, low, window]


def launched(page: Any, port: int | None = None) -> str:
    """Serves the page in other threads. Returns its address on this machine.

    Raises:
        OSError: the port, or every port that Gradio tries, is taken.
    """
    import gradio as gr

    theme = gr.themes.Soft(**FONTS)
    # quiet, as it would print how to make the page public
    options: dict[str, Any] = {"footer_links": [], "server_port": port, "prevent_thread_lock": True, "quiet": True}
    return page.launch(theme=theme, css=CSS, **options)[1]


def serve(generator: Generator, note: str = "", port: int | None = None, preset: str | None = None) -> None:
    """Serves the page until the process is interrupted. Raises like `build` and `launched`."""
    page = build(generator, note, preset)
    print(f"Open {launched(page, port)} in a browser; Ctrl-C ends it.", flush=True)
    try:
        threading.Event().wait()
    finally:
        page.close()
