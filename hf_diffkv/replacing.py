"""Writes files atomically: a full disk or a stopped process keeps the old file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a new file that replaces `path` if the block ends without an error.

    Devices and pipes cannot be replaced, so their own path is yielded.

    Raises:
        OSError: the file cannot be written, even where safetensors raises its own error; the message names `path`.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    # processes may write the same file at the same time
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    except Exception as error:
        from safetensors import SafetensorError

        if isinstance(error, SafetensorError):
            raise OSError(f"cannot write {path}: {error}") from error
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(new)):
            # an error about a full disk names no file
            error.filename = str(path)
        raise
    finally:
        new.unlink(missing_ok=True)


def save_text(text: str, path: str | os.PathLike) -> None:
    """Writes a file of UTF-8 text. Raises `OSError`."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def save_tensors(tensors: Mapping[str, Any], path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file. Raises `OSError`."""
    from safetensors.torch import save_file

    with replacing(path) as new:
        save_file(dict(tensors), new, metadata=metadata)
