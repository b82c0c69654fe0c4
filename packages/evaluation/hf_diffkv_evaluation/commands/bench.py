"""`hf-diffkv bench`: compares time per token and memory of caches on this machine."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import click

from hf_diffkv.commands.console import Command, megabytes, one_line, paragraph, progress, table
from hf_diffkv.commands.models import load_tokenizer, position_limit, supported_config, usable_device
from hf_diffkv.commands.options import (
    RATIO,
    AtLeast,
    choice_of,
    json_option,
    model_option,
    preset_options,
    quiet_option,
    running_options,
)
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.import_hook import NAME

DEFAULT_CACHES = "dense,static,quanto:4,diffkv,diffkv:K8V4"
CONTEXT = 2048


@click.command(
    "bench",
    cls=Command,
    help="Fill caches with the same text and let them take turns generating in one process: milliseconds per token, "
    "bytes held, seconds for the prompt. Caches are the methods of `hf-diffkv evaluate`, and static for "
    "Transformers' StaticCache; dense is always included. Methods whose package is missing are left out.",
)
@model_option(required=True)
@click.option("--caches", metavar="A,B", default=DEFAULT_CACHES, help="Caches to compare.")
@click.option("--context", type=AtLeast(), help=f"Tokens in the prompt.  [default: {CONTEXT} or fewer]")
@click.option("--steps", type=AtLeast(), default=16, help="Generated tokens that are timed.")
@click.option("--text", metavar="T", default="offline", help="UTF-8 file, Hub data set, or offline.")
@click.option("--threads", type=AtLeast(), help="Threads of PyTorch.  [default: its own choice]")
@preset_options
@running_options
@json_option
@quiet_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    names = _names(options)
    progress(f"loading {options.model}", options.quiet)
    limit = position_limit(supported_config(options.model))

    import torch

    from hf_diffkv.calibration.texts import read_pieces
    from hf_diffkv.evaluation.environment import describe_environment
    from hf_diffkv.evaluation.tasks.text import stretches
    from hf_diffkv.running.models import load_model

    from ..timing import WARM_UP, time_steps, timed_method

    further = WARM_UP + options.steps
    context = options.context or max(1, min(CONTEXT, (limit or CONTEXT + further) - further))
    if limit is not None and context + further > limit:
        raise click.UsageError(
            f"--context and --steps add up to {context + further} tokens, but the model's max_position_embeddings is "
            f"{limit}; lower them."
        )
    methods = []
    for name in names:
        try:
            methods.append(timed_method(name, context + further))
        except EvaluationError as error:
            if "pip install" not in str(error):
                raise
            progress(f"{name} is left out: {one_line(error)}", options.quiet)
    device = usable_device(options.device)
    (document,) = stretches(read_pieces(options.text), load_tokenizer(options.model), 1, context, further)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(options.model, options.dtype, device, options.quiet, options.weights)
    ids = [*document.context, *document.continuation]
    found = time_steps(model, methods, ids, options.steps, lambda message: progress(message, options.quiet))
    environment = describe_environment(model.device)
    if options.as_json:
        figures = {"model": options.model, "context": context}
        figures |= {"caches": [dataclasses.asdict(each) for each in found], "environment": environment}
        click.echo(json.dumps(figures, indent=2))
    else:
        click.echo(_text(found, context, environment))


def _names(options: SimpleNamespace) -> list[str]:
    """Returns the caches, with dense. Raises `click.UsageError` for a preset or a ratio that no cache takes."""
    names = [name.strip() for name in options.caches.split(",") if name.strip()]
    choice = choice_of(options)
    if choice:
        if NAME not in names:
            given = "--preset" if options.preset else "--ratio"
            raise click.UsageError(f"{given} is for the cache {NAME!r}, which is not among --caches; add it.")
        chosen = options.preset or f"{RATIO}={options.ratio:g}"
        names = [f"{name}:{chosen}" if name == NAME else name for name in names]
    return list(dict.fromkeys(["dense", *names]))


def _text(found: list[Any], context: int, environment: dict[str, Any]) -> str:
    dense = found[0]
    rows = [
        (
            each.name,
            f"{each.ms_per_token:.1f} ms",
            f"{each.ms_quartiles[0]:.1f} to {each.ms_quartiles[1]:.1f}",
            megabytes(each.bytes),
            f"{each.bytes / dense.bytes:.0%}",
            f"{each.prompt_seconds:.2f} s",
        )
        for each in found
    ]
    header = ("cache", "per token", "half of them", "cache", "of dense", "prompt")
    threads = environment["threads"]
    where = (
        f"{context:,} tokens, {environment['device']}, {threads} thread{'s' if threads != 1 else ''}, "
        f"torch {environment['torch']}."
    )
    return f"{table(header, rows)}\n\n{paragraph(where)}"
