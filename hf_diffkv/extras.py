"""How to install what is optional, and what is there of the distributions beside this one (packages/)."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# extras that bring a distribution of their own, with what is installed for them in a checkout
BESIDE = {"serve": "packages/serving", "ray": "packages/serving[ray]", "demo": "packages/demo"}


def install(extra: str) -> str:
    """The command that installs an extra: of the checkout where this runs from one, which no index has."""
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{BESIDE.get(extra, f'.[{extra}]')}'"
    return f"pip install 'hf-diffkv[{extra}]'"


def beside(module: str, extra: str) -> ModuleType:
    """A module of a distribution beside this one.

    Raises:
        ImportError: that is not installed; with the command that installs `extra`, which brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"{error.name} is not installed: {install(extra)}.", name=error.name) from error
