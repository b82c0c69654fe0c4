"""Writes a constraints file that pins the package's dependencies to the lowest versions it declares.

    python tools/lowest_versions.py build/lowest.txt
    pip install --constraint build/lowest.txt ...

PyTorch is left out because its wheels are too large to install a second time.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
LEFT_OUT = ("torch",)
# a name and the bound that follows it
REQUIREMENT = re.compile(r"([\w-]+)\s*>=\s*([\w.]+)")


def lowest_versions(requirements: list[str]) -> dict[str, str]:
    """Lower bound of each requirement by name, except for those left out.

    Raises:
        ValueError: a requirement has no lower bound, or the bound does not come first.
    """
    found = {}
    for requirement in requirements:
        bound = REQUIREMENT.match(requirement)
        if bound is None:
            raise ValueError(f"{requirement!r} has no lower bound; write it as 'name>=1.2'.")
        if bound[1] not in LEFT_OUT:
            found[bound[1]] = bound[2]
    return found


def dependencies(project: Path = PROJECT) -> list[str]:
    """Returns the requirements of `[project]` and of its kernels."""
    try:
        import tomllib
    except ModuleNotFoundError:
        # Python 3.10
        from pip._vendor import tomli as tomllib
    found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    return found["dependencies"] + found["optional-dependencies"]["gpu"]


def main() -> int:
    """Writes the constraints file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="where the constraints go")
    path = parser.parse_args().path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}=={version}\n" for name, version in lowest_versions(dependencies()).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
