"""`hf-diffkv serve`: a server for OpenAI's protocol, many clients on one compressed cache."""

from __future__ import annotations

import copy
import os
import signal
import socket
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import click

from hf_diffkv.commands.console import Command, Failure, megabytes, one_line, paragraph
from hf_diffkv.commands.generate import SAMPLING
from hf_diffkv.commands.models import load_tokenizer, position_limit, supported_config, usable_device
from hf_diffkv.commands.options import (
    BUDGET_TYPE,
    PATH_TYPE,
    SIZE_TYPE,
    AtLeast,
    Between,
    ConfigChoice,
    Parsed,
    chain,
    choice_of,
    config_before,
    config_for,
    known_model,
    level_options,
    quiet_option,
    read_file,
    running_options,
)
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.checks import bytes_in
from hf_diffkv.config.until_full import PRECISE

# prefixes get the budget divided by this, in addition, by default
PREFIX_SHARE = 8
# may have the API key
API_KEY = "HF_DIFFKV_API_KEY"
# set by launchers of a model's ranks, such as torchrun
RANKS = "WORLD_SIZE"
# default share of the free memory, as in Transformers
ON_CPU, ON_GPU = 0.6, 0.9
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")

server_options = chain(
    click.option("--host", metavar="NAME", default="localhost", help="Address to listen on."),
    click.option("--port", metavar="N", type=click.IntRange(0, 65535), default=8000, help="0: any free port."),
    click.option("--name", metavar="NAME", help="What clients call the model.  [default: MODEL]"),
    click.option("--cors", is_flag=True, help="Accept requests from web pages of any origin."),
    click.option("--replicas", type=AtLeast(), help="Servers that Ray starts on its cluster, instead of one here."),
)

operation_options = chain(
    click.option(
        "--api-key", metavar="KEY", envvar=API_KEY, help=f"Key that clients must send.  [default: ${API_KEY}]"
    ),
    click.option("--open-metrics", is_flag=True, help="/metrics needs no key."),
    click.option("--max-queue", type=AtLeast(0), help="Most requests that may wait; others get 429."),
    click.option("--max-body", type=SIZE_TYPE, default="16MB", show_default=True, help="Of a request; more gets 413."),
    click.option("--timeout", metavar="S", type=Between(0, min_open=True), help="Most seconds per answer."),
    click.option("--grace", metavar="S", type=Between(0), default=30, help="Seconds to finish when stopped."),
    click.option("--log-format", type=click.Choice(LOG_FORMATS), default="text", help="json: one object per line."),
    click.option("--log-every", metavar="S", type=Between(0), default=10, help="Seconds between statistics; 0: none."),
    click.option("--log-level", metavar="L", type=click.Choice(LOG_LEVELS), default="error", help="Of the server."),
)

memory_options = chain(
    click.option(
        "--max-bytes",
        type=BUDGET_TYPE,
        help="Budget of all requests, e.g. 8GB, or 80% of free memory.  [default: --memory-share]",
    ),
    click.option(
        "--until-full",
        is_flag=True,
        help="Keep tokens at 8 bits until the budget is full, then lower heads to their own bits; texts then depend "
        "on the load.",
    ),
    click.option(
        "--memory-share",
        metavar="X",
        type=Between(0, 1, min_open=True),
        help="Budget as a share of the memory that is free once the model is loaded.  [default: 0.9; 0.6 on a CPU]",
    ),
    click.option("--max-requests", type=AtLeast(), help="Most in flight.  [default: as the budget allows]"),
    click.option("--max-length", type=AtLeast(2), help="Most tokens of a request.  [default: the model's]"),
    click.option("--max-batch-tokens", type=AtLeast(), help="Most tokens of a forward.  [default: 8192]"),
)

prefix_options = chain(
    click.option(
        "--prefix-bytes",
        type=Parsed("SIZE", lambda text: bytes_in(text, least=0)),
        help="Memory for prefixes, in addition to the budget; 0: none.  [default: 1/8 of it]",
    ),
    click.option("--prefix-folder", type=PATH_TYPE, help="For prefixes that do not fit in memory."),
    click.option("--prefix-folder-bytes", type=SIZE_TYPE, help="Most bytes of its files.  [default: no limit]"),
)

choice_options = chain(
    click.option("--greedy", is_flag=True, help="Always take the likeliest token."),
    click.option("--temperature", metavar="X", type=Between(min=0, min_open=True), help="Of sampled tokens."),
    click.option("--top-p", metavar="X", type=Between(0, 1, min_open=True), help="Sample from this share."),
    click.option("--top-k", type=AtLeast(), help="Sample from the N likeliest tokens."),
    click.option("--seed", metavar="N", type=int, help="For requests without their own seed."),
    click.option("--chat-template", metavar="FILE", help="Instead of the tokenizer's own."),
)


