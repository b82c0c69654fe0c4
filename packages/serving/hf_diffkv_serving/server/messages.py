"""Chat messages and tools: what is accepted, and the form that chat templates expect."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .errors import RefusedError
from .fields import Strict, only, refusal
from .marks import chat_marks

TEXTS = ("text", "input_text", "output_text")
# the last two come with the output of earlier responses
PART = {"type", "text", "annotations", "logprobs"}


def text_of(content: Any) -> Any:
    """Returns the text of a list of content parts, or anything else unchanged."""
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            raise refusal(f"part {i} has type {kind!r}; this server accepts text only")
        if not isinstance(part.get("text"), str):
            raise refusal(f"part {i} has no text")
        if unknown := {name for name, value in part.items() if value is not None} - PART:
            raise refusal(f"part {i} has {min(unknown)!r}, which is unknown; leave it out")
        texts.append(part["text"])
    return " ".join(texts)


def _parsed(arguments: str) -> str:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise refusal(f"they must be JSON: {error}") from error
    return arguments


Text = Annotated[str, BeforeValidator(text_of)]
Arguments = Annotated[str, AfterValidator(_parsed)]
Name = Annotated[str, Field(min_length=1)]


class CalledFunction(Strict):
    name: Name
    arguments: Arguments


class ToolCallGiven(Strict):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    # in streams
    index: int | None = None


class Message(Strict):
    """One message. An answer from OpenAI's client may be passed back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallGiven] | None = None
    tool_call_id: str | None = None
    annotations: only([]) = None
    audio: only() = None
    function_call: only() = None
    refusal: only() = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates read."""
        # templates do not know the newer name for this role
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        found["content"] = self.content or ""
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        others = {"name": self.name, "reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id}
        return {**found, **{name: value for name, value in others.items() if value is not None}}


def _with_content(messages: list[Message]) -> list[Message]:
    for i, message in enumerate(messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise refusal(f"message {i} has no content")
    return messages


Messages = Annotated[list[Message], Field(min_length=1), AfterValidator(_with_content)]


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # nothing holds the model to a schema
    strict: only(False) = None

    def for_template(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": self.model_dump(include={"name", "description", "parameters"} & self.model_fields_set),
        }


class Tool(Strict):
    type: Literal["function"]
    function: Function


def prompt_of(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template_options: dict[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of a chat whose next message is the model's.

    Args:
        tools: tools in the form that chat templates read.
        template_options: additional variables of the chat template.

    Raises:
        RefusedError: the template does not accept the chat, or has no place for tools.
    """
    if tokenizer.chat_template is None:
        raise RefusedError(400, "the model has no chat template; use /v1/completions, or serve with --chat-template.")
    options = template_options or {}
    taken = set(options) & set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken:
        name = f"chat_template_kwargs.{min(taken)}"
        raise RefusedError(400, f"{name} is not a variable of the chat template; leave it out.", name)
    given = [message.for_template() for message in messages]
    try:
        prompt = _rendered(tokenizer, given, tools, options)
        ignored = bool(tools) and prompt == _rendered(tokenizer, given, None, options)
    # templates are programs and raise their own errors
    except Exception as error:
        raise RefusedError(400, f"the chat template rejects these messages: {error}", "messages") from error
    if ignored:
        reason = "the model's chat template does not support tools; leave them out, or serve with --chat-template."
        raise RefusedError(400, reason, "tools")
    return prompt


def boundaries_of(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template_options: dict[str, Any] | None,
    prompt: list[int],
) -> tuple[int, ...]:
    """Returns the numbers of tokens after which other chats may differ from this one (marks.py).

    Args:
        prompt: result of `prompt_of` for the other arguments.
    """
    given = [message.for_template() for message in messages]
    try:
        return chat_marks(lambda said: _rendered(tokenizer, said, tools, template_options or {}), given, prompt)
    # a template may require the original text
    except Exception:
        return ()


def _rendered(
    tokenizer: Any, given: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
) -> list[int]:
    fixed = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(given, **fixed, **options))
