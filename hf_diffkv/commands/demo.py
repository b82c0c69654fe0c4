"""`hf-diffkv demo`: the page of examples/space, in a browser."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import click

from ..evaluation.models import CHECKOUT, resolve_model
from .console import Failure, progress
from .help import Command
from .models import supported_config
from .options import AtLeast, model_option

APP = CHECKOUT / "examples" / "space" / "app.py"
# Ctrl-C reaches both processes; the one that waits says so, this one ends without a word
NEW_PROCESS = (
    "import os, runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); del sys.argv[0]; "
    "sys.path.insert(0, os.path.dirname(sys.argv[0])); runpy.run_path(sys.argv[0], run_name='__main__')"
)


@click.command(
    "demo",
    cls=Command,
    help="Serve a page on this machine that generates with a dense cache and with DiffKV side by side, and colours the "
    "prompt by what each head keeps of it. Needs a checkout of the project and gradio (extra `demo`). Ctrl-C ends it.",
)
@model_option(default="tiny-lm", show_default=True)
@click.option("--port", metavar="N", type=AtLeast(), help="Where to listen.  [default: 7860 or the next free one]")
def command(model: str, port: int | None) -> None:
    if port is not None and port > 65535:
        raise click.UsageError(f"--port {port} is no port; give one up to 65535.")
    if not APP.is_file():
        raise Failure("the demo comes with a checkout of the project only (examples/space).")
    if importlib.util.find_spec("gradio") is None:
        raise Failure("the demo needs gradio: pip install 'hf-diffkv[demo]'.")
    progress(f"loading {model}")
    supported_config(model)
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(CHECKOUT)) if path]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if port is not None:
        environment["GRADIO_SERVER_PORT"] = str(port)
    started = [sys.executable, "-c", NEW_PROCESS, str(APP), "--model", resolve_model(model)]
    code = subprocess.run(started, env=environment).returncode
    if code:
        raise Failure(f"the demo ended with exit code {code}.")