@click.command(
    "serve",
    cls=Command,
    help="Serve MODEL (a Hub id, a folder or a short name) to clients of OpenAI's protocol: /v1/chat/completions, "
    "/v1/completions, /v1/responses, /v1/models, /health. All requests share one compressed cache under a byte "
    "budget; a request without room waits, and one that can never fit is refused. GET /diffkv reports requests "
    "and memory, /metrics is for Prometheus. Each request has its own sampling; for fields that it leaves out, "
    "the options below or the model's generation_config apply.",
)
@click.argument("model", metavar="MODEL", callback=known_model)
@server_options
@operation_options
@memory_options
@prefix_options
@choice_options
@level_options
@running_options
@quiet_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    _check(options)
    # before there is anything to finish; the first process of a container would otherwise ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    choice = _choice(options)
    model_config = supported_config(options.model)
    config_before(choice, model_config)
    _check_length(options, position_limit(model_config))
    tokenizer = load_tokenizer(options.model)
    if options.chat_template is not None:
        tokenizer.chat_template = read_file(options.chat_template)
    if options.replicas is not None:
        from .replicas import serve_replicas

        return serve_replicas(options, choice, _generation(options), _batching(options))
    options.device = usable_device(options.device)
    with _listen(options) as listener:
        _serve(options, choice, model_config, tokenizer, listener)


def _check(options: SimpleNamespace) -> None:
    """Checks the options on their own. Raises `click.UsageError`."""
    # click treats an empty variable as one that is not set
    if options.api_key == "" or options.api_key is None and os.environ.get(API_KEY) == "":
        raise click.UsageError(f"the API key is empty; give --api-key or {API_KEY} one, or leave both out.")
    if options.api_key is not None and options.api_key != options.api_key.rstrip():
        # HTTP strips it from what clients send
        raise click.UsageError(f"the API key ends in white space; remove it from --api-key or {API_KEY}.")
    if options.max_bytes is not None and options.memory_share is not None:
        raise click.UsageError("--max-bytes and --memory-share cannot be combined; leave one out.")
    ranks = os.environ.get(RANKS, "1")
    if ranks not in ("", "1"):
        raise click.UsageError(
            f"{RANKS}={ranks} means that this is one of several processes of one model. serve runs a model in one "
            "process: it does not keep the others going, and they would not know its prefixes. Start a server for "
            "each GPU without torchrun, use --replicas, or have all ranks call generate_batch (docs/distributed.md)."
        )
    if options.prefix_folder_bytes is not None and options.prefix_folder is None:
        raise click.UsageError("--prefix-folder-bytes has no effect without --prefix-folder.")
    if options.prefix_folder is not None and options.prefix_folder.is_file():
        raise click.UsageError(
            f"--prefix-folder {options.prefix_folder} is a file; give a folder, which is created if missing."
        )
    drawn = [name for name in SAMPLING if getattr(options, name) is not None]
    if options.replicas is not None and options.port == 0:
        raise click.UsageError("--replicas needs a --port that is the same on all machines, not 0.")
    if options.greedy and drawn:
        raise click.UsageError(f"--greedy and --{drawn[0].replace('_', '-')} cannot be combined; leave one out.")


def _choice(options: SimpleNamespace) -> ConfigChoice:
    """Returns `choice_of`, with `until_full` if requested. Raises `click.UsageError` as `choice_of` does."""
    if not options.until_full:
        return choice_of(options)
    if options.max_bytes is None:
        # a precision until the budget is full needs a budget in the configuration
        share = options.memory_share
        if share is None:
            share = ON_CPU if usable_device(options.device) == "cpu" else ON_GPU
        options.max_bytes, options.memory_share = f"{100 * share:g}%", None
    choice = choice_of(options)
    try:
        if isinstance(choice, DiffKVConfig):
            return replace(choice, until_full=PRECISE.name)
        return {**choice, "until_full": PRECISE.name}
    except ValueError as error:
        raise click.UsageError(f"--until-full: {one_line(error)}") from error


def _check_length(options: SimpleNamespace, limit: int | None) -> None:
    if options.max_length is not None and limit is not None and options.max_length > limit:
        raise click.UsageError(
            f"--max-length {options.max_length} is above the model's max_position_embeddings of {limit}."
        )


