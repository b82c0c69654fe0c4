"""Where the native library is, and what it runs on this processor; without PyTorch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# another build of it may be tried, such as one that checks every access
PATH = Path(os.environ.get("HF_DIFFKV_NATIVE_LIBRARY") or Path(__file__).with_name("_lib.so"))


def instructions_at(path: Path = PATH) -> str:
    """The instruction set that a library chooses, loaded for this alone.

    Raises:
        OSError: it was not built, or cannot be loaded.
    """
    if not path.is_file():
        raise FileNotFoundError("not built")
    try:
        function = ctypes.CDLL(str(path)).diffkv_instructions
    except AttributeError as error:
        raise OSError("of another build of the package") from error
    function.restype = ctypes.c_char_p
    return function().decode()
