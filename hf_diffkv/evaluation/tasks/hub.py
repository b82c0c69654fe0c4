"""Tasks whose documents are rows of a public data set: a local copy of it, or the Hub."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import EvaluationError
from .base import Document, Source
from .chat import Prompt
from .generating import GeneratingTask
from .prompts import rng_for

Row = dict[str, Any]


class HubTask(GeneratingTask):
    """Rows of one data set, drawn at random by the seed; all of them where it has no more than asked for."""

    suites = ("hub",)
    count = 100
    length = None
    # id on the Hub, its configurations, its split, and the columns that are read
    repository = ""
    configs: tuple[str | None, ...] = (None,)
    split = "test"
    columns: tuple[str, ...] = ()

    @abstractmethod
    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        """What is asked and what `score_answer` needs to know."""

    def documents(self, source: Source) -> list[Document]:
        rows = self.rows(source)
        chosen = range(len(rows))
        if source.count < len(rows):
            chosen = sorted(rng_for(source, self.name, 0).sample(chosen, source.count))
        return [self._row_document(source, index, rows[index]) for index in chosen]

    def _row_document(self, source: Source, index: int, row: Row) -> Document:
        prompt, expected = self.prompt(row, rng_for(source, f"{self.name}/row", index))
        return self.document(source, f"{self.name}-{index}", prompt, expected)

    def rows(self, source: Source) -> Sequence[Row]:
        """The data set.

        Raises:
            EvaluationError: it cannot be had, is empty, or lacks columns.
        """
        rows = local_rows(source.datasets_folder, self.name, self.split)
        if rows is None:
            rows = self.hub_rows()
        if not len(rows):
            raise EvaluationError(f"task {self.name!r}: the data set is empty.")
        missing = [column for column in self.columns if column not in rows[0]]
        if missing:
            raise EvaluationError(f"task {self.name!r}: the data set lacks the column {missing[0]!r}.")
        return rows

    def hub_rows(self) -> Sequence[Row]:
        """The data set from the Hub, or from the copy of it that `datasets` keeps."""
        try:
            import datasets
        except ImportError as error:
            raise EvaluationError(f"task {self.name!r} needs a package: pip install datasets.") from error
        try:
            parts = [datasets.load_dataset(self.repository, config, split=self.split) for config in self.configs]
        except Exception as error:
            # the Hub fails in many ways: offline, gated, unknown, changed
            reason = " ".join(str(error).split())
            raise EvaluationError(
                f"task {self.name!r}: the data set {self.repository} cannot be loaded ({reason}). Go online, log in "
                "where it is gated, set HF_HOME to where it was downloaded before, or give --datasets-folder a folder "
                f"with {self.name}.jsonl."
            ) from error
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def local_rows(folder: Path | None, name: str, split: str) -> Sequence[Row] | None:
    """Rows of `FOLDER/NAME.jsonl` or of the data set saved in `FOLDER/NAME`; None where there is neither.

    Raises:
        EvaluationError: a folder that does not exist, or a copy that cannot be read.
    """
    if folder is None:
        return None
    if not folder.is_dir():
        raise EvaluationError(f"--datasets-folder {folder} is no folder.")
    file, saved = folder / f"{name}.jsonl", folder / name
    try:
        if file.is_file():
            return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if saved.is_dir():
            return _saved_rows(saved, split)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EvaluationError(f"cannot read the data set of task {name!r} in {folder}: {error}") from error
    return None


def _saved_rows(folder: Path, split: str) -> Sequence[Row]:
    """What `save_to_disk` wrote, or any folder that `load_dataset` reads."""
    import datasets

    written = [name for name in ("state.json", "dataset_dict.json") if (folder / name).exists()]
    if not written:
        return datasets.load_dataset(str(folder), split=split)
    saved = datasets.load_from_disk(str(folder))
    return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
