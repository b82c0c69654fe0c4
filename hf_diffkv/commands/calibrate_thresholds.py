"""`hf-diffkv calibrate` for thresholds: measures them and chooses the cheapest ones within a loss limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..calibration.thresholds import Candidate, Grid, Thresholds, cheapest, closest, sweep, table
from ..config.diffkv_config import with_calibration
from ..evaluation.errors import EvaluationError
from ..heads.hub import CONFIG_NAME
from ..replacing import save_text
from .console import Failure
from .models import position_limit
from .options import MAX_KL, output_of

DOCUMENTS, TEXT_LENGTH, TEXT_CONTINUED = 4, 1024, 256
TABLE_NAME = "table.md"


def calibrate_thresholds(options: SimpleNamespace) -> None:
    """Runs the command for thresholds.

    Raises:
        EvaluationError: the user can correct the error; measurements are kept.
        Failure: no thresholds are good enough.
    """
    from ..calibration.documents import digest_of
    from ..calibration.measuring import Bench
    from ..evaluation.methods import get_method
    from ..evaluation.records import RunFolder
    from ..running.models import load_config, load_model

    limit = _limit(options)
    method = get_method(options.method)
    _check_method(method, options.method)
    model_config, tokenizer = load_config(options.model)
    task, documents, source = _documents(options, tokenizer, model_config)
    # setting thresholds may change other defaults of the method
    levelled = get_method(Thresholds(options.alpha_high[0], 0.0).method(options.method))
    config = levelled.config_for(model_config)
    _check_length(documents, config.window + config.sinks)
    model = load_model(options.model, options.dtype, options.device, options.quiet, options.weights)
    settings = {"model": options.model, "dtype": str(model.dtype).removeprefix("torch.")}
    output = output_of(options, model, "thresholds")
    folder = RunFolder(output, settings)
    run_options = {"retry": options.retry, "quiet": options.quiet}
    bench = Bench(model, options.method, task, documents, folder, **run_options)
    layers = len(levelled.new_cache(model).compressed_layers()) if options.per_layer else None
    candidates = sweep(bench.measure, limit, Grid(options.alpha_high, options.alpha_low), layers)

    text = table(candidates, limit, bench.title)
    save_text(text, output / TABLE_NAME)
    print(text)
    chosen = cheapest(candidates, limit)
    path = output / CONFIG_NAME
    if chosen is None:
        # removes the configuration of an earlier run with another limit
        path.unlink(missing_ok=True)
        raise Failure(_none(candidates, limit, bench.title))
    config = get_method(chosen.thresholds.method(options.method)).config_for(model_config)
    block = {
        **settings,
        **source,
        "digest": digest_of(documents),
        "method": options.method,
        "limit": {bench.loss_name: limit},
        "chosen": chosen.to_dict(bench.loss_name),
        "candidates": [candidate.to_dict(bench.loss_name) for candidate in candidates],
        "versions": bench.environment,
    }
    with_calibration(config, block).save_pretrained(output)
    print(f"Wrote {path}: {chosen.ratio:.1%} of the dense cache's bytes, {bench.title} {chosen.loss:.4f}.")


def _limit(options: SimpleNamespace) -> float:
    if (options.max_loss is None) != (options.task is None):
        raise EvaluationError("--max-loss and --task must be given together.")
    if options.task is not None and options.text is not None:
        raise EvaluationError("--task has its own documents; leave --text out.")
    if options.task is not None and options.max_kl is not None:
        raise EvaluationError("--max-kl is for a text; with --task give --max-loss.")
    limit = options.max_loss if options.task is not None else MAX_KL if options.max_kl is None else options.max_kl
    if not 0 <= limit < float("inf"):
        raise EvaluationError(f"a limit of {limit} cannot be met; give a number of at least 0.")
    return limit


def _check_method(method: Any, name: str) -> None:
    from ..evaluation.methods.diffkv import DiffKVMethod

    if not isinstance(method, DiffKVMethod) or method.fields.get("policy", "diffkv") != "diffkv":
        raise EvaluationError(f"--method {name}: only diffkv, with its own policy, uses alpha_high and alpha_low.")


def _documents(options: SimpleNamespace, tokenizer: Any, model_config: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns the task, its documents, and their description in the written configuration."""
    from ..calibration.texts import MATH, read_pieces
    from ..evaluation.runner import check_fits, documents_of
    from ..evaluation.tasks import get_task
    from ..evaluation.tasks.base import Source
    from ..evaluation.tasks.text import stretches

    most = position_limit(model_config)
    if options.task is not None:
        task = get_task(options.task)
        found = documents_of(task, Source(tokenizer, options.documents or 0, options.length, options.seed))
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
        f"no setting is good enough: the best is alpha_high={pair.alpha_high:g}, alpha_low={pair.alpha_low:g} with "
        f"{title} {best.loss:.4f}, above {limit:g}, at {best.ratio:.1%} of the dense cache's bytes. Raise the limit, "
        "lower --alpha-high, or use more bits with --method."
    )
