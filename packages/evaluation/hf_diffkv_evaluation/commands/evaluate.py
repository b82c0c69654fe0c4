"""`hf-diffkv evaluate`: measures methods on tasks, with a table and plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from hf_diffkv.commands.console import Command, paragraph, progress
from hf_diffkv.commands.models import position_limit
from hf_diffkv.commands.options import PATH_TYPE, AtLeast, model_option, quiet_option, running_options
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.replacing import save_text

# suite of small tasks
OFFLINE_SUITE = "offline"
# options of earlier releases, with what to do instead
GONE = {
    "--submit": "benchmarks/quality/peers.py has it",
    "--sample": "tasks that generate are run by hf-diffkv lm-eval, which samples with --gen_kwargs do_sample=True",
    "--batch-size": "tasks that generate are run by hf-diffkv lm-eval, with --batch_size",
}
DEFAULT_METHODS = "dense,diffkv,diffkv:K8V4,diffkv:K4V2,quanto:4"


def _list(context: click.Context, param: click.Parameter, value: bool) -> None:
    """Prints methods and tasks and exits, like --help."""
    if not value or context.resilient_parsing:
        return
    from hf_diffkv.evaluation.tasks import suites

    from ..methods import METHODS

    click.echo(f"methods: {', '.join(METHODS.names())}")
    for suite, names in suites().items():
        click.echo(f"suite {suite}: {', '.join(names)}")
    context.exit()


def _refuse(context: click.Context, param: click.Parameter, value: Any) -> None:
    """Refuses an option of earlier releases."""
    if value is not None:
        raise click.UsageError(f"{param.opts[0]} was removed; {GONE[param.opts[0]]}.")


OPTIONS = (
    model_option(required=True),
    click.option("--methods", default=DEFAULT_METHODS, metavar="A,B", help="family:option+option, see --list."),
    click.option(
        "--tasks",
        metavar="X,Y",
        help=f"Tasks or suites of them, see --list.  [default: those of {OFFLINE_SUITE} that the model's context "
        "holds]",
    ),
    click.option("--output", type=PATH_TYPE, required=True, help="If it holds a run, that run is continued."),
    click.option("--documents", type=AtLeast(), help="Per task.  [default: the task's own]"),
    click.option("--length", type=AtLeast(), help="Tokens per prompt.  [default: the task's own]"),
    click.option("--seed", type=int, default=0, metavar="N", help="For the documents."),
    click.option("--max-new-tokens", type=AtLeast(), help="In tasks that generate.  [default: the task's own]"),
    running_options,
    click.option("--retry", is_flag=True, help="Rerun what failed before."),
    quiet_option,
    click.option(
        "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Print methods and tasks."
    ),
)


def evaluate_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the command's options, as a decorator."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def gone_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options in `GONE`, as a decorator."""
    for name in GONE:
        flag: dict[str, Any] = {"is_flag": True, "default": None} if name == "--sample" else {}
        function = click.option(name, hidden=True, expose_value=False, callback=_refuse, **flag)(function)
    return function


@click.command(
    "evaluate",
    cls=Command,
    help="Run every method on every task with one model and write a line per method, task and document to "
    "OUTPUT/records.jsonl, a table to OUTPUT/table.md and plots beside them. Run it again to continue.",
)
@evaluate_options
@gone_options
def command(**given: Any) -> None:
    evaluate(SimpleNamespace(**given))


