"""The application on tiny models within this process: over HTTP with a thread of its own, and without."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.utils.chat_parsing import ResponseParser

from hf_diffkv import DiffKVConfig, PrefixStore
from hf_diffkv.running.models import TINY_LM

NAME = "org/tiny"
SLOTS, BUDGET = 6, 12_000_000
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{% if message.role == 'user' and loop.last %}{{ message.content }}"
    "{% else %}@{{ message.role }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.tree }}{% endfor %}{{ '\n' }}{% endif %}"
    "{% endfor %}{{ closing or '' }}"
)
# how calls of tools look, for the tests that have a model say them
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "@assistant=",
    "fields": {
        "reasoning_content": {"open": "<", "close": ">", "content": "text"},
        "tool_calls": {
            "open": "[",
            "close": "]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


@functools.cache
def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(TINY_LM)
    loaded.chat_template = TEMPLATE
    return loaded


@functools.cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)


def markup(calls: bool = True) -> Any:
    """Returns a `Markup` of `RESPONSE_TEMPLATE`."""
    from hf_diffkv_serving.server.markup import Markup

    parser = functools.partial(ResponseParser, RESPONSE_TEMPLATE, prefix="")
    return Markup(parser(), parser, tokenizer().all_special_tokens, calls)


def expected(prompt: str, new: int) -> str:
    """Returns the answer of `generate()` with Transformers' own cache."""
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    output = reference().generate(ids, max_new_tokens=new, do_sample=False)
    return tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@functools.cache
def reference() -> Any:
    # the served one has another attention meanwhile
    return AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)


@contextmanager
def engine(**options: Any) -> Iterator[Any]:
    """A lossless one that runs, and keeps prefixes."""
    fields = {**DiffKVConfig.lossless().to_dict(), "max_bytes": BUDGET}
    ends = model().generation_config.eos_token_id
    config = GenerationConfig(
        cache_implementation="diffkv", cache_config=fields, do_sample=False, eos_token_id=ends, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(max_batch_tokens=96, max_requests_per_batch=SLOTS, **options)
    running = model().init_continuous_batching(config, batching)
    running.use_prefixes(PrefixStore(model(), DiffKVConfig.lossless(), device_bytes=4 << 20))
    running.start()
    try:
        yield running
    finally:
        running.stop(hard_stop=True)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of a server with this application."""
    import uvicorn

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    started = threading.Event()
    server.startup = _noting(server.startup, started)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def _noting(startup: Any, started: threading.Event) -> Any:
    async def start(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        started.set()

    return start
