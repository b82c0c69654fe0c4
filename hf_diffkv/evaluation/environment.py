"""What a figure was measured with: versions, commit, hardware."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .hardware import processor

PACKAGES = ("hf-diffkv", "torch", "transformers", "kvpress", "optimum-quanto", "hqq", "datasets")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions of what is installed, the checkout's commit, the hardware."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["commit"] = _commit()
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    found["threads"] = torch.get_num_threads()
    return found


def _commit() -> str | None:
    """Of the checkout the package runs from; with `+` where files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "hf_diffkv")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
