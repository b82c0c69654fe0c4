"""Commands of `hf-diffkv`, one module each, which has the command's name and contains its `command`.

Some of the commands are in other distributions; help and errors say how to install those. Nothing here imports PyTorch
or Transformers before a command runs, so that help and usage errors appear immediately.
"""

from __future__ import annotations

import importlib

import click

from ..extras import import_extra

# one-line descriptions, in the order of the help
COMMANDS = {
    "generate": "Generate with DiffKV and a dense cache, and compare.",
    "chat": "Chat with a model, with many turns on one cache.",
    "plan": "Plan the context and batch that fit, dense and DiffKV.",
    "inspect": "Show what is compressed, and what is kept of a prompt.",
    "verify": "Check that DiffKV is correct and good enough for a model.",
    "bench": "Measure caches on this machine: time per token, memory.",
    "serve": "Serve a model to many clients through OpenAI's API.",
    "demo": "Show both caches side by side in a browser.",
    "evaluate": "Compare the quality and real bytes of caches.",
    "calibrate": "Measure the bits that each head needs, or thresholds.",
    "lm-eval": "Run lm-evaluation-harness with any of these caches.",
    "env": "Print versions and hardware for a bug report.",
}
# commands of other distributions: module, and the extra that installs it
EXTRA_COMMANDS = {
    "serve": ("hf_diffkv_serving.command", "serve"),
    "demo": ("hf_diffkv_demo.command", "demo"),
    "bench": ("hf_diffkv_evaluation.commands.bench", "evaluation"),
    "evaluate": ("hf_diffkv_evaluation.commands.evaluate", "evaluation"),
    "lm-eval": ("hf_diffkv_evaluation.commands.lm_eval", "eval"),
}


def load(name: str) -> click.Command:
    """Imports one of `COMMANDS`. Raises `click.ClickException` if the command's distribution is not installed."""
    if name not in EXTRA_COMMANDS:
        return importlib.import_module(f".{name.replace('-', '_')}", __name__).command
    try:
        return import_extra(*EXTRA_COMMANDS[name]).command
    except ImportError as error:
        raise click.ClickException(f"{name}: {error}") from error
