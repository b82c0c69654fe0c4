"""`hf-diffkv evaluate`: methods against tasks, as a table and as plots."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .errors import EvaluationError

# what runs without the Hub
OFFLINE = "offline"
DEFAULT_METHODS = "dense,diffkv,diffkv:K8V4,diffkv:K4V2,quanto:4"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_command(commands: Any) -> None:
    """Adds `evaluate` to an `argparse` command line."""
    parser = commands.add_parser(
        "evaluate",
        help="judge caches by what they keep at which real bytes",
        description="Runs every method on every task with one model and writes a line per method, task and document to "
        "OUTPUT/records.jsonl, a table to OUTPUT/table.md and plots beside them. Run it again to go on.",
    )
    parser.set_defaults(run=evaluate)
    add = parser.add_argument
    add("--model", required=True, help="Hub id, folder, or a short name: smollm2, gemma3-270m, tiny-lm")
    add("--methods", default=DEFAULT_METHODS, metavar="A,B", help="family:option+option (default: %(default)s)")
    add("--tasks", default=OFFLINE, metavar="X,Y", help="default: all that need no Hub")
    add("--output", type=Path, required=True, metavar="FOLDER", help="a folder; one that holds a run goes on with it")
    add("--documents", type=int, metavar="N", help="documents per task (default: the task's own)")
    add("--length", type=int, metavar="N", help="tokens of a prompt (default: the task's own)")
    add("--seed", type=int, default=0, metavar="N", help="of the documents (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="auto", help="of the model (default: as it was saved)")
    add("--device", help="for example cpu or cuda:0 (default: cuda where there is one)")
    add("--retry", action="store_true", help="run again what failed before")
    add("--quiet", action="store_true", help="no progress bar")
    add("--list", action=_List, help="print methods and tasks, and end")


class _List(argparse.Action):
    """Prints what there is and ends, as --help does."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from .methods import METHODS
        from .tasks import TASKS

        for title, registry in (("methods", METHODS), ("tasks", TASKS)):
            print(f"{title}: {', '.join(registry.names())}")
        parser.exit()


def evaluate(options: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        EvaluationError: something the user can put right; what was measured is kept.
    """
    from .isolated import run_isolated
    from .loading import load
    from .methods import get_method
    from .records import RunFolder
    from .runner import check_fits, documents_of, run

    methods = [get_method(name) for name in _names("--methods", options.methods)]
    tasks = _tasks(options.tasks)
    for name in ("documents", "length"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise EvaluationError(f"--{name} {getattr(options, name)}: give at least 1.")
    tokenizer, model = load(options.model, options.dtype, options.device, options.quiet)
    prepared = [
        (task, documents_of(task, tokenizer, options.documents, options.length, options.seed)) for task in tasks
    ]
    for task, documents in prepared:
        check_fits(task, documents, model)
    settings = {"model": options.model, "dtype": str(model.dtype).removeprefix("torch."), "seed": options.seed}
    folder = RunFolder(options.output, settings)
    here = [method for method in methods if method.environment is None]
    elsewhere = [method for method in methods if method.environment is not None]
    failed: list[Any] = []
    try:
        run(model, tokenizer, here, prepared, folder, retry=options.retry, quiet=options.quiet)
        # another process loads it again
        del model
        failed = run_isolated(
            elsewhere,
            prepared,
            folder,
            model=options.model,
            device=options.device,
            retry=options.retry,
            quiet=options.quiet,
        )
    finally:
        records = [*folder.all_records(), *failed]
        if records:
            _write_report(folder.folder, records, options.quiet)
    return 0


def _names(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise EvaluationError(f"{option} names nothing; see --list.")
    return names


def _tasks(text: str) -> list[Any]:
    from .tasks import TASKS, get_task

    names = []
    for name in _names("--tasks", text):
        names += [n for n in TASKS.names() if TASKS.find(n).offline] if name == OFFLINE else [name]
    return [get_task(name) for name in dict.fromkeys(names)]


def _write_report(folder: Path, records: list[Any], quiet: bool) -> None:
    from .plots import plot_tasks
    from .report import markdown

    table = markdown(records)
    (folder / "table.md").write_text(table)
    if not quiet:
        print(table)
    try:
        plot_tasks(records, folder)
    except ImportError as error:
        print(f"no plots: {error}")
    print(f"Wrote {folder / 'records.jsonl'} and {folder / 'table.md'}.")
