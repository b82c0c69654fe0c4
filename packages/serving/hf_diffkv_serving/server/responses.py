"""`/v1/responses`: its request body and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..batching.sampling import Sampling
from .answers import Answer, event
from .errors import RefusedError
from .fields import MOST_LOGPROBS, Body, Count, Strict, only
from .generation import Asked, Run, Step
from .messages import Function, Message, Messages, boundaries_of, prompt_of
from .parts import build_response_parser
from .response_input import messages_of
from .response_output import ResponseOutput


class ResponseTool(Function):
    type: Literal["function"]


class ResponseStreamOptions(Strict):
    include_obfuscation: only(False) = None


def _flat(tools: Any) -> Any:
    """Flattens tools that have the form of chat completions."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": tool.get("type"), **tool["function"]}
        if isinstance(tool, dict) and tool.keys() == {"type", "function"} and isinstance(tool["function"], dict)
        else tool
        for tool in tools
    ]


class ResponseBody(Body):
    input: Annotated[Messages, BeforeValidator(messages_of)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[ResponseTool], BeforeValidator(_flat)] | None = None
    tool_choice: only("auto", "none") = None
    parallel_tool_calls: only(True) = None
    # from Transformers' server: variables for the chat template
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    text: only({}, {"format": {"type": "text"}}) = None
    reasoning: only({}) = None
    store: only(False) = None
    background: only(False) = None
    truncation: only("disabled") = None
    access_programs: only() = None
    background_options: only() = None
    context_management: only() = None
    conversation: only() = None
    image: only() = None
    max_tool_calls: only() = None
    moderation: only() = None
    previous_response_id: only() = None
    prompt: only() = None
    prompt_cache_options: only() = None
    prompt_cache_retention: only() = None


class _Numbers:
    """Numbers events from 0."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, content: dict[str, Any]) -> str:
        self._next += 1
        return event({**content, "sequence_number": self._next - 1}, content["type"])


@dataclass(frozen=True)
class ResponseAnswer(Answer):
    """A response.

    Attributes:
        numbered: counter of the events of its stream.
    """

    body: ResponseBody
    numbered: _Numbers = field(default_factory=_Numbers)

    @property
    def _with_logprobs(self) -> bool:
        return bool(self.body.include) or self.body.top_logprobs is not None

    def asked(self, usual: Sampling) -> Asked:
        body = self.body
        instructions = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
        tools = None
        if body.tools and body.tool_choice != "none":
            tools = [tool.for_template() for tool in body.tools]
        tokenizer = self.served.tokenizer
        top_logprobs = body.top_logprobs or 0 if self._with_logprobs else None
        chat = (tokenizer, instructions + body.input, tools, body.chat_template_kwargs)
        prompt = prompt_of(*chat)
        return Asked(
            prompts=[prompt],
            boundaries=boundaries_of(*chat, prompt) if self.served.generation.keeps_prefixes else (),
            sampling=body.sampling(usual, top_logprobs),
            max_new_tokens=body.max_output_tokens,
            ignore_eos=bool(body.ignore_eos),
            stream=bool(body.stream),
            parser=partial(build_response_parser, tokenizer, self.served.model, tools=tools),
            calls=bool(tools),
        )

    def _object(self, status: str, output: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        body = self.body
        sampling = body.sampling(self.served.generation.usual, None)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "model": self.served.name,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, **tool.model_dump()} for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **others,
        }

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        """Returns logprobs in the form of this route, in which bytes are never null."""
        found = [self.with_top(token, each) for token, _, each in step.logprobs]
        for each in found:
            for one in (each, *each["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return found

    def _final(self, run: Run, output: ResponseOutput, status: str) -> dict[str, Any]:
        usage = {
            "input_tokens": run.prompt_tokens,
            "input_tokens_details": {"cached_tokens": run.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": run.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": run.prompt_tokens + run.completion_tokens,
        }
        return self._object(status, output.items, usage=usage)

    def whole(self, run: Run, answers: list[Step]) -> dict[str, Any]:
        output, complete = ResponseOutput(self.request_id), answers[0].finish_reason == "stop"
        for _ in (*output.add(answers[0], self._logprobs(answers[0])), *output.end(complete)):
            pass
        return self._final(run, output, "completed" if complete else "incomplete")

    async def events(self, run: Run) -> AsyncIterator[str]:
        output, numbered = ResponseOutput(self.request_id), self.numbered
        for status in ("created", "in_progress"):
            yield numbered.event({"type": f"response.{status}", "response": self._object("in_progress", [])})
        complete = True
        async for _, step in run:
            for found in output.add(step, self._logprobs(step)):
                yield numbered.event(found)
            complete = step.finish_reason != "length"
        for found in output.end(complete):
            yield numbered.event(found)
        status = "completed" if complete else "incomplete"
        yield numbered.event({"type": f"response.{status}", "response": self._final(run, output, status)})

    def failed(self, error: RefusedError) -> str:
        what = {"code": "server_error", "message": str(error)}
        return self.numbered.event({"type": "response.failed", "response": self._object("failed", [], error=what)})
