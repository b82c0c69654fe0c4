"""`hf-diffkv verify`: checks that DiffKV is correct, and good enough, for a model on a text."""

from __future__ import annotations

import dataclasses
import json
from shlex import quote
from types import SimpleNamespace
from typing import Any

import click

from .console import Command, Failure, one_line, paragraph, progress, table
from .models import load_tokenizer, position_limit, supported_config, usable_device
from .options import (
    MAX_KL,
    AtLeast,
    Between,
    ConfigChoice,
    choice_of,
    compression_options,
    config_before,
    config_for,
    json_option,
    max_bytes_option,
    model_option,
    quiet_option,
    running_options,
)

VERIFIED_LENGTH, VERIFIED_CONTINUED = 1024, 128
# precisions tried, cheapest first, if the configuration loses too much
GENTLER = ("K8V4", "K8V8")


@click.command(
    "verify",
    cls=Command,
    help="Check DiffKV with a model, teacher-forced on a text: whether a lossless cache reproduces the dense cache's "
    "predictions, how far the default configuration (or the one given) departs from them, and what it saves. If "
    "something is wrong or the loss is above --max-kl, the exit code is 1, and a setting that loses less is "
    "suggested.",
)
@model_option(required=True)
@click.option("--text", metavar="T", default="offline", help="UTF-8 file, Hub data set, or offline.")
@click.option("--documents", type=AtLeast(), default=1, help="Parts of the text.")
@click.option("--length", type=AtLeast(), default=VERIFIED_LENGTH, help="Tokens per prompt.")
@click.option("--continued", type=AtLeast(2), default=VERIFIED_CONTINUED, help="Tokens compared after it.")
@click.option("--max-kl", metavar="X", type=Between(min=0), default=MAX_KL, help="Mean KL to the dense cache, nats.")
@compression_options
@max_bytes_option
@running_options
@json_option
@quiet_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    outcomes, verdict, good = _verify(options, choice_of(options))
    if options.as_json:
        found = {"model": options.model, "good": good, "verdict": verdict, "max_kl": options.max_kl}
        found["outcomes"] = [{**dataclasses.asdict(each), "ratio": each.ratio} for each in outcomes]
        click.echo(json.dumps(found, indent=2))
    else:
        rows = [
            (each.name, f"{each.kl:.5f}", f"{each.top1:.1%}", f"{each.bytes / 1e6:,.2f} MB", f"{each.ratio:.1%}")
            for each in outcomes
        ]
        click.echo(table(("", "KL, nats", "same top-1", "cache", "of dense"), rows) + "\n")
    if not good:
        raise Failure(verdict)
    if not options.as_json:
        click.echo(paragraph(verdict))


def _verify(options: SimpleNamespace, choice: ConfigChoice) -> tuple[list[Any], str, bool]:
    """Measures the caches and returns the outcomes, the verdict, and whether the result is good."""
    progress(f"loading {options.model}", options.quiet)
    model_config = supported_config(options.model)
    config = config_before(choice, model_config)
    if options.length <= config.window + config.sinks:
        raise click.UsageError(
            f"--length {options.length}: the window of {config.window} and the sinks hold such a prompt uncompressed; "
            "increase it."
        )
    limit = position_limit(model_config)
    if limit is not None and options.length + options.continued > limit:
        raise click.UsageError(
            f"--length and --continued add up to {options.length + options.continued} tokens, but the model's "
            f"max_position_embeddings is {limit}; lower them."
        )
    tokenizer = load_tokenizer(options.model)
    device = usable_device(options.device)

    from ..calibration.texts import read_pieces
    from ..evaluation.methods import get_method
    from ..evaluation.methods.diffkv import DiffKVMethod
    from ..evaluation.tasks.text import stretches
    from ..evaluation.verification import ROUNDING, ROUNDING_FACTOR, EagerMethod, follow, measure
    from ..running.models import load_model
    from ..running.side_by_side import EXPECTED_ERRORS

    found = stretches(read_pieces(options.text), tokenizer, options.documents, options.length, options.continued)
    model = load_model(options.model, options.dtype, device, options.quiet, options.weights)
    config = config_for(choice, model)
    progress(f"dense cache: {options.documents} x {options.length + options.continued:,} tokens", options.quiet)
    dense = get_method("dense")
    expected = [follow(model, dense, document) for document in found]

    def run(name: str, fields: dict[str, Any], base: str | None = None) -> Any:
        return run_method(f"DiffKV, {name}", name, DiffKVMethod(fields, base))

    def run_method(what: str, name: str, method: Any) -> Any:
        progress(what, options.quiet)
        try:
            return measure(model, name, method, found, expected)
        except EXPECTED_ERRORS as error:
            raise Failure(one_line(error)) from error

    outcomes = [run("lossless", {}, "lossless")]
    if outcomes[0].kl > ROUNDING:
        outcomes.append(run_method("dense cache, eager attention", "dense, eager", EagerMethod()))
        if outcomes[0].kl > max(ROUNDING, ROUNDING_FACTOR * outcomes[1].kl):
            return (
                outcomes,
                f"a lossless cache is {outcomes[0].kl:.4f} nats from the dense one, more than rounding explains: "
                "DiffKV does not work with this model. Please report it, with the output of `hf-diffkv env`.",
                False,
            )
    chosen = run("chosen", config.to_dict())
    outcomes.append(chosen)
    if chosen.kl <= options.max_kl:
        return outcomes, _good(options.model, chosen, options.max_kl), True
    for name in GENTLER:
        flat = {"high": name, "low": name, "alpha_high": 0.0, "alpha_low": 0.0, "head_precisions": None}
        gentler = run(f"all {name}", {**config.to_dict(), **flat})
        outcomes.append(gentler)
        if gentler.kl <= options.max_kl:
            return outcomes, _bad(chosen, gentler, options.max_kl), False
    return outcomes, _bad(chosen, None, options.max_kl), False


def _good(name: str, chosen: Any, limit: float) -> str:
    found = f"Good: {chosen.kl:.4f} nats is within {limit:g}, the likeliest token is the same at {chosen.top1:.1%}"
    if chosen.ratio >= 1:
        return f"{found}, but the cache saves nothing at this --length; set it to that of your prompts."
    return (
        f"{found}, and the cache uses {chosen.ratio:.1%} of a dense one's bytes. `hf-diffkv calibrate --model "
        f"{quote(name)}` looks for a cheaper setting."
    )


def _bad(chosen: Any, better: Any, limit: float) -> str:
    lost = f"the configuration loses {chosen.kl:.4f} nats, more than {limit:g}, at {chosen.ratio:.1%} of a dense cache"
    if better is None:
        return f"{lost}, and so does K8V8 for every token; raise --max-kl, or keep the dense cache for this model."
    precision = better.name.removeprefix("all ")
    return (
        f"{lost}; use --alpha-high 0 --alpha-low 0 --high {precision}, which loses {better.kl:.4f} at "
        f"{better.ratio:.1%}."
    )
