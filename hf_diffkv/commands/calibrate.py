"""`hf-diffkv calibrate`: measures the loss of a model's heads to choose bits for each, or measures thresholds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

from ..calibration.thresholds import ALPHA_HIGH, ALPHA_LOW
from ..config.presets import DEFAULT_PRESET, RATIOS
from .calibrate_heads import calibrate_heads
from .calibrate_thresholds import DOCUMENTS, TEXT_LENGTH, calibrate_thresholds
from .console import Command
from .options import MAX_KL, NUMBERS_TYPE, PATH_TYPE, AtLeast, model_option, quiet_option, running_options

# options that each select thresholds
OF_THRESHOLDS = (
    *("thresholds", "max_kl", "max_loss", "task", "method"),
    *("alpha_high", "alpha_low", "per_layer", "documents", "seed", "retry"),
)


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


@click.command(
    "calibrate",
    cls=Command,
    help="Measure what each attention head loses at few bits, and give each head the bits that minimise the model's "
    "loss at the bytes of --ratio. From then on, DiffKVCache(model) uses the result. This takes minutes; "
    "measurements are kept, so the same command continues an interrupted run, and another ratio takes "
    "seconds.\n\nWith --thresholds, or any option so marked, measure the thresholds that choose tokens instead, "
    "on real caches, and write the cheapest ones within the limit, for DiffKVConfig.from_pretrained. If none is "
    "good enough, the exit code is 1.",
)
@model_option(required=True)
@click.option(
    "--output",
    type=PATH_TYPE,
    help="For the configuration and the measurements; a run found there is continued.  [default: the model's folder "
    "in the user's cache]",
)
@click.option(
    "--text",
    metavar="T",
    help="UTF-8 file, Hub data set, or offline; for heads at least 4 x (--length + 32) tokens.  [default: "
    "Python's documentation; for thresholds EleutherAI/hendrycks_math]",
)
@click.option(
    "--ratio",
    type=float,
    metavar="R",
    help=f"Bytes of a stored token relative to the model's dtype.  [default: {RATIOS[DEFAULT_PRESET]:g}]",
)
@click.option(
    "--length",
    type=AtLeast(),
    help=f"Tokens per prompt.  [default: 1200; for thresholds {TEXT_LENGTH}, or the task's own]",
)
@running_options
@click.option("--thresholds", is_flag=True, help="Measure thresholds instead of heads.")
@click.option(
    "--max-kl", type=float, metavar="X", help=f"Thresholds: mean KL to the dense cache, nats.  [default: {MAX_KL}]"
)
@click.option("--max-loss", type=float, metavar="Y", help="Thresholds: most that the first figure of --task may drop.")
@click.option("--task", metavar="T", help="Thresholds: a task of `hf-diffkv evaluate`, instead of a text.")
@click.option(
    "--method",
    default="diffkv",
    metavar="M",
    help="Thresholds: the cache whose thresholds vary, e.g. diffkv:K6V4/K4V2.",
)
@click.option("--alpha-high", type=NUMBERS_TYPE, default=_listed(ALPHA_HIGH), help="Thresholds: values to try.")
@click.option("--alpha-low", type=NUMBERS_TYPE, default=_listed(ALPHA_LOW), help="Thresholds: values to try.")
@click.option(
    "--per-layer", is_flag=True, help="Thresholds: then try higher ones layer by layer, in two runs per layer."
)
@click.option(
    "--documents", type=AtLeast(), help=f"Thresholds: number of documents.  [default: {DOCUMENTS}, or the task's own]"
)
@click.option("--seed", type=int, default=0, metavar="N", help="Thresholds: seed of the task's documents.")
@click.option("--retry", is_flag=True, help="Thresholds: rerun what failed before.")
@quiet_option
@click.pass_context
def command(context: click.Context, **given: Any) -> None:
    options = SimpleNamespace(**given)
    typed = [name for name in OF_THRESHOLDS if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if not typed:
        calibrate_heads(options)
    elif options.ratio is None:
        calibrate_thresholds(options)
    else:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise click.UsageError(
            f"--ratio gives each head its bits, but {names} measures thresholds for choosing tokens; leave one or the "
            "other out."
        )
