"""Optional extras: commands that install them, and imports from the other distributions (packages/)."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# extras that install another distribution, with its path in a checkout
BESIDE = {
    "serve": "packages/serving",
    "ray": "packages/serving[ray]",
    "demo": "packages/demo",
    "evaluation": "packages/evaluation",
    "eval": "packages/evaluation[harness]",
}


def install(extra: str) -> str:
    """Returns the command that installs an extra, from the checkout if this runs from one."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{BESIDE.get(extra, f'.[{extra}]')}'"
    return f"pip install 'hf-diffkv[{extra}]'"


def beside(module: str, extra: str) -> ModuleType:
    """Imports a module of another distribution.

    Raises:
        ImportError: the distribution is not installed; the message has the command that installs `extra`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"{error.name} is not installed: {install(extra)}.", name=error.name) from error
