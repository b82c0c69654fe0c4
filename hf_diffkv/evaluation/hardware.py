"""What a machine has, without PyTorch."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil

GPU_FIELDS = "name,memory.total,driver_version"
GPU_SECONDS = 10


def processor() -> str:
    """The model of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> str:
    """Of the machine, and how many of them this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return str(usable) if usable == os.cpu_count() else f"{usable} of {os.cpu_count()}"


def memory() -> str:
    found = psutil.virtual_memory()
    return f"{found.total / 1e9:.1f} GB, {found.available / 1e9:.1f} GB available"


def gpus() -> list[str]:
    """Name, memory and driver of each of NVIDIA's GPUs, as nvidia-smi has them; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GPU_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [", driver ".join(line.strip().rsplit(", ", 1)) for line in found.splitlines() if line.strip()]
