"""KV cache methods, one small file each, named `family` or `family:option+option+...`.

A module registers a function that turns the options, a list of strings, into a `Method`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import EvaluationError
from ..registry import Registry
from .base import HeldBytes, Method

METHODS: Registry[Callable[[list[str]], Method]] = Registry("method", __name__)
# decorator for the function that builds the methods of a family, called with its name
method = METHODS.add
# methods of scripts in a checkout
ELSEWHERE = dict.fromkeys(("kvpress", "llama-cpp"), "benchmarks/quality/peers.py")


def get_method(text: str) -> Method:
    """Makes the method that `text` names, for example `dense`, `diffkv:3/0` or `quanto:4`.

    Raises:
        EvaluationError: the family is unknown (with suggestions) or does not have such options.
    """
    family, _, options = text.strip().partition(":")
    if family in ELSEWHERE and family not in METHODS.names():
        raise EvaluationError(f"method {family!r} is measured by {ELSEWHERE[family]} in a checkout.")
    build = METHODS.find(family)
    try:
        built = build([option.strip() for option in options.split("+") if option.strip()])
    except EvaluationError:
        raise
    except (ValueError, TypeError) as error:
        raise EvaluationError(f"method {text!r}: {error}") from error
    built.label = text.strip()
    return built


__all__ = ["METHODS", "HeldBytes", "Method", "get_method", "method"]
