"""Describes the environment of a measurement: versions, commit, hardware. Importing it needs only Python."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("hf-diffkv", "torch", "transformers", "kvpress", "llama-cpp-python", "optimum-quanto", "hqq", "datasets")
GPU_FIELDS = "name,memory.total,driver_version"
GPU_SECONDS = 10


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Returns versions of installed packages, the checkout's commit and the hardware."""
    import torch

    found = describe_versions()
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    found["threads"] = torch.get_num_threads()
    return found


def describe_versions() -> dict[str, Any]:
    """Returns the versions of Python and of installed packages, and the checkout's commit."""
    return {"python": platform.python_version(), **installed(PACKAGES), "commit": _commit()}


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    """Returns the commit of the package's checkout, with `+` if files have changed; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "hf_diffkv", "packages/evaluation")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """Returns the model name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> str:
    """Returns the number of CPU cores and, if this process may not use them all, how many it may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return str(usable) if usable == os.cpu_count() else f"{usable} of {os.cpu_count()}"


def memory() -> str:
    import psutil

    found = psutil.virtual_memory()
    return f"{found.total / 1e9:.1f} GB, {found.available / 1e9:.1f} GB available"


def gpus() -> list[str]:
    """Returns name, memory and driver of each NVIDIA GPU, from nvidia-smi; empty if there is none."""
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GPU_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [", driver ".join(line.strip().rsplit(", ", 1)) for line in found.splitlines() if line.strip()]
