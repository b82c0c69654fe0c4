"""Many machines with Ray: data sets with Ray Data, an endpoint of replicas with Ray Serve (docs/distributed.md).

If Ray is missing, the names here raise `ImportError` on first use, with the command that installs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .application import app
    from .data import Generate
    from .parts import Summary, generate

__all__ = ["Generate", "Summary", "app", "generate"]

# a worker of Ray Data need not load Ray Serve
_LAZY = {"Generate": ".data", "Summary": ".parts", "app": ".application", "generate": ".parts"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_diffkv.extras import install

    try:
        found = getattr(importlib.import_module(_LAZY[name], __name__), name)
    except ImportError as error:
        raise ImportError(
            f"hf_diffkv.ray.{name} needs packages that are missing ({error}): {install('ray')}."
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
