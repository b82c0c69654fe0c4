"""Errors for clients in the form of OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

# types of client errors by status; all others are an `invalid_request_error`
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorFields(BaseModel):
    """Fields of a `RefusedError`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorContent(BaseModel):
    """Body of every error response."""

    error: ErrorFields


# for the description of every route: FastAPI would otherwise list 422, which is never sent
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorContent, "description": "Refused, with the reason; 400 names the field that is wrong."},
    "5XX": {"model": ErrorContent, "description": "Not answered: the server is stopping, was too slow, or failed."},
}


class RefusedError(Exception):
    """Signals that a client gets an error instead of an answer.

    Args:
        status: HTTP status.
        param: field of the request that the error is about.
        code: machine-readable name of the error.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(reason)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def content(self) -> dict[str, Any]:
        """Body of the response."""
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # in ASCII: a request may contain what UTF-8 cannot represent
        headers = dict(self.headers or {})
        return Response(json.dumps(self.content()), self.status, headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Makes `app` report all errors in the same form."""

    def refused(request: Request, error: Any) -> Response:
        return error.response()

    def invalid(request: Request, error: Any) -> Response:
        return from_validation(error).response()

    def elsewhere(request: Request, error: Any) -> Response:
        return RefusedError(error.status_code, str(error.detail), headers=error.headers).response()

    def failed(request: Request, error: Exception) -> Response:
        return RefusedError(500, f"the server failed: {type(error).__name__}: {error}").response()

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, elsewhere)
    app.add_exception_handler(Exception, failed)


def from_validation(error: RequestValidationError) -> RefusedError:
    """Returns an error that names the first invalid field."""
    found = error.errors()[0]
    # the first part says that it was in the body
    path = found["loc"][1:]
    if found["type"] == "json_invalid" or not path:
        return RefusedError(400, f"the body must be a JSON object, sent as application/json: {found['msg']}.")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    reason = "is unknown; leave it out" if found["type"] == "extra_forbidden" else found["msg"]
    return RefusedError(400, f"{param}: {reason}.", param)
