"""Fields that request bodies share, and the checks on them.

Every field of OpenAI's protocol is either honoured, or refused if it asks for something: `only` lists the values that
ask for nothing. Types are strict, and unknown fields are errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ..batching.sampling import Sampling
from .errors import RefusedError

# range of a 64-bit integer
LEAST_INTEGER, GREATEST_INTEGER = -(2**63), 2**63 - 1
# alternatives, choices and stop strings that a client may ask for
MOST_LOGPROBS, MOST_CHOICES, MOST_STOPS = 20, 128, 16


def refusal(reason: str) -> PydanticCustomError:
    """Returns the error for a validator to raise. `reason` follows the field's name."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason})


def only(*values: Any) -> Any:
    """Returns the type of a field that accepts only these values or None."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            allowed = "".join(f" or set it to {each!r}" for each in values)
            raise refusal(f"this server does not support it; leave it out{allowed}")
        return value

    return Annotated[Any, AfterValidator(check)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Label = str | None
Count = Annotated[int, Field(ge=1, le=GREATEST_INTEGER)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS), BeforeValidator(_as_list)]


class Strict(BaseModel):
    """Base class of the objects in a request."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    # would add characters to hide lengths
    include_obfuscation: only(False) = None


class Body(Strict):
    """Fields that all routes accept.

    `Sampling` fields that are left out use the server's values. `user` and similar fields are labels for the operator
    and do not affect answers.
    """

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # none of the next five is in all of OpenAI's routes
    top_k: Annotated[int, Field(ge=-1, le=GREATEST_INTEGER)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=LEAST_INTEGER, le=GREATEST_INTEGER)] | None = None
    ignore_eos: bool | None = None
    metadata: dict[str, str] | None = None
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    service_tier: only("auto", "default") = None

    def sampling(self, usual: Sampling, top_logprobs: int | None) -> Sampling:
        """Returns the sampling of this request. Fields that it does not set come from `usual`."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        return replace(usual, **given, top_logprobs=top_logprobs)


class SeveralChoices(Body):
    """Fields of the routes that can return several answers."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    logit_bias: only({}) = None
    frequency_penalty: only(0, 0.0) = None
    presence_penalty: only(0, 0.0) = None

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def one_of(body: Body, first: str, second: str) -> Any:
    """Returns the value of a field with two names. Raises `RefusedError` if they differ."""
    one, other = getattr(body, first), getattr(body, second)
    if None not in (one, other) and one != other:
        raise RefusedError(400, f"{second}: it contradicts {first}; leave it out.", second)
    return other if one is None else one
