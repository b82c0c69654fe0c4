"""Path of the native library and its instruction set on this processor; does not import PyTorch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# the environment variable selects another build, such as one that checks every access
PATH = Path(os.environ.get("HF_DIFFKV_NATIVE_LIBRARY") or Path(__file__).with_name("_lib.so"))


def instructions_at(path: Path = PATH) -> str:
    """Loads a library and returns the instruction set that it chooses.

    Raises:
        OSError: the library was not built, or cannot be loaded.
    """
    if not path.is_file():
        raise FileNotFoundError("not built")
    try:
        function = ctypes.CDLL(str(path)).diffkv_instructions
    except AttributeError as error:
        raise OSError("of another build of the package") from error
    function.restype = ctypes.c_char_p
    return function().decode()
