"""Picks the records of a run's folder whose figures are up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_diffkv.evaluation.basis import same_basis
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.records import Record

from .methods import Method, get_method

# entries of a basis that do not depend on the environment and its Transformers
SHARED = ("code", "dtype")


def fresh(records: Iterable[Record], bases: Mapping[str, Mapping[str, Any]]) -> list[Record]:
    """Returns the records that a run with these bases would not measure again.

    Records from another environment are compared only by the entries in `SHARED`.
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
    """Returns the methods with these labels, without methods that no longer exist or can no longer be used."""
    found = []
    for label in dict.fromkeys(labels):
        try:
            found.append(get_method(label))
        except EvaluationError:
            continue
    return found
