"""Builds the native code for CPUs if a C++ compiler is available; the package also installs and runs without one.

The library is plain C++ loaded by ctypes. It needs no Python or PyTorch headers, so one wheel serves all releases of
both. Everything else about the package is in pyproject.toml.
"""

import os
import platform
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = Path("hf_diffkv/native")
DOCUMENTS = Path("examples/prompts")
COMPILER = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-g0"]
# round like PyTorch: only explicit fused operations
COMPILER += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
# Python's own flags may contain -fwrapv, with which loops over indices are up to 1.6 times slower
COMPILER += ["-fno-wrapv"]
# the compiler warns about its own header for vector instructions
COMPILER += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# instruction sets besides the portable form, compiled from the same source and selected at run time
VNNI = [*AVX512, "-mavx512vnni"]
VARIANTS = {"avx2": AVX2, "avx512": AVX512, "avx512vnni": VNNI, "avx512bf16": [*VNNI, "-mavx512bf16"]}


class BuildNative(build_ext):
    """Compiles `variant.cpp` once for each instruction set and links all of them into one library."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        extra = os.environ.get("HF_DIFFKV_NATIVE_FLAGS", "").split()
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        chosen = os.environ.get("HF_DIFFKV_NATIVE_SETS", "").split() or VARIANTS
        sets = {name: flags for name, flags in VARIANTS.items() if x86 and name in chosen}
        # the threads only wait for compilers, which are processes
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            portable = pool.submit(self._compile, "variant.cpp", "portable", extra)
            built = {
                name: pool.submit(self._compile, "variant.cpp", name, [*flags, *extra]) for name, flags in sets.items()
            }
            threads = pool.submit(self._compile, "threads.cpp", "common", extra)
        objects = [*portable.result(), *threads.result()]
        defined = ["-DDIFFKV_X86"] if x86 else []
        for name, compiled in built.items():
            try:
                objects += compiled.result()
            except Exception as error:  # an older compiler: build what it supports
                self.warn(f"native code for {name} is left out: {error}")
                continue
            defined.append(f"-DDIFFKV_{name.upper()}")
        objects += self._compile("dispatch.cpp", "common", [*defined, *extra])
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        libraries = ["dl"] if platform.system() == "Linux" else []
        self.compiler.link_shared_object(
            objects, target, libraries=libraries, extra_postargs=extra, target_lang="c++", build_temp=self.build_temp
        )

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def _compile(self, source: str, variant: str, flags: list[str]) -> list[str]:
        flags = [*COMPILER, f"-DDIFFKV_KERNELS={variant}_kernels", *flags]
        folder = os.path.join(self.build_temp, variant)
        return self.compiler.compile([str(SOURCES / source)], output_dir=folder, extra_postargs=flags)


class WithDocuments(build_py):
    """Adds the example documents to a wheel; in a checkout they are in examples/prompts."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "hf_diffkv", "commands", "prompts")
        target.mkdir(parents=True, exist_ok=True)
        for document in DOCUMENTS.glob("*.txt"):
            shutil.copyfile(document, target / document.name)


class AnyPythonWheel(bdist_wheel):
    """A wheel for one platform and every Python version, because the library does not use Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()[2]
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath(NATIVE.name))
        return ("py3", "none", manylinux(tag, library.read_bytes()) if library.is_file() else tag)


def manylinux(tag: str, library: bytes) -> str:
    """A wheel's platform tag; for Linux, with the oldest glibc that has everything the library needs.

    The names of symbol versions appear literally in the library. It needs nothing newer of libstdc++.
    """
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    if not tag.startswith("linux_") or not versions:
        return tag
    return "manylinux_{}_{}_{}".format(*max(versions), tag.removeprefix("linux_"))


NATIVE = Extension(
    "hf_diffkv.native._lib",
    sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    language="c++",
    optional=True,
)

setup(
    ext_modules=[NATIVE], cmdclass={"build_ext": BuildNative, "build_py": WithDocuments, "bdist_wheel": AnyPythonWheel}
)
