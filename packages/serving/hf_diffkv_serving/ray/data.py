"""`Generate`: an actor of Ray Data that answers prompts with one engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from .engine import EngineOptions, load_engine


@dataclass(frozen=True)
class AnsweredRow:
    """Columns that are added to a row.

    Attributes:
        answer: text of the answer; None if there is none.
        answer_ids: its tokens, including the one that ended it.
        prompt_tokens, answer_tokens: numbers of tokens.
        error: reason why there is no answer; None if there is one.
    """

    answer: str | None
    answer_ids: list[int]
    prompt_tokens: int
    answer_tokens: int
    error: str | None


COLUMNS = tuple(column.name for column in fields(AnsweredRow))


class _EngineFailedError(Exception):
    """Signals that the engine ended, with all its requests."""


class Generate:
    """Answers a column of prompts, for `Dataset.map_batches`. Each actor has its own model and engine.

        dataset.map_batches(
            hf_diffkv.ray.Generate,
            fn_constructor_kwargs={"model": "smollm2", "config": {"max_bytes": 8 << 30}, "max_new_tokens": 64},
            compute=ray.data.ActorPoolStrategy(size=4),
            num_gpus=1,
        )

    A prompt is a text, a list of messages (for the chat template) or a list of token ids. Rows keep their columns and
    get those of `AnsweredRow`. If a row cannot be answered, "error" says why, and the others continue. Its prompt
    has no room, is of another type, or made the engine fail even when it ran alone.

    Batches may be `pyarrow.Table`s, `pandas.DataFrame`s or dicts of NumPy arrays, and are returned as the same type.
    Several may be under way at once, and the engine runs the rows of all.

    Args:
        model, **options: fields of `EngineOptions`.
        prompts: name of the column of prompts.
        max_new_tokens: maximum tokens per answer; None uses the limit in the model's generation configuration or, if it
            has none, as many as there is room for.

    Raises:
        EvaluationError, ValueError, MemoryError: raised by `load_engine`.
    """

    def __init__(
        self, model: str, *, prompts: str = "prompt", max_new_tokens: int | None = None, **options: Any
    ) -> None:
        self._column, self._max_new_tokens = prompts, max_new_tokens
        loaded = load_engine(EngineOptions(model, **options))
        self._tokenizer, self._manager = loaded.tokenizer, loaded.manager
        loaded.start()
        self._under_way: set[asyncio.Future] = set()
        self._alone: asyncio.Lock = asyncio.Lock()

    async def __call__(self, batch: Any) -> Any:
        """Returns the batch with the columns of `AnsweredRow`.

        Raises:
            ValueError: the batch has no column of prompts.
        """
        answers = await self.answers(_column(batch, self._column))
        return _with_columns(batch, dict(zip(COLUMNS, map(list, zip(*map(astuple, answers))))))

    async def answers(self, prompts: list[Any]) -> list[AnsweredRow]:
        """Returns an answer for each prompt."""
        while self._alone.locked():
            async with self._alone:
                pass
        found = []
        for prompt, tried in zip(prompts, await asyncio.gather(*map(self._answer, prompts), return_exceptions=True)):
            if isinstance(tried, _EngineFailedError):
                tried = await self._answer_alone(prompt)
            if isinstance(tried, BaseException):
                raise tried
            found.append(tried)
        return found

    def close(self) -> None:
        """Ends the engine and all its requests."""
        self._manager.stop(hard_stop=True)

    async def _answer(self, prompt: Any) -> AnsweredRow:
        """Answers a prompt. Raises `_EngineFailedError` if the engine ends with it."""
        try:
            ids = self._tokens(prompt)
            self._manager.check_request(len(ids), self._max_new_tokens)
        except (ValueError, TypeError) as error:
            return AnsweredRow(None, [], 0, 0, " ".join(str(error).split()))
        name, ended = uuid.uuid4().hex, asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            if not ended.done():
                ended.set_result(output)

        self._manager.register_result_handler(name, take)
        self._under_way.add(ended)
        try:
            if self._manager.add_request(ids, request_id=name, max_new_tokens=self._max_new_tokens) is None:
                self._manager.output_router.result_handlers.pop(name, None)
                raise _EngineFailedError("it has ended")
            output = await ended
        finally:
            self._under_way.discard(ended)
        if output.error is None:
            new = output.generated_tokens
            text = self._tokenizer.decode(new, skip_special_tokens=True)
            return AnsweredRow(text, new, len(ids), len(new), None)
        if not self._runs():
            raise _EngineFailedError(output.error)
        return AnsweredRow(None, [], len(ids), 0, output.error)

    async def _answer_alone(self, prompt: Any) -> AnsweredRow:
        """Answers a prompt by itself, on an engine that is restarted if it has failed."""
        async with self._alone:
            while self._under_way:
                await asyncio.wait(set(self._under_way))
            self._start_anew()
            try:
                return await self._answer(prompt)
            except _EngineFailedError as error:
                self._start_anew()
                return AnsweredRow(None, [], 0, 0, f"the engine failed with this prompt alone: {error}")

    def _runs(self) -> bool:
        # an engine that failed refuses requests before it hands out the failures
        return self._manager.is_running() and self._manager.background_thread_status.can_accept_new_requests() is None

    def _start_anew(self) -> None:
        if not self._runs():
            # not `stop`, which would give the cache back
            self._manager.join(stop_trigger_time=0.0)
            self._manager.start()

    def _tokens(self, prompt: Any) -> list[int]:
        """Returns the token ids. Raises `ValueError` if it is no prompt."""
        items = [] if isinstance(prompt, str) or not hasattr(prompt, "__iter__") else list(prompt)
        ids: list[int] = []
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt).input_ids
        elif all(isinstance(item, Mapping) for item in items):
            # a table has every field in every message
            messages = [{name: value for name, value in item.items() if value is not None} for item in items]
            if messages:
                ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        elif all(hasattr(item, "__index__") for item in items):
            ids = [int(item) for item in items]
        if not ids:
            raise ValueError(
                f"{prompt!r:.80} in the column {self._column!r} is not a text, a list of messages or a list of "
                "token ids."
            )
        return ids


def _column(batch: Any, name: str) -> list[Any]:
    """Returns a column. Raises `ValueError` if there is none of that name."""
    names = list(getattr(batch, "column_names", batch))
    if name not in names:
        raise ValueError(f"there is no column {name!r} among {names}; set prompts= to the one that has the prompts.")
    column = batch[name]
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _with_columns(batch: Any, columns: dict[str, list[Any]]) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, **columns}
    if hasattr(batch, "append_column"):
        for name, values in columns.items():
            batch = batch.append_column(name, _arrow(name, values))
        return batch
    return batch.assign(**columns)


def _arrow(name: str, values: list[Any]) -> Any:
    """Returns an Arrow array that has the right type even if all values are None or empty."""
    import pyarrow

    types = {"answer_ids": pyarrow.list_(pyarrow.int64()), "answer": pyarrow.string(), "error": pyarrow.string()}
    return pyarrow.array(values, types.get(name, pyarrow.int64()))
