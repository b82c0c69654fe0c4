"""Commands of `hf-diffkv`, one module each, named like the command and with its `command`.

Other distributions contain some of the commands; without them help and errors say how to install them. Nothing here
imports PyTorch or Transformers before a command runs, so that help and usage errors appear at once.
"""

from __future__ import annotations

import importlib

import click

from ..extras import beside

# one-line descriptions, in the order of the help
COMMANDS = {
    "generate": "Generate with DiffKV and with a dense cache, and compare.",
    "chat": "Chat with a model over many turns on one cache.",
    "plan": "What fits in memory: context and batch, dense and DiffKV.",
    "inspect": "What is compressed, and what is kept of a prompt.",
    "verify": "Whether DiffKV works for a model, and well enough.",
    "bench": "Time per token and memory of caches on this machine.",
    "serve": "Serve a model to many clients, with OpenAI's protocol.",
    "demo": "Both caches side by side in a browser.",
    "evaluate": "Compare caches by what they keep and their real bytes.",
    "calibrate": "Measure what each head needs: its bits, or thresholds.",
    "lm-eval": "lm-evaluation-harness with any of these caches.",
    "env": "Versions and hardware, for a bug report.",
}
# commands of other distributions: module, and the extra that installs it
COMMANDS_BESIDE = {
    "serve": ("hf_diffkv_serving.command", "serve"),
    "demo": ("hf_diffkv_demo.command", "demo"),
    "bench": ("hf_diffkv_evaluation.commands.bench", "evaluation"),
    "evaluate": ("hf_diffkv_evaluation.commands.evaluate", "evaluation"),
    "lm-eval": ("hf_diffkv_evaluation.commands.lm_eval", "eval"),
}


def load(name: str) -> click.Command:
    """Imports one of `COMMANDS`. Raises `click.ClickException` if the command's distribution is not installed."""
    if name not in COMMANDS_BESIDE:
        return importlib.import_module(f".{name.replace('-', '_')}", __name__).command
    try:
        return beside(*COMMANDS_BESIDE[name]).command
    except ImportError as error:
        raise click.ClickException(f"{name}: {error}") from error
