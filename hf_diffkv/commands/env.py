"""`hf-diffkv env`: versions of everything that can matter in a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

import click

from .help import Command
from .options import json_option

VERSIONED = ("hf-diffkv", "torch", "transformers", "accelerate", "triton", "safetensors", "numpy")


@click.command("env", cls=Command, help="Print versions, devices and whether there is native code, for a bug report.")
@json_option
def command(as_json: bool) -> None:
    import torch

    from ..native.library import instructions

    lines: dict[str, Any] = versions()
    for index in range(torch.cuda.device_count()):
        lines[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    lines["native code"] = instructions() or (
        "not built: decoding on CPUs runs in PyTorch; reinstall with a C++ compiler, or from a wheel"
    )
    lines["threads"] = str(torch.get_num_threads())
    click.echo(json.dumps(lines, indent=2) if as_json else "\n".join(f"{name}: {lines[name]}" for name in lines))


def versions() -> dict[str, str]:
    """Versions of Python, the platform, and the packages that matter."""
    import torch

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    # the wheel's metadata may leave out the build, such as +cu130
    found["torch"] = str(torch.__version__)
    if found["hf-diffkv"] == "not installed":
        from .. import __version__

        found["hf-diffkv"] = f"{__version__} (not installed)"
    return found
