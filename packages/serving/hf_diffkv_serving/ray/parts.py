"""`generate`: answers a data set into a folder. A second run continues where the first one ended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pyarrow
import ray
import ray.data
from pyarrow import fs, parquet
from tqdm import tqdm

from .data import Generate

SUFFIX = ".parquet"


@dataclass(frozen=True)
class Summary:
    """Counts of a run of `generate`.

    Attributes:
        answered, failed: rows of this run with an answer, and with an error instead.
        skipped: rows that were in the folder before.
        prompt_tokens, answer_tokens: numbers of tokens in this run's prompts and answers.
    """

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


class Parts:
    """Parquet files in a folder, each of which is complete.

    Args:
        path: a folder, or a URI that `pyarrow.fs` understands, such as s3://bucket/folder.
    """

    def __init__(self, path: str) -> None:
        self._files: Any = fs.LocalFileSystem()
        self._folder = path
        if "://" in path:
            self._files, self._folder = fs.FileSystem.from_uri(path)

    def make(self) -> None:
        """Makes the folder, and removes files that ended workers left half written."""
        self._files.create_dir(self._folder, recursive=True)
        for info in self._files.get_file_info(fs.FileSelector(self._folder)):
            if info.base_name.startswith("writing-"):
                self._files.delete_file(info.path)

    def keys(self, column: str) -> set[Any]:
        """Returns the values of a column in all files.

        Raises:
            ValueError: a file lacks it.
        """
        found: set[Any] = set()
        for info in self._files.get_file_info(fs.FileSelector(self._folder)):
            if info.base_name.endswith(SUFFIX) and not info.base_name.startswith("writing-"):
                with self._files.open_input_file(info.path) as file:
                    table = parquet.ParquetFile(file)
                    if column not in table.schema_arrow.names:
                        raise ValueError(f"{info.path} has no column {column!r}; give another folder.")
                    found.update(table.read([column])[column].to_pylist())
        return found

    def write(self, table: pyarrow.Table, keys: list[Any]) -> None:
        """Writes rows to their own file, replacing one with the same keys."""
        name = hashlib.sha256(repr(keys).encode()).hexdigest()[:24] + SUFFIX
        half = f"{self._folder}/writing-{name}"
        with self._files.open_output_stream(half) as file:
            parquet.write_table(table, file)
        self._files.move(half, f"{self._folder}/{name}")


class GenerateParts(Generate):
    """Variant of `Generate` that writes its rows and returns their counts.

    Args:
        path, key: arguments of `generate`.
        done: reference to a Ray object with the keys of answered rows.
        model, **options: arguments of `Generate`.
    """

    def __init__(self, model: str, *, path: str, key: str, done: Any, **options: Any) -> None:
        self._parts, self._key, self._done = Parts(path), key, ray.get(done)
        super().__init__(model, **options)

    async def __call__(self, batch: pyarrow.Table) -> dict[str, list[int]]:
        """Answers and writes a batch, and returns the fields of a `Summary` as a row.

        Raises:
            ValueError: the batch has no column of keys or of prompts.
        """
        if self._key not in batch.column_names:
            raise ValueError(f"there is no column {self._key!r} among {batch.column_names}; set key= to one of them.")
        wanted = [key not in self._done for key in batch[self._key].to_pylist()]
        answered, failed, tokens = 0, 0, (0, 0)
        if any(wanted):
            table = await super().__call__(batch.filter(pyarrow.array(wanted)))
            self._parts.write(table, table[self._key].to_pylist())
            failed = sum(error is not None for error in table["error"].to_pylist())
            answered = table.num_rows - failed
            tokens = tuple(sum(table[name].to_pylist()) for name in ("prompt_tokens", "answer_tokens"))
        row = Summary(answered, failed, len(wanted) - sum(wanted), *tokens)
        return {name: [value] for name, value in vars(row).items()}


def generate(
    dataset: ray.data.Dataset,
    path: str,
    *,
    key: str,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 32,
    workers: dict[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Summary:
    """Answers a data set into Parquet files in a folder, once for each row. A later run continues where one ended.

    A file is written under another name and then renamed, so that it is always complete. Rows whose key is in the
    folder are skipped, even if they have an error. If a worker dies, Ray replaces it, and its rows are answered again.
    Read the answers with `ray.data.read_parquet(path)`.

    Args:
        dataset: dataset with a column of prompts and one of keys.
        path: folder that all machines see, or a URI that `pyarrow.fs` takes.
        key: name of the column whose values identify rows, integers or texts.
        concurrency: number of actors, each with its own model, or the fewest and the most.
        batch_size: number of rows that are answered and written together. The next batch starts while one finishes.
        workers: further arguments of `map_batches`, such as `num_gpus` and `num_cpus`.
        progress: whether to show a line with token counts besides Ray Data's progress bars.
        **options: arguments of `Generate`: the model, the column of prompts and so on.

    Raises:
        ValueError: the folder has other files, or columns are missing.
        ray.exceptions.RayError: workers failed for a reason other than a row.
    """
    parts = Parts(str(path))
    parts.make()
    done = ray.put(parts.keys(key))
    blocks = dataset.repartition(target_num_rows_per_block=batch_size, strict=True)
    fewest, most = (concurrency, concurrency) if isinstance(concurrency, int) else concurrency
    counted = blocks.map_batches(
        GenerateParts,
        batch_size=None,
        batch_format="pyarrow",
        fn_constructor_kwargs={"path": str(path), "key": key, "done": done, **options},
        compute=ray.data.ActorPoolStrategy(min_size=fewest, max_size=most, max_concurrent_calls_per_actor=2),
        **(workers or {}),
    )
    total = Summary()
    with tqdm(unit=" tokens", disable=not progress) as bar:
        for row in counted.iter_rows():
            total = Summary(**{name: value + int(row[name]) for name, value in vars(total).items()})
            bar.update(int(row["answer_tokens"]))
            bar.set_postfix(answered=total.answered, failed=total.failed, skipped=total.skipped)
    return total
