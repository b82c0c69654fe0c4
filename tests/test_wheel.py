"""The wheel: its tag, and that it brings native code that loads."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


# in a process of its own: what other tests have imported may hide what setuptools brings along
ASK = """
import importlib.util, setuptools, sys
setuptools.setup = lambda **options: None
spec = importlib.util.spec_from_file_location("setup_of_this_project", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.manylinux(sys.argv[2], sys.argv[3].replace(" ", chr(0)).encode()))
"""


def tag(platform_name: str, strings: str) -> str:
    """The tag of a library with these strings in it."""
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-c", ASK, str(ROOT / "setup.py"), platform_name, f" {strings} "]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_tag_names_the_newest_glibc_that_is_asked_for() -> None:
    library = "GLIBC_2.9 GLIBC_2.27 GLIBC_2.3.4 GLIBCXX_3.4.30 CXXABI_1.3.7"
    assert tag("linux_x86_64", library) == "manylinux_2_27_x86_64"
    assert tag("linux_aarch64", library) == "manylinux_2_27_aarch64"
    # another C library, another system
    assert tag("linux_x86_64", "libc.musl") == "linux_x86_64"
    assert tag("macosx_14_0_arm64", library) == "macosx_14_0_arm64"


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to build native code with")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="manylinux is for systems with glibc")
@pytest.mark.slow
def test_an_installed_wheel_loads_its_library(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source, wheels, folder = (tmp_path / name for name in ("source", "wheels", "installed"))
    source.mkdir()
    for name in NEEDED:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hf_diffkv", source / "hf_diffkv", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # not optimised, as it need not be fast
    environment = {**os.environ, "HF_DIFFKV_NATIVE_FLAGS": "-O0"}
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, env=environment)
    (wheel,) = wheels.iterdir()
    assert "-py3-none-manylinux_2_" in wheel.name and wheel.name.endswith(f"_{platform.machine()}.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True)
    code = "from hf_diffkv.native import library; print(library.PATH, library.instructions())"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    path, instructions = done.stdout.split()
    assert Path(path).is_relative_to(folder) and instructions != "None"
