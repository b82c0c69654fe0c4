"""Submits requests to the engine, and turns its outputs into answers."""

from __future__ import annotations

import asyncio
import copy
import queue
import random
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..batching.engine_names import CHILD, children
from ..batching.manager import DiffKVBatchingManager
from ..batching.records import RequestRecord
from ..batching.sampling import Sampling, TokenLogprobs
from .errors import RefusedError
from .markup import Markup
from .text import Transcript

# ids of the requests that an HTTP request has submitted to the engine
submitted: ContextVar[list[str]] = ContextVar("submitted")
# end token of answers without one
NO_END = -1
# maximum tokens per answer unless its client or the model asks for more
USUAL_LENGTH = 1024


@dataclass(frozen=True)
class Asked:
    """Request to the engine from one HTTP request.

    Attributes:
        prompts: token ids of each prompt.
        boundaries: boundaries of the first prompt, as in `DiffKVBatchingManager.add_request`.
        max_new_tokens: maximum tokens per answer; None for the default number, or fewer if there is less room.
        n: number of answers to each prompt.
        stop: strings that end an answer.
        ignore_eos: whether the model's end tokens do not end an answer.
        stream: whether to stream tokens as they are generated.
        parser: function that returns a parser of reasoning and tool calls for a prompt; None for no parser.
        calls: whether the model may call tools.
        continues: whether answers continue the text of their prompts, so that a leading space is kept.
    """

    prompts: list[list[int]]
    sampling: Sampling
    max_new_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    parser: Callable[[list[int]], Any] | None = None
    boundaries: tuple[int, ...] = ()
    continues: bool = False
    calls: bool = False


@dataclass(frozen=True)
class Step:
    """New part of one answer.

    Attributes:
        pieces: pieces of a `Transcript`.
        logprobs: new tokens, each with the offset of its text and its logprobs.
        finish_reason: "stop" or "length" in the last step.
    """

    pieces: list[Any] = field(default_factory=list)
    logprobs: list[tuple[int, int, TokenLogprobs]] = field(default_factory=list)
    finish_reason: str | None = None


