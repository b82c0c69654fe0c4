"""`/v1/chat/completions`: its request body and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from ..batching.sampling import Sampling
from .answers import Answer, event, usage_of
from .errors import RefusedError
from .fields import MOST_LOGPROBS, Count, SeveralChoices, one_of, only
from .generation import Asked, Run, Step
from .messages import Messages, Tool, boundaries_of, prompt_of
from .parts import ReasoningText, ToolCall, build_response_parser
from .text import joined


class ChatBody(SeveralChoices):
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: only("auto", "none") = None
    parallel_tool_calls: only(True) = None
    # from Transformers' server: variables for the chat template
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: only({"type": "text"}) = None
    modalities: only(["text"]) = None
    store: only(False) = None
    audio: only() = None
    function_call: only() = None
    functions: only() = None
    moderation: only() = None
    prediction: only() = None
    prompt_cache_options: only() = None
    prompt_cache_retention: only() = None
    reasoning_effort: only() = None
    verbosity: only() = None
    web_search_options: only() = None


class ChatAnswer(Answer):
    """A chat completion."""

    body: ChatBody

    def asked(self, usual: Sampling) -> Asked:
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError(400, "top_logprobs: it needs logprobs to be true.", "top_logprobs")
        tools = None if body.tool_choice == "none" else [tool.function for tool in body.tools or []]
        tokenizer = self.served.tokenizer
        described = [tool.for_template() for tool in tools] if tools else None
        chat = (tokenizer, body.messages, described, body.chat_template_kwargs)
        prompt = prompt_of(*chat)
        return Asked(
            prompts=[prompt],
            boundaries=boundaries_of(*chat, prompt) if self.served.generation.keeps_prefixes else (),
            sampling=body.sampling(usual, body.top_logprobs or 0 if body.logprobs else None),
            max_new_tokens=one_of(body, "max_completion_tokens", "max_tokens"),
            n=body.n or 1,
            stop=tuple(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            stream=bool(body.stream),
            parser=partial(build_response_parser, tokenizer, self.served.model, tools=described),
            calls=bool(described),
        )

    def _object(self, kind: str, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self.request_id}", "object": kind, "created": self.created}
        return {**head, "model": self.served.name, "choices": choices, **others}

    def _logprobs(self, step: Step) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": [self.with_top(token, found) for token, _, found in step.logprobs], "refusal": None}

    def _tool_calls(self, number: int, pieces: list[Any], before: int = 0) -> list[dict[str, Any]]:
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        return [
            {
                "id": f"call_{self.request_id}_{number}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls, before)
        ]

    def whole(self, run: Run, answers: list[Step]) -> dict[str, Any]:
        choices = []
        for number, step in enumerate(answers):
            calls, reasoning = self._tool_calls(number, step.pieces), joined(step.pieces, ReasoningText)
            message = {"role": "assistant", "content": joined(step.pieces, str), "refusal": None}
            message |= {"tool_calls": calls} if calls else {}
            message |= {"reasoning_content": reasoning} if reasoning else {}
            reason = _finish_reason(step, bool(calls))
            choices.append(
                {"index": number, "message": message, "logprobs": self._logprobs(step), "finish_reason": reason}
            )
        return self._object("chat.completion", choices, usage=usage_of(run))

    async def events(self, run: Run) -> AsyncIterator[str]:
        # in a stream with token counts, other chunks have null
        usage = {"usage": None} if self.body.with_usage else {}
        called = dict.fromkeys(run.open, 0)

        def chunk(number: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> str:
            choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return event(self._object("chat.completion.chunk", [choice], **usage))

        for number in sorted(run.open):
            yield chunk(number, {"role": "assistant", "content": ""})
        async for number, step in run:
            calls = self._tool_calls(number, step.pieces, called[number])
            deltas = [{name: text} for name, text in _texts(step.pieces) if text]
            deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls, called[number])]
            called[number] += len(calls)
            logprobs = self._logprobs(step) if step.logprobs else None
            for i, delta in enumerate(deltas or ([{}] if logprobs else [])):
                yield chunk(number, delta, None if i else logprobs)
            if step.finish_reason is not None:
                yield chunk(number, {}, None, _finish_reason(step, called[number] > 0))
        if self.body.with_usage:
            yield event(self._object("chat.completion.chunk", [], usage=usage_of(run)))
        yield "data: [DONE]\n\n"

    def failed(self, error: RefusedError) -> str:
        return event(error.content())


def _texts(pieces: list[Any]) -> list[tuple[str, str]]:
    return [("reasoning_content", joined(pieces, ReasoningText)), ("content", joined(pieces, str))]


def _finish_reason(step: Step, called: bool) -> str | None:
    return "tool_calls" if called and step.finish_reason == "stop" else step.finish_reason
