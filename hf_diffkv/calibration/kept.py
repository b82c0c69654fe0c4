"""Keeps a model's measured figures layer by layer, so that an interrupted measurement can continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluation.environment import describe_environment
from ..evaluation.records import Record, RunFolder
from ..evaluation.tasks import Document
from ..heads.weights import model_digest

# folder of the records within a run's folder, their method, and the file for sums of query moments
FOLDER, METHOD, SUMS_NAME = "heads", "heads", "queries.safetensors"
LAYER_KEY = "layer"


class Kept:
    """Figures of layers by document, in a folder or only in memory.

    Args:
        model: loaded model that is measured.
        output: folder of the run; None keeps figures only in memory.

    Raises:
        EvaluationError: the folder cannot be written, or holds a run of another model or dtype.
    """

    def __init__(self, model: Any, output: Path | str | None) -> None:
        self._environment = describe_environment(model.device)
        settings = {"model": model_digest(model), "dtype": str(model.dtype).removeprefix("torch.")}
        self._folder = None if output is None else RunFolder(Path(output) / FOLDER, settings)
        self._found: dict[str, dict[int, dict[str, Any]]] = {}
        for record in [] if self._folder is None else self._folder.records():
            if LAYER_KEY in record.details:
                self._put(record.digest, record.details)

    @property
    def sums_path(self) -> Path | None:
        """Path of the file for `QuerySums`; None without a folder."""
        return None if self._folder is None else self._folder.folder / SUMS_NAME

    def layers(self, document: Document) -> dict[int, dict[str, Any]]:
        """Returns a document's figures by layer, in the order of layers."""
        return dict(sorted(self._found.get(document.digest, {}).items()))

    def add(self, document: Document, layer: int, figures: dict[str, Any], seconds: float) -> None:
        """Keeps a layer's figures, as one complete line if there is a folder."""
        details = {LAYER_KEY: layer, **figures}
        self._put(document.digest, details)
        if self._folder is not None:
            key = (METHOD, f"{LAYER_KEY}-{layer}", document.name, document.digest)
            self._folder.add(Record(*key, seconds=seconds, details=details, environment=self._environment))

    def _put(self, digest: str, details: dict[str, Any]) -> None:
        self._found.setdefault(digest, {})[details[LAYER_KEY]] = details

    def missing(self, document: Document, layers: int) -> list[int]:
        """Returns the layers without figures for a document."""
        found = self._found.get(document.digest, {})
        return [layer for layer in range(layers) if layer not in found]