class Run:
    """Answers to one HTTP request while they are generated. Iterating yields an answer's number and its new part.

    Attributes:
        prompt_tokens: number of tokens in all prompts.
        cached_tokens: number of prompt tokens that came from prefixes; final once the run has ended.
        completion_tokens: number of tokens in all answers so far.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens, self.completion_tokens = prompt_tokens, 0, 0
        # tuples of an answer's number and a step, or errors
        self.steps: asyncio.Queue[Any] = asyncio.Queue()
        # numbers of the unfinished answers
        self.open: set[int] = set()
        self.close: Callable[[], None] = lambda: None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Step]]:
        """Raises `RefusedError` if the engine fails."""
        try:
            while self.open:
                found = await self.steps.get()
                if isinstance(found, RefusedError):
                    raise found
                if found[1].finish_reason is not None:
                    self.open.discard(found[0])
                if not self.open:
                    self.close()
                yield found
        finally:
            self.close()

    async def collect(self) -> list[Step]:
        """Returns every answer as a whole, in order."""
        whole: dict[int, Step] = {}
        async for number, step in self:
            last = whole.setdefault(number, Step())
            whole[number] = Step(last.pieces + step.pieces, last.logprobs + step.logprobs, step.finish_reason)
        return [whole[number] for number in sorted(whole)]


class Generation:
    """Submits requests to a running engine, and refuses those for which it has no room.

    Args:
        engine: engine that has been started.
        tokenizer: fast tokenizer of the model.
        sampling: sampling for requests that do not set their own, except for the seed.
        seed: seed from which requests without one get theirs, in order of arrival; None for a random one.
    """

    def __init__(
        self, engine: DiffKVBatchingManager, tokenizer: Any, sampling: Sampling, seed: int | None = None
    ) -> None:
        self.engine, self.tokenizer, self.usual = engine, tokenizer, sampling
        # the first call may change the tokenizer's truncation, which concurrent threads must not do
        tokenizer("a")
        self._seeds = random.Random(seed)
        # requests ended by a stop string but not yet by the engine; the event is set once it ends them
        self._stopped: dict[str, asyncio.Event] = {}
        config = engine.model.generation_config
        self._usual_length = max(config.max_new_tokens or 0, USUAL_LENGTH)
        ends = engine.generation_config.eos_token_id
        self._ends = [ends] if isinstance(ends, int) else list(ends or [NO_END])

    @property
    def sampling(self) -> Sampling:
        """Sampling for the next request if it does not set its own."""
        return replace(self.usual, seed=self._seeds.getrandbits(63))

    @property
    def keeps_prefixes(self) -> bool:
        """Whether later requests may reuse prefixes of earlier ones."""
        return self.engine.prefixes is not None

    def check_alive(self) -> None:
        """Raises `RefusedError` if the engine has failed."""
        error = self.engine.failure
        if error is not None:
            raise RefusedError(503, f"the engine failed and takes no requests: {error}")

    async def start(self, request_id: str, asked: Asked) -> Run:
        """Submits a request to the engine.

        Raises:
            RefusedError: there is no room for it, its id belongs to another request, or the engine has stopped.
        """
        if CHILD in request_id:
            raise RefusedError(400, f"x-request-id: {request_id!r} has {CHILD!r} in it; choose another id.")
        names = [f"{request_id}-{i}" if i else request_id for i in range(len(asked.prompts))]
        answers = [[name, *children(name, asked.n - 1)] for name in names]
        flat = [name for each in answers for name in each]
        # a client that has received all of an answer may reuse its id
        for ended in [self._stopped[name] for name in flat if name in self._stopped]:
            await ended.wait()
        self.check_alive()
        handlers = self.engine.output_router.result_handlers
        if any(name in handlers for name in flat):
            raise RefusedError(409, f"the request id {request_id!r} belongs to a request that has not finished.")
        limits = [self._limit(prompt, asked.max_new_tokens) for prompt in asked.prompts]
        run = Run(sum(map(len, asked.prompts)))
        run.open = set(range(len(flat)))
        records: list[RequestRecord] = []

        def close() -> None:
            run.cached_tokens = sum(record.cached_tokens for record in records)
            for number in run.open:
                self.forget(flat[number])

        run.close = close
        try:
            for place, (prompt, limit) in enumerate(zip(asked.prompts, limits)):
                records.append(self._submit(run, place * asked.n, answers[place], prompt, limit, asked))
        except (RuntimeError, queue.Full) as error:
            close()
            raise RefusedError(503, f"the server takes no requests now: {error}") from error
        return run

    def forget(self, request_id: str) -> None:
        """Cancels a request that no client waits for, unless it is done or about to be."""
        if request_id not in self._stopped and request_id in self.engine.output_router.result_handlers:
            # outputs that still arrive would otherwise be kept; the engine removes this handler on cancellation
            self.engine.register_result_handler(request_id, lambda output: None)
            self.engine.cancel_request(request_id)

    def _limit(self, prompt: list[int], max_new_tokens: int | None) -> int:
        try:
            room = self.engine.check_request(len(prompt), max_new_tokens)
        except ValueError as error:
            raise RefusedError(400, str(error), code="context_length_exceeded") from error
        return room if max_new_tokens is not None else min(room, self._usual_length)

    def _submit(
        self, run: Run, first: int, names: list[str], prompt: list[int], limit: int, asked: Asked
    ) -> RequestRecord:
        ends = [NO_END] if asked.ignore_eos else self._ends
        # a parser decodes the whole prompt
        parser = None if asked.parser is None else asked.parser(prompt)
        for number, name in enumerate(names, first):
            markup = None if parser is None else self._markup(copy.deepcopy(parser), asked)
            transcript = Transcript(self.tokenizer, markup, asked.stop, prompt if asked.continues else ())
            answer = _Answer(run, number, transcript, ends)
            self.engine.register_result_handler(name, self._handler(answer, name))
            submitted.get([]).append(name)
        options = {"eos_token_id": ends, "num_children": len(names) - 1}
        # a stop string ends an answer as soon as it appears
        options |= {"max_new_tokens": limit, "streaming": asked.stream or bool(asked.stop)}
        options["boundaries"] = () if first else asked.boundaries
        return self.engine.submit(prompt, names[0], asked.sampling, **options)

    def _markup(self, parser: Any, asked: Asked) -> Markup:
        return Markup(parser, partial(asked.parser, []), self.tokenizer.all_special_tokens, asked.calls)

    def _handler(self, answer: _Answer, name: str) -> Callable[[Any], None]:
        def handle(output: Any) -> None:
            if output.is_finished() and name in self._stopped:
                self._stopped.pop(name).set()
            try:
                if output.error is not None:
                    self.check_alive()
                    answer.fail(RefusedError(500, f"the request failed: {output.error}"))
                elif answer.take(output):
                    self._stopped[name] = asyncio.Event()
                    self.engine.end_request(name, "stop")
            except RefusedError as error:
                answer.fail(error)
            except Exception as error:
                answer.fail(RefusedError(500, f"the answer could not be produced: {error}"))

        return handle


class _Answer:
    """Turns the engine's outputs for one answer into steps of its run."""

    def __init__(self, run: Run, number: int, transcript: Transcript, ends: list[int]) -> None:
        self._run, self._number, self._transcript, self._ends = run, number, transcript, ends
        self._taken = 0
        self._done = False

    def fail(self, error: RefusedError) -> None:
        """Ends the run with an error."""
        self._done = True
        self._run.steps.put_nowait(error)

    def take(self, output: Any) -> bool:
        """Adds what is new to the run. Returns whether the answer ended before the engine's request."""
        if self._done:
            return False
        pieces = [] if self._taken else self._transcript.begin()
        logprobs = []
        for token in output.generated_tokens[self._taken :]:
            if output.logprobs:
                logprobs.append((token, self._transcript.decoded, output.logprobs[self._taken]))
            self._taken += 1
            self._run.completion_tokens += 1
            pieces += self._transcript.add(token)
            if self._transcript.stopped:
                break
        self._done = self._transcript.stopped or output.is_finished()
        reason = None
        if self._done:
            pieces += self._transcript.end()
            # it may also be cut short, for example when the server stops
            last = output.generated_tokens[-1:]
            at_end = self._transcript.stopped or any(token in self._ends for token in last)
            reason = "stop" if at_end else "length"
        if pieces or logprobs or self._done:
            self._run.steps.put_nowait((self._number, Step(pieces, logprobs, reason)))
        return self._done and not output.is_finished()
