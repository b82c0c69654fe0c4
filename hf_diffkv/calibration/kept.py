"""Keeps a model's measured figures, document by document, so that an interrupted measurement can continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluation.environment import describe_environment
from ..evaluation.records import Record, RunFolder
from ..evaluation.tasks import Document
from ..heads.weights import model_digest

# folder of the records within a run's folder, their method, and the file for sums of query moments
FOLDER, METHOD, SUMS_NAME = "heads", "heads", "queries.safetensors"
LAYERS_KEY = "layers"


class Kept:
    """Figures of each document's layers, in a folder or only in memory.

    Args:
        output: folder of the run; None keeps figures only in memory.

    Raises:
        EvaluationError: the folder is not writable, or holds a run of another model or dtype.
    """

    def __init__(self, model: Any, output: Path | str | None) -> None:
        self._environment = describe_environment(model.device)
        settings = {"model": model_digest(model), "dtype": str(model.dtype).removeprefix("torch.")}
        self._folder = None if output is None else RunFolder(Path(output) / FOLDER, settings)
        self._found: dict[str, list[dict[str, Any]]] = {}
        for record in [] if self._folder is None else self._folder.records():
            if LAYERS_KEY in record.details:
                self._found[record.digest] = record.details[LAYERS_KEY]

    @property
    def sums_path(self) -> Path | None:
        """Path of the file for `QuerySums`; None without a folder."""
        return None if self._folder is None else self._folder.folder / SUMS_NAME

    def has(self, document: Document, layers: int) -> bool:
        """Returns whether there are figures for all layers of a document."""
        return len(self._found.get(document.digest, ())) == layers

    def layers(self, document: Document) -> list[dict[str, Any]]:
        """Returns the figures of a document's layers."""
        return self._found[document.digest]

    def add(self, document: Document, layers: list[dict[str, Any]], seconds: float) -> None:
        """Keeps the figures of a document's layers, as one complete line if there is a folder."""
        self._found[document.digest] = layers
        if self._folder is not None:
            key = (METHOD, METHOD, document.name, document.digest)
            details = {LAYERS_KEY: layers}
            self._folder.add(Record(*key, seconds=seconds, details=details, environment=self._environment))
