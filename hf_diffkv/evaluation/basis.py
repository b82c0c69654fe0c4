"""Basis of a record: everything besides the names of method, task and document that determines its figures.

A run reuses a record only if both have the same basis. After `hf-diffkv calibrate` or an update, or with other weights,
the same names stand for other figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..heads.recognition import loaded_digest
from ..version import __version__
from .environment import installed
from .errors import one_line
from .methods import Method
from .records import Record


def bases_of(model: Any, methods: Iterable[Method]) -> dict[str, dict[str, Any]]:
    """Returns the basis of each method's records with a loaded model, by the method's label, ready for JSON.

    Entries are `code` (this library's version), `weights` (a digest; None if they cannot be read), `dtype`, `device`
    (its type), `packages` (versions), and the entries of `Method.decided_by`.
    """
    of_model = {
        "code": __version__,
        "weights": loaded_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }
    return {method.label: {**of_model, **_of_method(method, model)} for method in methods}


def same_basis(record: Record, basis: Mapping[str, Any]) -> bool:
    """Returns whether a run with this basis would measure the figures of the record."""
    return record.basis == basis and basis["weights"] is not None


def _of_method(method: Method, model: Any) -> dict[str, Any]:
    packages = installed(method.packages)
    try:
        return {"packages": packages, **method.decided_by(model)}
    except (ValueError, OSError, NotImplementedError) as error:
        # the method's records will say that it cannot be used
        return {"packages": packages, "refused": one_line(error)}
