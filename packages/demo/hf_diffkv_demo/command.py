"""`hf-diffkv demo`: two caches side by side, in a browser."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import click

from hf_diffkv.commands.console import Command, Failure, one_line, progress
from hf_diffkv.commands.models import supported_config
from hf_diffkv.commands.options import BUDGET_TYPE, AtLeast, choice_of, model_option, preset_options
from hf_diffkv.extras import install
from hf_diffkv.running.models import SMALLEST_MODEL


@click.command(
    "demo",
    cls=Command,
    help="Serve a page on this machine that generates with a dense cache and with DiffKV side by side, draws how "
    "much memory both hold, and what the setting keeps in every head. Needs gradio (extra `demo`). Ctrl-C ends it.",
)
@model_option(default=None, show_default="smollm2, or tiny-lm if that is not available")
@click.option("--port", type=AtLeast(), help="Where to listen.  [default: 7860 or the next free one]")
@preset_options
@click.option("--max-bytes", type=BUDGET_TYPE, help="Budget of every setting's cache, e.g. 2MB, or 1% of free memory.")
def command(
    model: str | None, port: int | None, preset: str | None, ratio: float | None, max_bytes: int | str | None
) -> None:
    if port is not None and port > 65535:
        raise click.UsageError(f"--port {port} is not a port; give one up to 65535.")
    choice_of(SimpleNamespace(model=model or SMALLEST_MODEL, preset=preset, ratio=ratio))
    if importlib.util.find_spec("gradio") is None:
        raise Failure(f"the demo needs gradio: {install('demo')}.")
    progress(f"loading {model or 'smollm2'}")
    if model is not None:
        supported_config(model)
    from .generation import InputError, load
    from .page import serve

    try:
        generator, note = load(model)
        if note:
            progress(note)
        if ratio is not None:
            preset = generator.offer_ratio(ratio)
        if max_bytes is not None:
            generator.limit_to(max_bytes)
        serve(generator, note, port, preset)
    except InputError as error:
        raise Failure(one_line(error)) from error
    except OSError as error:
        tried = "any of the ports that are tried" if port is None else f"port {port}"
        raise Failure(f"the demo cannot listen on {tried}; give another --port.") from error
