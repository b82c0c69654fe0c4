"""What decides a record's figures beside the names of its method, task and document.

A record is taken for a run's own only where its basis is the run's: after `hf-diffkv calibrate`, with other weights or
after an update the same name stands for other figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..heads.weights import model_digest
from ..version import __version__
from .environment import installed
from .errors import EvaluationError, one_line
from .methods import Method, get_method
from .records import Record

# entries of a basis that are the same in the environment of another Transformers
SHARED = ("code", "dtype")


def bases_of(model: Any, methods: Iterable[Method]) -> dict[str, dict[str, Any]]:
    """The basis of each method's records with a loaded model, by the method's label, ready for JSON.

    Entries are `code` (this library's version), `weights` (a digest; None where they cannot be told), `dtype`,
    `device` (its type), `packages` (versions), and whatever `Method.decided_by` adds.
    """
    of_model = {
        "code": __version__,
        "weights": _weights(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }
    return {method.label: {**of_model, **_of_method(method, model)} for method in methods}


def same_basis(record: Record, basis: Mapping[str, Any]) -> bool:
    """Whether a run with this basis would measure what the record holds."""
    return record.basis == basis and basis["weights"] is not None


def fresh(records: Iterable[Record], bases: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Those of the records that a run with these bases would not measure again.

    What another environment measured is told by `SHARED` alone.
    """
    environments = {method.label: method.environment for method in methods_of(bases)}
    found = []
    for record in records:
        basis = bases.get(record.method)
        if basis is None:
            continue
        if environments.get(record.method) is None:
            same = same_basis(record, basis)
        else:
            same = all(record.basis.get(name) == basis[name] for name in SHARED)
        if same:
            found.append(record)
    return found


def methods_of(labels: Iterable[str]) -> list[Method]:
    """The methods with these labels; without those that are not known, or cannot be used, any more."""
    found = []
    for label in dict.fromkeys(labels):
        try:
            found.append(get_method(label))
        except EvaluationError:
            continue
    return found


def _of_method(method: Method, model: Any) -> dict[str, Any]:
    packages = installed(method.packages)
    try:
        return {"packages": packages, **method.decided_by(model)}
    except (ValueError, OSError, NotImplementedError) as error:
        # its records say that it cannot be used
        return {"packages": packages, "refused": one_line(error)}


def _weights(model: Any) -> str | None:
    try:
        return model_digest(model)
    except ValueError:
        return None
