"""Transformers' `QuantizedCache` by its backends: `quanto:4`, `quanto:2`, `hqq:4`, `hqq:2`, `fp8`."""

from __future__ import annotations

import importlib.util
from typing import Any

from transformers import QuantizedCache

from ..errors import EvaluationError
from . import method
from .base import Method

QUANTIZER_PACKAGES = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq")}


class QuantizedMethod(Method):
    """Everything but a residual of `residual_length` tokens (128, Transformers' default) at one number of bits."""

    def __init__(self, backend: str, bits: int | None) -> None:
        if backend in QUANTIZER_PACKAGES and not _is_installed(QUANTIZER_PACKAGES[backend][0]):
            raise EvaluationError(f"method {backend!r} needs a package: pip install {QUANTIZER_PACKAGES[backend][1]}.")
        self.backend, self.bits = backend, bits

    def new_cache(self, model: Any) -> Any:
        return QuantizedCache(self.backend, model.config, nbits=self.bits)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _bits(backend: str, options: list[str], allowed: tuple[int, ...]) -> int:
    if len(options) > 1 or (options and options[0] not in map(str, allowed)):
        raise EvaluationError(f"method {backend!r} takes a number of bits, one of {allowed}, for example {backend}:4.")
    return int(options[0]) if options else 4


@method("quanto")
def quanto(options: list[str]) -> Method:
    return QuantizedMethod("quanto", _bits("quanto", options, (2, 4)))


@method("hqq")
def hqq(options: list[str]) -> Method:
    return QuantizedMethod("hqq", _bits("hqq", options, (1, 2, 3, 4, 8)))


@method("fp8")
def fp8(options: list[str]) -> Method:
    if options:
        raise EvaluationError("method 'fp8' has no options.")
    return QuantizedMethod("fp8", None)
