"""Methods for other Transformers caches: `static`, `quanto:4`, `hqq:4`, `fp8`."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from transformers import QuantizedCache, StaticCache

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import Method, method

STATIC, FP8 = "static", "fp8"
# module, package and supported numbers of bits, by backend
QUANTIZERS = {"quanto": ("optimum.quanto", "optimum-quanto", (2, 4)), "hqq": ("hqq", "hqq", (1, 2, 3, 4, 8))}


class StaticMethod(Method):
    """Method with a `StaticCache` of `max_cache_len` tokens; not in `evaluate`, as it needs the length in advance."""

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len, self.label = max_cache_len, STATIC

    def new_cache(self, model: Any) -> Any:
        return StaticCache(config=model.config, max_cache_len=self.max_cache_len)


class QuantizedMethod(Method):
    """Method with all tokens at one number of bits, except a residual of 128 tokens (Transformers' default)."""

    def __init__(self, backend: str, bits: int | None) -> None:
        self.backend, self.bits = backend, bits
        if backend in QUANTIZERS:
            self.packages = (*self.packages, QUANTIZERS[backend][1])

    def new_cache(self, model: Any) -> Any:
        return QuantizedCache(self.backend, model.config, nbits=self.bits)


def _with_bits(backend: str, options: list[str]) -> Method:
    module, package, allowed = QUANTIZERS[backend]
    if len(options) > 1 or (options and options[0] not in map(str, allowed)):
        raise EvaluationError(f"method {backend!r} takes a number of bits, one of {allowed}, for example {backend}:4.")
    if not _is_installed(module):
        raise EvaluationError(f"method {backend!r} needs a package: pip install {package}.")
    return QuantizedMethod(backend, int(options[0]) if options else 4)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@method(FP8)
def fp8(options: list[str]) -> Method:
    if options:
        raise EvaluationError(f"method {FP8!r} has no options.")
    return QuantizedMethod(FP8, None)


for _backend in QUANTIZERS:
    method(_backend)(partial(_with_bits, _backend))
