"""The parts of Transformers' server that are replaced.

Importing this module raises `ImportError` where a release has another server (`compat.SERVER`).
"""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from transformers.utils.import_utils import is_serve_available

from ...extras import install

if not is_serve_available():
    raise ImportError(f"Transformers' server needs packages that are not installed: {install('serve')}.")

# refuses releases whose engine is another one
from ...compat import SERVER
from ..manager import DiffKVBatchingManager

SERVER.require()

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBGenerateManager, GenerationState

# fields of a request that say how long its answer may be
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")
# routes that load other models, unload this one, or run it outside the engine
NOT_SERVED = ("/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone")
# ids of the requests that an HTTP request has brought to the engine
submitted: ContextVar[list[str]] = ContextVar("submitted")


class RefusedError(Exception):
    """A request that is not taken, with the HTTP status and the reason for its client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ServedModel(ModelManager):
    """The one model that is served; nothing else is loaded, and it stays.

    Args:
        name: what clients call it.
        model, tokenizer: are there already.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        super().__init__(device=str(model.device))
        self.force_model = name
        self._model, self._tokenizer = model, tokenizer

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(
        self,
        model_id_and_revision: str,
        progress_callback: Any = None,
        tqdm_class: type | None = None,
        gguf_file: str | None = None,
    ) -> tuple[Any, Any]:
        return self._model, self._tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": ""}]

    def shutdown(self) -> None:
        """The engine is stopped by whoever started it."""


class Generation(CBGenerateManager):
    """Brings requests to an engine that runs already, and refuses those for which it has no room.

    Args:
        engine: started; its generation configuration says how tokens are chosen.
    """

    def __init__(self, engine: DiffKVBatchingManager) -> None:
        super().__init__()
        self._cb = engine

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue, Any]:
        self._admit(inputs, gen_config, request_id)
        handlers = self._cb.output_router.result_handlers
        # an answer may be there before the handler that waits for it; it runs when this method has returned
        self._cb.register_result_handler(request_id, lambda output: handlers[request_id][0](output))
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        self._admit(inputs, gen_config, request_id)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def _admit(self, inputs: dict[str, Any], gen_config: Any, request_id: str) -> None:
        """Raises `RefusedError` for a request that can never fit, or whose name another one has.

        A request that does not say how long its answer may be gets what the server would give it, or what there is
        room for.
        """
        self._check_alive(request_id)
        if request_id in self._cb.output_router.result_handlers:
            raise RefusedError(409, f"the request id {request_id!r} belongs to a request that is not done.")
        tokens, wanted = len(inputs["input_ids"]), gen_config.max_new_tokens
        try:
            if getattr(gen_config, "limited", True):
                self._cb.check_request(tokens, wanted)
            else:
                gen_config.max_new_tokens = min(wanted, self._cb.check_request(tokens, None))
        except ValueError as error:
            raise RefusedError(400, str(error)) from error
        submitted.get([]).append(request_id)

    def forget(self, request_id: str) -> None:
        """Ends a request for which nobody waits."""
        self._cb.cancel_request(request_id)
        self._cb.output_router.result_handlers.pop(request_id, None)


class OneEngine(GenerationState):
    """Has every request go to one engine."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(continuous_batching=True)
        self._cb_manager = generation

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Generation:
        return self._cb_manager


class _Limits:
    """Mixed into a handler: notes whether a request says how long its answer may be."""

    def _build_generation_config(self, body: dict, model_generation_config: Any, use_cb: bool = False) -> Any:
        config = super()._build_generation_config(body, model_generation_config, use_cb=use_cb)
        config.limited = any(body.get(name) is not None for name in LIMITS)
        return config


class Chat(_Limits, ChatCompletionHandler):
    """`/v1/chat/completions`."""


class Completion(_Limits, CompletionHandler):
    """`/v1/completions`."""


class Response(_Limits, ResponseHandler):
    """`/v1/responses`."""


def server_app(model: ServedModel, generation: Generation, cors: bool = False) -> Any:
    """Transformers' FastAPI application for one model."""
    state = OneEngine(generation)
    handlers = [handler(model, state) for handler in (Chat, Completion, Response)]
    # the other two routes are taken out below
    app = build_server(model, *handlers, None, None, state, enable_cors=cors)
    app.add_exception_handler(RefusedError, _refuse)
    app.router.routes[:] = [route for route in app.routes if getattr(route, "path", None) not in NOT_SERVED]
    return app


async def _refuse(request: Any, error: RefusedError) -> Any:
    from fastapi.responses import JSONResponse

    # the one is what clients of OpenAI's protocol read, the other what Transformers' own errors have
    reason = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": reason, "detail": str(error)}, status_code=error.status)
