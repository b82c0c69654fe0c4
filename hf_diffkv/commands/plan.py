"""`hf-diffkv plan`: computes the longest context and largest batch that fit, and the predicted loss of heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ..running.models import resolve_model
from .console import Command, Failure, megabytes, one_line, paragraph, progress, table
from .models import supported_config
from .options import (
    BUDGET_TYPE,
    PICTURE_TYPE,
    SIZE_TYPE,
    AtLeast,
    Between,
    chain,
    choice_of,
    config_for,
    dtype_option,
    format_options,
    json_option,
    model_option,
    note_of_heads,
)

if TYPE_CHECKING:
    from ..config import DiffKVConfig
    from ..heads.allocation import Loss
    from ..planning import BudgetPlan, ModelShape

DEFAULT_CONTEXT = 8192
SHARES = (0.0, 0.5, 1.0)
# maps a number of tokens to the bytes of one request
BytesOf = Callable[[int], int]

size_options = chain(
    click.option("--memory", type=SIZE_TYPE, required=True, help="Device memory, for example 24GB."),
    click.option("--reserve", type=SIZE_TYPE, help="Kept free for activations.  [default: a tenth of --memory]"),
    click.option("--weights", type=SIZE_TYPE, help="Size of the weights.  [default: from their files, or computed]"),
    click.option("--batch", type=AtLeast(), default=1, help="Requests with the longest context."),
    click.option(
        "--max-bytes",
        type=BUDGET_TYPE,
        help="Budget for caches, such as 8GB or 80%.  [default: all remaining memory]",
    ),
    click.option(
        "--context", type=AtLeast(), help="Tokens per request in the largest batch.  [default: 8192 or the model's]"
    ),
)


@click.command(
    "plan",
    cls=Command,
    help="Show which context and batch size fit in memory, from the model's configuration alone: no weights are "
    "loaded and nothing runs. DiffKV's bytes count whole pages, windows and tables. How many tokens are at the "
    "high level depends on the model and the text: `hf-diffkv inspect` measures it, --high-share sets it. Also "
    "show at how many tokens a cache that stays precise until its budget is full begins to lower heads, and "
    "where its room ends. If the model's heads were measured, also print the predicted loss at other sizes.",
)
@model_option(required=True)
@size_options
@click.option(
    "--high-share",
    metavar="X",
    type=Between(0, 1),
    multiple=True,
    help="Of the tokens, if there are two levels.  [default: 0, 0.5, 1]",
)
@format_options
@dtype_option
@click.option(
    "--plot",
    type=PICTURE_TYPE,
    help="Plot the predicted loss against bytes: png, svg or pdf, by file name.",
)
@json_option
def command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    choice = choice_of(options)
    progress(f"reading the configuration of {options.model}", options.as_json)
    model_config = supported_config(options.model)

    import torch

    from ..heads.allocation import loss_curve
    from ..planning import ModelShape, without_weights

    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    shape = ModelShape.of(model_config, resolve_model(options.model), dtype)
    weights = options.weights or shape.weight_bytes
    if weights is None:
        raise click.UsageError(f"the size of {options.model}'s weights is unknown; give --weights.")
    reserve = options.memory // 10 if options.reserve is None else options.reserve
    free = options.memory - reserve - weights
    if free <= 0:
        raise Failure(
            f"the weights use {megabytes(weights)}, which leaves nothing of {megabytes(options.memory)} after "
            f"{megabytes(reserve)} for activations; give a device with more --memory, or a smaller --reserve."
        )
    context = options.context = options.context or min(DEFAULT_CONTEXT, shape.limit or DEFAULT_CONTEXT)
    if shape.limit is not None and context > shape.limit:
        raise click.UsageError(f"--context {context} is above the model's max_position_embeddings of {shape.limit}.")
    # measured heads are recognised by the weight files
    model = without_weights(model_config)
    config = config_for(choice, model_config if model is None else model)
    own = (config.calibration or {}).get("ratio")
    losses = loss_curve(config.calibration or {}, [] if own is None else [own])
    try:
        budget = _budget(shape, config, free, options)
        compressed = _compressed(shape, config, options.high_share or SHARES)
        # dense caches have no budget
        tables = ((_dense(shape), None), (compressed, None if config.max_bytes is None else budget))
        rows = [
            {"cache": name, **_fit(bytes_of, shape, free, limit, options)}
            for caches, limit in tables
            for name, bytes_of in caches.items()
        ]
        filling = _filling(shape, config, model_config if model is None else model, budget, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = {
        "model": options.model,
        "memory": options.memory,
        "weights": weights,
        "reserve": reserve,
        "free": free,
        "batch": options.batch,
        "context": context,
        "limit": shape.limit,
        "layers": len(shape.layers),
        "compressed_layers": len(shape.compressed),
        "caches": rows,
        "until_full": None if filling is None else asdict(filling),
        "predicted_loss": [asdict(loss) for loss in losses],
    }
    text = f"{_text(found)}\n\n{_loss_text(config, losses, own)}" if losses else _text(found)
    if options.plot is not None:
        _draw_loss(config, losses, options.plot, options.model, options.as_json)
    click.echo(json.dumps(found, indent=2) if options.as_json else text)
    note = note_of_heads(choice, model_config, model)
    if note:
        progress(paragraph(note), options.as_json)


def _dense(shape: ModelShape) -> dict[str, BytesOf]:
    """Returns the function for each uncompressed cache."""
    from ..planning import FP8_BYTES

    dtype = str(shape.dtype).removeprefix("torch.")
    return {
        f"dense, {dtype}": shape.dense_bytes,
        "dense, fp8": lambda tokens: shape.dense_bytes(tokens, FP8_BYTES),
    }


def _compressed(shape: ModelShape, config: Any, shares: tuple[float, ...]) -> dict[str, BytesOf]:
    """Returns the function for each compressed cache."""
    found: dict[str, BytesOf] = {}
    # if levels do not depend on significance, all stored tokens are high
    for share in dict.fromkeys(sorted(shares, reverse=True)) if config.selects else (1.0,):
        name = config.low.name if share == 0 else config.high.name if share == 1 else f"{share:.0%} {config.high.name}"
        if config.head_precisions is not None:
            name = f"by head, {name}" if config.selects else "by head"
        found[f"DiffKV, {name}"] = lambda tokens, share=share: shape.diffkv_bytes(tokens, config, share)
    return found


def _budget(shape: ModelShape, config: DiffKVConfig, free: int, options: SimpleNamespace) -> int:
    """Returns the bytes that compressed layers may use.

    Raises:
        ValueError: `config.max_bytes` is above what is left for them.
    """
    left, budget = free - options.batch * shape.other_bytes(options.context), config.max_bytes
    if budget is None:
        return left
    if isinstance(budget, str):
        return int(left * float(budget.rstrip("%")) / 100)
    if budget > left:
        raise ValueError(
            f"max_bytes={budget} exceeds the {left} bytes left for caches; lower it, or increase --memory."
        )
    return budget


def _filling(
    shape: ModelShape, config: DiffKVConfig, model: Any, budget: int, options: SimpleNamespace
) -> BudgetPlan | None:
    """Plans how the budget fills up; None if tokens are not precise until then."""
    from ..cache.resolve import moments_for
    from ..planning import plan_budget

    if budget <= 0:
        return None
    known = moments_for(model, config) is not None
    return plan_budget(shape, replace(config, max_bytes=budget), options.batch, known)


def _fit(
    bytes_of: BytesOf, shape: ModelShape, free: int, budget: int | None, options: SimpleNamespace
) -> dict[str, int | float]:
    """Returns what fits into `free` bytes, of which compressed layers use at most `budget`; None means no limit."""
    from ..planning import MOST_PLANNED, longest

    def fits(tokens: int, batch: int) -> bool:
        held = batch * bytes_of(tokens)
        return held <= free and (budget is None or held - batch * shape.other_bytes(tokens) <= budget)

    context = options.context
    each = bytes_of(context)
    return {
        "bytes_per_token": each / context,
        "longest_context": longest(lambda tokens: fits(tokens, options.batch), shape.limit or MOST_PLANNED),
        "largest_batch": longest(lambda batch: fits(context, batch), free // each),
    }


def _text(found: dict[str, Any]) -> str:
    header = ("cache", "bytes per token", "longest context", "largest batch")
    rows, reached = [], False
    for row in found["caches"]:
        whole = row["longest_context"] == found["limit"]
        reached |= whole
        longest = f"{row['longest_context']:,}{'*' if whole else ''}"
        rows.append((row["cache"], f"{row['bytes_per_token']:,.0f}", longest, f"{row['largest_batch']:,}"))
    requests = "one request" if found["batch"] == 1 else f"each of {found['batch']} requests"
    lines = [
        paragraph(
            f"{megabytes(found['memory'])}: {megabytes(found['weights'])} weights, {megabytes(found['reserve'])} kept "
            f"for activations, {megabytes(found['free'])} for caches. Longest context of {requests}; "
            f"largest batch of requests with {found['context']:,} tokens."
        ),
        "",
        table(header, rows),
        "",
    ]
    if reached:
        lines.append(f"* the model's limit ({found['limit']:,})")
    if found["until_full"] is not None:
        lines.append(paragraph(_filling_text(found)))
    if found["compressed_layers"] < found["layers"]:
        lines.append(
            paragraph(
                f"DiffKV compresses {found['compressed_layers']} of {found['layers']} layers; the others are as in the "
                "dense cache and are counted too."
            )
        )
    lines.append(paragraph("A prompt needs extra memory while it runs; long ones may need more than is kept for it."))
    return "\n".join(lines)


def _filling_text(found: dict[str, Any]) -> str:
    """Describes when heads are lowered, and when that is no longer enough."""
    plan, limit = found["until_full"], found["limit"]
    budget = f"With a budget (max_bytes) of {megabytes(plan['max_bytes'])}, all tokens are {plan['precise']}"
    whose = "" if found["batch"] == 1 else f" of each of {found['batch']} requests"
    if plan["room_ends"] == 0:
        return f"A budget (max_bytes) of {megabytes(plan['max_bytes'])} does not hold the windows and tables{whose}."
    if limit is not None and plan["lowering_begins"] > limit:
        return f"{budget} up to the model's limit of {limit:,}{whose}; nothing is lowered."
    ends = plan["room_ends"]
    room = "there is room up to the model's limit" if ends == limit else f"room ends at {ends:,}"
    begins = f"{budget} at first; from {plan['lowering_begins']:,} tokens{whose} on, heads are lowered"
    return (
        f"{begins} to {plan['final']}, and {room}. When generating step by step, a page of tokens more or fewer fits."
    )


def _loss_text(config: DiffKVConfig, points: tuple[Loss, ...], own: float | None) -> str:
    """Formats a table of losses over bytes, with the configuration's own ratio marked."""
    from ..heads.allocation import SENSITIVITY

    rows = [
        (
            f"{point.ratio:.1%}{'*' if point.ratio == own else ''}",
            f"{point.each_head:.4f}",
            "" if point.one_for_all is None else f"{point.one_for_all:.4f} ({point.precision})",
        )
        for point in points
    ]
    bits = 8 * (config.calibration or {})[SENSITIVITY]["element_bytes"]
    title = (
        f"Predicted loss, as KL to the dense cache in nats, by bytes of a stored token, in % of those at {bits} bits "
        "per element:"
    )
    lines = [paragraph(title), "", table(("bytes", "a precision for each head", "one for all"), rows)]
    return "\n".join(lines if own is None else [*lines, "", "* the cache above"])


def _draw_loss(config: DiffKVConfig, points: tuple[Loss, ...], path: Path, name: str, quiet: bool) -> None:
    """Writes a plot of losses over bytes for the model `name`. Raises `click.UsageError` if heads were not measured."""
    from ..plot import loss

    if not points:
        raise click.UsageError(
            "--plot draws the predicted loss of heads, but this model's heads were not measured; `hf-diffkv calibrate "
            f"--model {quote(name)}` measures them."
        )
    try:
        loss(config).save(path)
    except (ImportError, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise Failure(f"--plot {path}: {reason.removesuffix('.')}.") from error
    progress(f"drew {path}", quiet)
