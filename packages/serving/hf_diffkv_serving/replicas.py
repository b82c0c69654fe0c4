"""`hf-diffkv serve MODEL --replicas N`: replicas of the server, on the machines of a Ray cluster or on this one."""

from __future__ import annotations

import time
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from hf_diffkv.commands.console import Failure, one_line, progress
from hf_diffkv.commands.options import ConfigChoice, fields_of, read_file
from hf_diffkv.extras import install


def serve_replicas(options: SimpleNamespace, choice: ConfigChoice, generation: dict, batching: dict) -> None:
    """Serves until the process is interrupted.

    Args:
        options: options of the command.
        generation, batching: fields of `GenerationConfig` and of `ContinuousBatchingConfig`.

    Raises:
        Failure: Ray is missing, or it or the replicas cannot be started.
    """
    try:
        application = endpoint(options, choice, generation, batching)
        import ray
        from ray import serve

        progress(f"starting {options.replicas} replicas of {options.model}", options.quiet)
        address = {"host": options.host, "port": options.port}
        serve.start(proxy_location="EveryNode", http_options=address)
    except ImportError as error:
        raise Failure(f"--replicas needs Ray ({one_line(error)}): {install('ray')}.") from error
    except (ValueError, ConnectionError) as error:
        raise Failure(one_line(error)) from error
    try:
        serve.run(application)
        progress(f"{options.name or options.model} at http://{options.host}:{options.port}/v1", options.quiet)
        while True:
            time.sleep(1)
    except RuntimeError as error:
        raise Failure(one_line(error)) from error
    finally:
        serve.shutdown()
        ray.shutdown()


def endpoint(options: SimpleNamespace, choice: ConfigChoice, generation: dict, batching: dict) -> Any:
    """Returns the application that the options ask for. Raises `ImportError` if Ray is missing."""
    import ray

    from .ray import app
    from .ray.replica import ReplicaOptions

    if not ray.is_initialized():
        ray.init(log_to_driver=not options.quiet, logging_level="warning")
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0 and options.device in (None, "cuda")
    prefixes = None
    if options.prefix_bytes is not None or options.prefix_folder is not None:
        folder = options.prefix_folder and str(options.prefix_folder.absolute())
        prefixes = {"device_bytes": options.prefix_bytes or 0, "folder": folder}
        prefixes["folder_bytes"] = options.prefix_folder_bytes
    served = ReplicaOptions(
        name=options.name or options.model,
        chat_template=None if options.chat_template is None else read_file(options.chat_template),
        seed=options.seed,
        operation=_operation(options),
        log_format=options.log_format,
    )
    return app(
        options.model,
        replicas=options.replicas,
        num_gpus=1 if on_gpu else 0,
        served=served,
        deployment={"graceful_shutdown_timeout_s": options.grace},
        config=fields_of(choice),
        dtype=options.dtype,
        device=options.device,
        generation=generation,
        batching=batching,
        max_length=options.max_length,
        prefixes=prefixes,
    )


def _operation(options: SimpleNamespace) -> Any:
    from .server.operation import Operation

    return Operation(**{field.name: getattr(options, field.name) for field in fields(Operation)})
