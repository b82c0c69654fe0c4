"""Optional extras: commands to install them, and imports from the other distributions (packages/)."""

from __future__ import annotations

import importlib
import json
import shlex
from importlib import metadata
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parents[1]
# extras that install another distribution, with their path in a checkout
BESIDE = {
    "serve": "packages/serving",
    "ray": "packages/serving[ray]",
    "demo": "packages/demo",
    "evaluation": "packages/evaluation",
    "eval": "packages/evaluation[harness]",
}


def install(extra: str) -> str:
    """Returns the command to install an extra, from the checkout if this runs or was installed from one."""
    part = BESIDE.get(extra, f".[{extra}]")
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{part}'"
    # an index may lack the other distributions
    checkout = _installed_from()
    if checkout is not None:
        return f"pip install {shlex.quote(f'{checkout}/{part}')}"
    return f"pip install 'hf-diffkv[{extra}]'"


def _installed_from() -> str | None:
    """Returns the folder that pip installed this from, if it is still there."""
    try:
        text = metadata.distribution("hf-diffkv").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    address = urlsplit(json.loads(text)["url"] if text else "")
    folder = url2pathname(address.path)
    return folder if address.scheme == "file" and Path(folder, "packages").is_dir() else None


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports a module of another distribution.

    Raises:
        ImportError: the distribution is not installed; the message contains the command to install `extra`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"{error.name} is not installed: {install(extra)}.", name=error.name) from error
