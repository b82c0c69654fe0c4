"""The commands of `hf-diffkv`, one file each: a module of the command's name that holds its `command`.

Those of distributions beside this one are there; without them help and errors say how to install them.
Nothing here imports PyTorch or Transformers before a command runs, so that help and usage errors come at once.
"""

from __future__ import annotations

import importlib

import click

from ..extras import beside

# in the order of the help, with what each does in a line
COMMANDS = {
    "generate": "Generate with DiffKV and with a dense cache, and compare.",
    "chat": "Talk with a model, many turns on one cache.",
    "plan": "What fits into memory: context and batch, dense and DiffKV.",
    "inspect": "What is compressed, and what is kept of a prompt.",
    "verify": "Whether DiffKV is right, and good enough, for a model.",
    "bench": "Time per token and memory of caches on this machine.",
    "serve": "Serve a model to many clients, with OpenAI's protocol.",
    "demo": "Both caches side by side in a browser.",
    "evaluate": "Judge caches by what they keep at which real bytes.",
    "calibrate": "Measure what each head needs: its bits, or thresholds.",
    "lm-eval": "lm-evaluation-harness with any of these caches.",
    "env": "Versions and hardware, for a bug report.",
}
# of distributions beside this one: where they are, and the extra that brings them
COMMANDS_BESIDE = {"serve": ("hf_diffkv_serving.command", "serve"), "demo": ("hf_diffkv_demo.command", "demo")}


def load(name: str) -> click.Command:
    """The command called `name`, one of `COMMANDS`.

    Raises:
        click.ClickException: it is in a distribution that is not installed.
    """
    if name not in COMMANDS_BESIDE:
        return importlib.import_module(f".{name.replace('-', '_')}", __name__).command
    try:
        return beside(*COMMANDS_BESIDE[name]).command
    except ImportError as error:
        raise click.ClickException(f"{name}: {error}") from error
