"""The parts of Transformers' server used here, which split a model's text into reasoning, tool calls and an answer.

Importing this module raises `ImportError` if the release has a different server (`compat.SERVER`).
"""

# ruff: noqa: E402

from __future__ import annotations

from hf_diffkv.extras import install

try:
    import fastapi  # noqa: F401
    import pydantic  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"a server needs packages that are not installed: {install('serve')}.") from error

from ..compat import SERVER

SERVER.require()

from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    response_events_to_chunks,
)

__all__ = ["ReasoningText", "ToolCall", "build_response_parser", "response_events_to_chunks"]
