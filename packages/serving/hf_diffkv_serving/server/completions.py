"""`/v1/completions`: its request body and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ..batching.sampling import Sampling
from .answers import NEVER, Answer, event, usage_of
from .errors import RefusedError
from .fields import MOST_LOGPROBS, Count, SeveralChoices, only, refusal
from .generation import Asked, Run, Step
from .text import joined

# maximum prompts, and maximum answers, per request
MOST_PROMPTS = 2048


def _prompts(value: Any) -> Any:
    """Returns any of the four forms as a list of strings and of token ids."""
    if isinstance(value, str) or isinstance(value, list) and value and all(type(each) is int for each in value):
        value = [value]
    if not isinstance(value, list) or not value or len(value) > MOST_PROMPTS:
        raise refusal(f"it must be a string, a list of token ids, or a list of 1 to {MOST_PROMPTS} of these")
    for i, each in enumerate(value):
        ids = isinstance(each, list) and each and all(type(token) is int and token >= 0 for token in each)
        if not ids and not isinstance(each, str):
            raise refusal(f"prompt {i} is neither a string nor a list of token ids")
    return value


class CompletionBody(SeveralChoices):
    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: only(1) = None
    echo: only(False) = None
    suffix: only() = None


class CompletionAnswer(Answer):
    """A completion."""

    body: CompletionBody

    def asked(self, usual: Sampling) -> Asked:
        body = self.body
        if len(body.prompt) * (body.n or 1) > MOST_PROMPTS:
            raise RefusedError(400, f"n: a request may ask for {MOST_PROMPTS} answers, of all prompts together.", "n")
        return Asked(
            prompts=[self._ids(prompt, i) for i, prompt in enumerate(body.prompt)],
            sampling=body.sampling(usual, body.logprobs),
            max_new_tokens=body.max_tokens,
            n=body.n or 1,
            stop=tuple(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            stream=bool(body.stream),
            continues=True,
        )

    def _ids(self, prompt: str | list[int], place: int) -> list[int]:
        """Returns the token ids. Raises `RefusedError` if there are none or the model lacks one."""
        if isinstance(prompt, str):
            try:
                ids = self.served.tokenizer(prompt).input_ids
            # text that UTF-8 cannot represent
            except (TypeError, ValueError) as error:
                raise RefusedError(400, f"prompt {place} is not a text: {error}", "prompt") from error
            if not ids:
                raise RefusedError(400, f"prompt {place} has no tokens.", "prompt")
            return ids
        size = self.served.model.get_input_embeddings().weight.shape[0]
        if max(prompt) >= size:
            raise RefusedError(400, f"prompt {place} has token {max(prompt)}; the model has {size}.", "prompt")
        return prompt

    def _object(self, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        head = {"id": f"cmpl-{self.request_id}", "object": "text_completion", "created": self.created}
        return {**head, "model": self.served.name, "choices": choices, **others}

    def _choice(self, number: int, step: Step) -> dict[str, Any]:
        reason, logprobs = step.finish_reason, self._logprobs(step)
        return {"index": number, "text": joined(step.pieces, str), "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        if self.body.logprobs is None or not step.logprobs:
            return None
        text = self.served.tokenizer.decode
        tops = [
            {text([each]): max(logprob, NEVER) for each, logprob in (*found.top, (token, found.logprob))}
            for token, _, found in step.logprobs
        ]
        return {
            "tokens": [text([token]) for token, *_ in step.logprobs],
            "token_logprobs": [found.logprob for *_, found in step.logprobs],
            "top_logprobs": tops,
            "text_offset": [offset for _, offset, _ in step.logprobs],
        }

    def whole(self, run: Run, answers: list[Step]) -> dict[str, Any]:
        return self._object([self._choice(i, step) for i, step in enumerate(answers)], usage=usage_of(run))

    async def events(self, run: Run) -> AsyncIterator[str]:
        # in a stream with token counts, other chunks have null
        usage = {"usage": None} if self.body.with_usage else {}
        async for number, step in run:
            yield event(self._object([self._choice(number, step)], **usage))
        if self.body.with_usage:
            yield event(self._object([], usage=usage_of(run)))
        yield "data: [DONE]\n\n"

    def failed(self, error: RefusedError) -> str:
        return event(error.content())