def evaluate(options: SimpleNamespace) -> tuple[list[Any], dict[str, Any]]:
    """Measures methods on tasks, and writes records, table and plots.

    Returns:
        Records of the folder that are up to date, and the settings of the run.

    Raises:
        EvaluationError: an error that the user can correct.
    """
    from hf_diffkv.evaluation.basis import bases_of
    from hf_diffkv.evaluation.records import RunFolder
    from hf_diffkv.evaluation.runner import check_fits, documents_of, run
    from hf_diffkv.evaluation.tasks.base import Source
    from hf_diffkv.running.models import load_config, load_model

    from ..fresh import fresh, methods_of
    from ..methods import get_method

    methods = [get_method(name) for name in _names("--methods", options.methods)]
    tasks = _tasks(OFFLINE_SUITE if options.tasks is None else options.tasks)
    config, tokenizer = load_config(options.model)
    limit = position_limit(config)
    source = Source(tokenizer, options.documents or 0, options.length, options.seed, options.max_new_tokens)
    prepared = [(task, documents_of(task, source)) for task in tasks]
    if options.tasks is None:
        prepared = _fitting(prepared, limit, options.quiet)
    for task, documents in prepared:
        check_fits(task, documents, limit)
    model = load_model(options.model, options.dtype, options.device, options.quiet, options.weights)
    dtype = str(model.dtype).removeprefix("torch.")
    settings = {"model": options.model, "dtype": dtype, "seed": options.seed}
    settings |= {"max_new_tokens": options.max_new_tokens} if options.max_new_tokens else {}
    folder = RunFolder(options.output, settings)
    here = [method for method in methods if method.environment is None]
    elsewhere = [method for method in methods if method.environment is not None]
    failed: list[Any] = []
    earlier = methods_of(record.method for record in folder.all_records())
    bases = bases_of(model, [*methods, *earlier])
    try:
        shared = {"retry": options.retry, "quiet": options.quiet}
        run(model, here, prepared, folder, **shared)
        # other processes load the model again
        del model
        for environment in dict.fromkeys(method.environment for method in elsewhere):
            mine = [method for method in elsewhere if method.environment is environment]
            failed += environment.run(mine, prepared, folder, model=options.model, device=options.device, **shared)
    finally:
        written = folder.all_records()
        records = [*fresh(written, bases), *failed]
        _tell_of_left_out(written, records, options.quiet)
        if records:
            _write_report(folder.folder, records, options.quiet)
    return records, settings


def _names(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise EvaluationError(f"{option} names nothing; see --list.")
    return names


def _tasks(text: str) -> list[Any]:
    from hf_diffkv.evaluation.tasks import get_task, suites

    known = suites()
    names = [task for name in _names("--tasks", text) for task in known.get(name, [name])]
    return [get_task(name) for name in dict.fromkeys(names)]


def _fitting(prepared: list[Any], limit: int | None, quiet: bool) -> list[Any]:
    """Returns the tasks that a model of `limit` tokens can run, with their documents, and reports the others."""
    from hf_diffkv.evaluation.runner import longest

    fitting = [(task, documents) for task, documents in prepared if limit is None or longest(documents) <= limit]
    left = [f"{task.name} ({longest(documents):,})" for task, documents in prepared if (task, documents) not in fitting]
    # if none fits, all stay, so that the first one is refused with an error
    if left and fitting:
        progress(f"left out because the model takes only {limit:,} tokens and they need more: {', '.join(left)}", quiet)
    return fitting or prepared


def _tell_of_left_out(written: list[Any], shown: list[Any], quiet: bool) -> None:
    """Reports the methods whose figures in the folder are not shown."""
    kept = {id(record) for record in shown}
    left = dict.fromkeys(record.method for record in written if id(record) not in kept)
    if left:
        progress(
            paragraph(
                "Left out because their figures are for other weights, another configuration or another version: "
                f"{', '.join(left)}. Name them in --methods to measure them again."
            ),
            quiet,
        )


def _write_report(folder: Path, records: list[Any], quiet: bool) -> None:
    from ..report import markdown, plot_tasks

    table = markdown(records)
    save_text(table, folder / "table.md")
    if not quiet:
        print(table)
    try:
        plot_tasks(records, folder)
    except ImportError as error:
        print(f"no plots: {error}")
    print(f"Wrote {folder / 'records.jsonl'} and {folder / 'table.md'}.")
