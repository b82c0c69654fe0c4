"""`hf-diffkv calibrate`: the cheapest thresholds whose loss is within a limit, or the precisions of heads that lose
least at a ratio, as a configuration."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

from ..calibration.thresholds import (
    ALPHA_HIGH,
    ALPHA_LOW,
    Candidate,
    Grid,
    Thresholds,
    cheapest,
    closest,
    sweep,
    table,
)
from ..config.diffkv_config import with_calibration
from ..config.files import CONFIG_NAME, QUERIES_NAME
from ..evaluation.errors import EvaluationError
from .console import Command, Failure
from .options import MAX_KL, AtLeast, Numbers, model_option, quiet_option, running_options

DOCUMENTS, TEXT_LENGTH, TEXT_CONTINUED = 4, 1024, 256
TABLE_NAME = "table.md"
# options that --ratio has no use for
OF_THRESHOLDS = (
    *("max_kl", "max_loss", "task", "method", "alpha_high", "alpha_low", "per_layer", "documents", "seed", "retry"),
)


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


@click.command(
    "calibrate",
    cls=Command,
    help=f"Measure thresholds on real caches and write the cheapest ones within the limit to OUTPUT/{CONFIG_NAME}, for "
    "DiffKVConfig.from_pretrained. With --ratio, measure instead what each head loses at few bits, and write the "
    "precisions of heads that lose least together. Measurements are kept: run the command again to continue, or for "
    "another limit or ratio. If nothing is good enough, the exit code is 1.",
)
@model_option(required=True)
@click.option("--output", type=Path, required=True, metavar="FOLDER", help="If it holds a run, that is continued.")
@click.option(
    "--text",
    metavar="T",
    help="UTF-8 file, data set of the Hub, or offline.  [default: EleutherAI/hendrycks_math; with --ratio generated "
    "text, facts and copies]",
)
@click.option(
    "--ratio", type=float, metavar="R", help="Bytes of a stored token over those in the model's dtype, such as 0.2."
)
@click.option("--max-kl", type=float, metavar="X", help=f"Mean KL to the dense cache, nats.  [default: {MAX_KL}]")
@click.option("--max-loss", type=float, metavar="Y", help="Most that the first figure of --task may fall.")
@click.option("--task", metavar="T", help="A task of `hf-diffkv evaluate`, instead of a text.")
@click.option("--method", default="diffkv", metavar="M", help="The cache whose thresholds vary, e.g. diffkv:K6V4/K4V2.")
@click.option("--alpha-high", type=Numbers(), default=_listed(ALPHA_HIGH), metavar="A,B", help="Values to try.")
@click.option("--alpha-low", type=Numbers(), default=_listed(ALPHA_LOW), metavar="A,B", help="Values to try.")
@click.option("--per-layer", is_flag=True, help="Then try higher thresholds layer by layer: two runs a layer.")
@click.option("--documents", type=AtLeast(), metavar="N", help=f"How many.  [default: {DOCUMENTS}, or the task's own]")
@click.option(
    "--length", type=AtLeast(), metavar="N", help=f"Tokens of a prompt.  [default: {TEXT_LENGTH}, or the task's own]"
)
@click.option("--seed", type=int, default=0, metavar="N", help="For the task's documents.")
@running_options
@click.option("--retry", is_flag=True, help="Run again what failed before.")
@quiet_option
@click.pass_context
def command(context: click.Context, **given: Any) -> None:
    options = SimpleNamespace(**given)
    if options.ratio is None:
        calibrate(options)
        return
    typed = [name for name in OF_THRESHOLDS if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if typed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise click.UsageError(f"--ratio chooses precisions and no thresholds; leave {names} out.")
    calibrate_heads(options)


def calibrate_heads(options: SimpleNamespace) -> None:
    """Runs the command with a ratio.

    Raises:
        EvaluationError: something the user can put right; what was measured is kept.
    """
    from ..calibration.documents import DOCUMENT_LENGTH, documents_for
    from ..calibration.heads import config_for, measure_heads
    from ..calibration.queries import keep_queries, moments_in
    from ..calibration.texts import read_pieces
    from ..config.allocation import check_ratio
    from ..config.found import keep
    from ..config.presets import head_size
    from ..evaluation.environment import describe_environment
    from ..evaluation.models import load_config, load_model

    model_config, tokenizer = load_config(options.model)
    head_dim, element_bytes = head_size(model_config)
    try:
        check_ratio(options.ratio, [(1, head_dim, head_dim)], element_bytes)
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    pieces = None if options.text is None else read_pieces(options.text)
    model = load_model(options.model, options.dtype, options.device, options.quiet)
    length = options.length or DOCUMENT_LENGTH
    measured = measure_heads(model, tokenizer, pieces, length=length, output=options.output, quiet=options.quiet)
    source = {"model": options.model, "dtype": str(model.dtype).removeprefix("torch."), "length": length}
    source |= {"text": options.text} if options.text else {}
    config = config_for(measured, options.ratio, **source, versions=describe_environment(model.device))
    config.save_pretrained(options.output)
    pieces = None if options.text is None else read_pieces(options.text)
    keep_queries(moments_in(options.output / QUERIES_NAME, model, documents_for(tokenizer, pieces, length)))
    kept, block = keep(measured), config.calibration
    print(
        f"Wrote {options.output / CONFIG_NAME}: stored tokens take {block['ratio']:.1%} of their bytes in the model's "
        f"dtype, predicted KL {block['predicted_kl']:.4f}. Beside it {QUERIES_NAME} has the moments of its queries. "
        f"What was measured is kept in {kept} for DiffKVCache(model)."
    )


def calibrate(options: SimpleNamespace) -> None:
    """Runs the command.

    Raises:
        EvaluationError: something the user can put right; what was measured is kept.
        Failure: nothing is good enough.
    """
    from ..calibration.measuring import Bench
    from ..evaluation.methods import get_method
    from ..evaluation.models import load_config, load_model
    from ..evaluation.records import RunFolder

    limit = _limit(options)
    method = get_method(options.method)
    _check_method(method, options.method)
    model_config, tokenizer = load_config(options.model)
    task, documents, source = _documents(options, tokenizer, model_config)
    # with thresholds a method may be another one than without
    levelled = get_method(Thresholds(options.alpha_high[0], 0.0).method(options.method))
    config = levelled.config_for(model_config)
    _check_length(documents, config.window + config.sinks)
    model = load_model(options.model, options.dtype, options.device, options.quiet)
    settings = {"model": options.model, "dtype": str(model.dtype).removeprefix("torch.")}
    folder = RunFolder(options.output, settings)
    run_options = {"retry": options.retry, "quiet": options.quiet}
    bench = Bench(model, tokenizer, options.method, task, documents, folder, **run_options)
    layers = len(method.new_cache(model).compressed_layers()) if options.per_layer else None
    candidates = sweep(bench.measure, limit, Grid(options.alpha_high, options.alpha_low), layers)

    text = table(candidates, limit, bench.title)
    (options.output / TABLE_NAME).write_text(text)
    print(text)
    chosen = cheapest(candidates, limit)
    path = options.output / CONFIG_NAME
    if chosen is None:
        # one of an earlier run had another limit
        path.unlink(missing_ok=True)
        raise Failure(_none(candidates, limit, bench.title))
    config = get_method(chosen.thresholds.method(options.method)).config_for(model_config)
    block = {
        **settings,
        **source,
        "digest": hashlib.sha256("".join(document.digest for document in documents).encode()).hexdigest()[:16],
        "method": options.method,
        "limit": {bench.loss_name: limit},
        "chosen": chosen.to_dict(bench.loss_name),
        "candidates": [candidate.to_dict(bench.loss_name) for candidate in candidates],
        "versions": bench.environment,
    }
    with_calibration(config, block).save_pretrained(options.output)
    print(f"Wrote {path}: {chosen.ratio:.1%} of the dense cache's bytes, {bench.title} {chosen.loss:.4f}.")


def _limit(options: SimpleNamespace) -> float:
    if (options.max_loss is None) != (options.task is None):
        raise EvaluationError("--max-loss and --task go together.")
    if options.task is not None and options.text is not None:
        raise EvaluationError("--task has documents of its own; leave --text out.")
    if options.task is not None and options.max_kl is not None:
        raise EvaluationError("--max-kl is for a text; with --task give --max-loss.")
    limit = options.max_loss if options.task is not None else MAX_KL if options.max_kl is None else options.max_kl
    if not 0 <= limit < float("inf"):
        raise EvaluationError(f"a limit of {limit} cannot be kept; give a number of at least 0.")
    return limit


def _check_method(method: Any, name: str) -> None:
    from ..evaluation.methods.diffkv import DiffKVMethod

    if not isinstance(method, DiffKVMethod) or method.fields.get("policy", "diffkv") != "diffkv":
        raise EvaluationError(f"--method {name}: only diffkv, with its own policy, goes by alpha_high and alpha_low.")


def _documents(options: SimpleNamespace, tokenizer: Any, model_config: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Task, documents, and how the written configuration describes them."""
    from ..calibration.texts import MATH, read_pieces
    from ..evaluation.runner import check_fits, documents_of
    from ..evaluation.tasks import get_task
    from ..evaluation.tasks.base import Source
    from ..evaluation.tasks.text import stretches

    most = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if options.task is not None:
        task = get_task(options.task)
        found = documents_of(task, Source(tokenizer, options.documents or 0, options.length, options.seed, most))
        source = {"task": options.task, "seed": options.seed}
    else:
        task, name = get_task("text"), options.text or MATH
        count, length = options.documents or DOCUMENTS, options.length or TEXT_LENGTH
        source = {"text": name, "length": length, "continued": TEXT_CONTINUED}
        found = stretches(read_pieces(name), tokenizer, count, length, TEXT_CONTINUED)
    check_fits(task, found, most)
    return task, found, {**source, "documents": len(found)}


def _check_length(documents: list[Any], exact: int) -> None:
    shortest = min(len(document.context) for document in documents)
    if shortest <= exact:
        raise EvaluationError(
            f"a prompt has {shortest} tokens, and {exact} are held uncompressed anyway; raise --length."
        )


def _none(candidates: list[Candidate], limit: float, title: str) -> str:
    best = closest(candidates)
    if best is None:
        return f"every configuration failed, the first with: {candidates[0].error}"
    pair = best.thresholds
    return (
        f"nothing is good enough: the best is alpha_high={pair.alpha_high:g}, alpha_low={pair.alpha_low:g} with "
        f"{title} {best.loss:.4f}, above {limit:g}, at {best.ratio:.1%} of the dense cache's bytes. Raise the limit, "
        "lower --alpha-high, or give more bits with --method."
    )
