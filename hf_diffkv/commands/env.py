"""`hf-diffkv env`: versions and hardware for a bug report, without importing PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
from pathlib import Path

import click

from .. import __version__
from ..native.path import instructions_at
from .console import Command
from .options import json_option

VERSIONED = ("hf-diffkv", "hf-diffkv-serving", "torch", "transformers", "accelerate", "triton", "safetensors", "numpy")
CPU_INFO = Path("/proc/cpuinfo")
# instruction sets with which PyTorch multiplies matrices in bfloat16 by oneDNN
FAST_BFLOAT16 = {"avx512dq", "avx_ne_convert"}
REINSTALL = "decoding on CPUs runs in PyTorch; reinstall with a C++ compiler, or from a wheel"


@click.command("env", cls=Command, help="Print versions, hardware and whether native code is there, for a bug report.")
@json_option
def command(as_json: bool) -> None:
    # imported here, as it would slow down the help of `generate`
    from ..evaluation.environment import cores, gpus, memory, processor

    lines = {**versions(), "cpu": processor(), "cores": cores(), "memory": memory()}
    if "OMP_NUM_THREADS" in os.environ:
        lines["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    found = gpus()
    advice = None if found else _advice(_processor_flags())
    if advice is not None:
        lines["advice"] = advice
    lines |= {f"cuda:{index}": name for index, name in enumerate(found)} or {"gpu": "none found by nvidia-smi"}
    try:
        lines["native code"] = instructions_at()
    except OSError as error:
        lines["native code"] = f"{error}: {REINSTALL}"
    click.echo(json.dumps(lines, indent=2) if as_json else "\n".join(f"{name}: {lines[name]}" for name in lines))


def _processor_flags() -> set[str]:
    """Returns the instruction sets of an x86 processor, as Linux names them; none elsewhere."""
    found = re.search(r"^flags\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE) if CPU_INFO.is_file() else None
    return set() if found is None else set(found[1].split())


def _advice(flags: set[str]) -> str | None:
    """Returns advice on faster prompts or steps for a machine without a GPU, or None (docs/faq.md)."""
    if "avx512_bf16" in flags:
        # without it, bitsandbytes unpacks weights at every step
        missing = importlib.util.find_spec("bitsandbytes") is None
        install = " (pip install bitsandbytes)" if missing else ""
        return f"without a GPU, 4-bit weights make steps faster: --weights 4bit{install}"
    if flags and not FAST_BFLOAT16 & flags:
        return "without AVX-512, long prompts are several times faster in float32 than in bfloat16: --dtype float32"
    return None


def versions() -> dict[str, str]:
    """Returns the versions of Python, the platform and relevant packages."""
    from ..evaluation.environment import installed

    found = {"python": platform.python_version(), "platform": platform.platform()}
    found |= dict.fromkeys(VERSIONED, "not installed") | installed(VERSIONED)
    found["torch"] = _torch_version() or found["torch"]
    if found["hf-diffkv"] == "not installed":
        found["hf-diffkv"] = f"{__version__} (not installed)"
    return found


def _torch_version() -> str | None:
    """Returns PyTorch's version with its build, such as +cu130, which the wheel's metadata may lack."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^__version__ = '(.+)'", text, re.MULTILINE)
    return match[1] if match else None
