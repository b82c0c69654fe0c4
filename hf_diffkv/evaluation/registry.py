"""Registry of objects by name, which finds a package's modules without a list."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from .errors import unknown

EntryT = TypeVar("EntryT")


class Registry(Generic[EntryT]):
    """Objects that the modules of `package` register under names; modules are imported on first use.

    Args:
        kind: word for an entry in messages, for example "task".
        package: full name of the package whose modules call `add`.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._entries: dict[str, EntryT] = {}
        self._loaded = False

    def add(self, name: str) -> Callable[[EntryT], EntryT]:
        """Returns a decorator that registers an object as `name`."""

        def register(entry: EntryT) -> EntryT:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice.")
            self._entries[name] = entry
            return entry

        return register

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)

    def find(self, name: str) -> EntryT:
        """Returns the entry `name`. Raises `EvaluationError` with suggestions if there is none."""
        self._load()
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries)
        return self._entries[name]

    def _load(self) -> None:
        if not self._loaded:
            for module in pkgutil.iter_modules(importlib.import_module(self.package).__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            self._loaded = True
