"""Contents and dependencies of the packages, and the cost of an import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_diffkv
from hf_diffkv import import_hook
from hf_diffkv.ops.table import IMPLEMENTATIONS

ROOT = Path(__file__).parents[2]
# the folder of each distribution, with its package
PACKAGES = {
    ".": "hf_diffkv",
    "packages/demo": "hf_diffkv_demo",
    "packages/evaluation": "hf_diffkv_evaluation",
    "packages/serving": "hf_diffkv_serving",
}
# what `make` installs into environments of their own
ELSEWHERE = {"kvpress", "lmcache"}
# imported at the top of modules that are imported where kernels run, or where Ray is; what others bring along
PARTS = {
    "hf_diffkv/ops": {"triton"},
    "packages/serving/hf_diffkv_serving": {"pydantic_core", "starlette", "tokenizers"},
    "packages/serving/hf_diffkv_serving/ray": {"pyarrow", "ray"},
}
OPTIONAL = ("matplotlib", "datasets", "evaluate", "gradio", "optimum", "playwright")


def project_in(folder: str) -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def project() -> dict:
    return project_in(".")


def names(requirements: list[str]) -> set[str]:
    """Returns the names by which requirements are imported."""
    return {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in requirements}


@pytest.mark.parametrize("folder", PACKAGES)
def test_versions_are_one(folder: str, project: dict) -> None:
    found = project_in(folder)
    assert found["version"] == hf_diffkv.__version__ and found["license"] == "Apache-2.0"
    pinned = {name for name in found["dependencies"] if name.startswith("hf-diffkv")}
    extra = {
        name
        for extra in ("demo", "serve", "ray", "evaluation", "eval")
        for name in project["optional-dependencies"][extra]
        if name.startswith("hf-diffkv")
    }
    assert all(name.endswith(f"=={hf_diffkv.__version__}") for name in pinned | extra)
    assert len(pinned) == (folder != ".")


def test_console_script_exists(project: dict) -> None:
    module, function = project["scripts"]["hf-diffkv"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_import_is_light() -> None:
    def loaded(unwanted: tuple[str, ...], program: str) -> str:
        code = f"import sys; {program}; print([name for name in {unwanted} if name in sys.modules])"
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    assert loaded(("torch", "triton", "transformers", "numpy", *OPTIONAL), "import hf_diffkv") == "[]"
    heavy = (*OPTIONAL, "transformers.trainer", "hf_diffkv.training")
    assert loaded(heavy, "from hf_diffkv import DiffKVCache") == "[]"


def test_the_oldest_transformers_is_the_one_declared(project: dict) -> None:
    oldest = ".".join(map(str, import_hook.OLDEST))
    assert f"transformers>={oldest},<6" in project["dependencies"]


@pytest.mark.parametrize("folder, package", PACKAGES.items())
def test_everything_imported_is_declared(folder: str, package: str) -> None:
    project = project_in(folder)
    # the others need the library, which brings what it needs
    required = names(project["dependencies"]) | names(project_in(".")["dependencies"])
    optional = set().union(*(names(extra) for extra in project.get("optional-dependencies", {}).values()))
    for path in (ROOT / folder / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            third_party = {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names) - {package}
            allowed = required if node in tree.body else required | optional | ELSEWHERE
            parts = [names for part, names in PARTS.items() if path.is_relative_to(ROOT / part)]
            allowed = allowed.union(*parts)
            assert third_party <= allowed, f"{path.relative_to(ROOT)} imports {third_party - allowed}"


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for folder, package in PACKAGES.items() for path in (ROOT / folder / package).rglob("*.py")}
    assert len(folders) > 20
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_every_module_is_reached_from_the_api_or_the_command_line() -> None:
    """Checks that every module is used. A module for tests or developers alone belongs to tests/ or tools/."""
    modules = {}
    for folder, package in PACKAGES.items():
        for path in (ROOT / folder / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = path
    # found by their place, by an entry of the documents, or by Python itself
    by_name = (
        "hf_diffkv.commands.",
        "hf_diffkv.policy.",
        "hf_diffkv.evaluation.methods.",
        "hf_diffkv.evaluation.tasks.",
    )
    reached: set[str] = set()
    waiting = ["hf_diffkv", "hf_diffkv.__main__", "hf_diffkv.training", "hf_diffkv.lmcache", "hf_diffkv.ray"]
    waiting += [f"hf_diffkv.{place}" for place in hf_diffkv._LAZY.values()]
    waiting += [name for name in modules if name.startswith(by_name)]
    waiting += [
        f"hf_diffkv.ops.{place.split(':')[0]}" for places in IMPLEMENTATIONS.values() for place in places.values()
    ]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in reached:
            reached.add(name)
            waiting += imported(name, modules[name])
    assert reached == set(modules)


def imported(name: str, path: Path) -> set[str]:
    """Modules that a module imports, or names in a text, with the packages that they are in."""
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*outer, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            found |= {node.value, f"{package}{node.value}"}
    return found | {module.rpartition(".")[0] for module in found}


def test_license_is_apache_2(project: dict) -> None:
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