def _listen(options: SimpleNamespace) -> socket.socket:
    """Returns a socket that is bound but not yet listening. Raises `click.UsageError` if it cannot be bound."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    # an invalid host name is a UnicodeError
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or one_line(error)
        raise click.UsageError(f"cannot listen on {options.host}:{options.port}: {reason}.") from error
    return listener


def _serve(
    options: SimpleNamespace, choice: ConfigChoice, model_config: Any, tokenizer: Any, listener: socket.socket
) -> None:
    try:
        from .server import metrics, parts  # noqa: F401
    except ImportError as error:
        raise Failure(one_line(error)) from error
    from .batching.servable import check_servable_config

    try:
        check_servable_config(model_config, options.model)
    except ValueError as error:
        raise Failure(f"{one_line(error)} transformers serve can serve it, without a compressed cache.") from error
    from hf_diffkv.running.models import load_model

    from .server.app import build_app
    from .server.logs import ServerLog
    from .server.run import run

    log = ServerLog(options.log_format, options.quiet)
    log.take_over()
    log.message(f"loading {options.model}")
    model = load_model(options.model, options.dtype, options.device, options.quiet, options.weights)
    config = config_for(choice, model)
    try:
        sampling = _sampling(options, model.generation_config)
        engine = _engine(options, model, config)
        _use_prefixes(options, model, config, engine)
    except (ValueError, MemoryError, RuntimeError, OSError) as error:
        raise Failure(one_line(error)) from error
    name = options.name or options.model
    memory = engine.memory()
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{listener.getsockname()[1]}"
    room = f"{megabytes(memory.max_bytes)} for requests of up to {memory.longest:,} tokens"
    try:
        # another server may have bound the same address and begun to listen while this one loaded its model
        listener.listen()
    except OSError as error:
        raise Failure(f"cannot listen on {options.host}:{options.port}: {error.strerror}.") from error
    ready = f"{name} at {address}/v1; {room}."
    log.message(ready, paragraph(ready))
    if tokenizer.chat_template is None:
        log.message("no chat template: /v1/chat/completions needs --chat-template")
    app = build_app(name, model, tokenizer, engine, sampling, options.seed)
    run(app, engine, listener, _operation(options), log)


def _operation(options: SimpleNamespace) -> Any:
    """Returns the `Operation` of the options."""
    from .server.operation import Operation

    return Operation(**{field.name: getattr(options, field.name) for field in fields(Operation)})


def _sampling(options: SimpleNamespace, generation_config: Any) -> Any:
    """Returns the sampling for requests that do not set their own. Raises `ValueError` like `Sampling.of`."""
    from .batching.sampling import Sampling

    config = copy.deepcopy(generation_config)
    config.update(**_generation(options))
    return Sampling.of(config)


def _generation(options: SimpleNamespace) -> dict[str, Any]:
    """Returns fields of `GenerationConfig`."""
    if options.greedy:
        return {"do_sample": False}
    chosen = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    return {"do_sample": True, **chosen} if chosen else {}


def _engine(options: SimpleNamespace, model: Any, config: DiffKVConfig) -> Any:
    """Returns the engine for all requests, not yet started."""
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    generation_config = copy.deepcopy(model.generation_config)
    generation_config.cache_implementation = "diffkv"
    generation_config.cache_config = config.to_dict()
    # each request has its own sampling; the engine's setting would apply to all of them
    generation_config.do_sample = False
    batching = ContinuousBatchingConfig(**_batching(options))
    hints = options.max_length and WorkloadHints(max_prompt_length=options.max_length - 1, max_generated_length=1)
    return model.init_continuous_batching(generation_config, batching, hints or None)


def _batching(options: SimpleNamespace) -> dict[str, Any]:
    """Returns fields of `ContinuousBatchingConfig`."""
    given = {
        "max_requests_per_batch": options.max_requests,
        "max_batch_tokens": options.max_batch_tokens,
        "max_memory_percent": options.memory_share,
    }
    return {name: value for name, value in given.items() if value is not None}


def _use_prefixes(options: SimpleNamespace, model: Any, config: DiffKVConfig, engine: Any) -> None:
    """Makes `engine` keep prefixes, unless the options turn that off or leave it open and the model rules it out."""
    if options.prefix_bytes == 0 and options.prefix_folder is None:
        return
    from hf_diffkv.prefixes import PrefixStore

    from .batching.until_full import rung_config

    limits = {"device_bytes": options.prefix_bytes, "host_bytes": 0}
    if options.prefix_bytes is None:
        share = engine.memory().max_bytes // PREFIX_SHARE
        # a GPU's memory is for the budget
        limits = {"device_bytes": 0, "host_bytes": share}
    folder = {"folder": options.prefix_folder, "folder_bytes": options.prefix_folder_bytes}
    try:
        store = PrefixStore(model, rung_config(config), **limits, **folder)
    except ValueError:
        if options.prefix_bytes is None and options.prefix_folder is None:
            return
        raise
    except OSError as error:
        raise Failure(f"--prefix-folder {options.prefix_folder} cannot be created: {error.strerror}.") from error
    engine.use_prefixes(store)
