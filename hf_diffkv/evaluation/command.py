"""`hf-diffkv evaluate`: methods against tasks, as a table and as plots."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .errors import EvaluationError

# the suite of small tasks that need no Hub
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
    add("--tasks", default=OFFLINE, metavar="X,Y", help="tasks or suites of them, see --list (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="FOLDER", help="a folder; one that holds a run goes on with it")
    add("--documents", type=int, metavar="N", help="documents per task (default: the task's own)")
    add("--length", type=int, metavar="N", help="tokens of a prompt (default: the task's own)")
    add("--seed", type=int, default=0, metavar="N", help="of the documents (default: %(default)s)")
    add("--max-new-tokens", type=int, metavar="N", help="of tasks that generate (default: the task's own)")
    add("--sample", action="store_true", help="draw tokens as the model's generation config says, instead of greedily")
    add("--batch-size", type=int, default=1, metavar="N", help="documents per cache, where tasks and methods allow it")
    add("--datasets-folder", type=Path, metavar="FOLDER", help="NAME.jsonl or a saved data set per task; then the Hub")
    add("--allow-code-execution", action="store_true", help="run the programs that the model writes, on this machine")
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
        from .tasks import suites

        print(f"methods: {', '.join(METHODS.names())}")
        for suite, names in suites().items():
            print(f"suite {suite}: {', '.join(names)}")
        parser.exit()


def evaluate(options: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        EvaluationError: something the user can put right; what was measured is kept.
    """
    from .isolated import run_isolated
    from .loading import load_config, load_model
    from .methods import get_method
    from .records import RunFolder
    from .runner import check_fits, documents_of, run
    from .tasks.base import Source

    methods = [get_method(name) for name in _names("--methods", options.methods)]
    tasks = _tasks(options.tasks)
    for name in ("documents", "length", "max_new_tokens", "batch_size"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise EvaluationError(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least 1.")
    config, tokenizer = load_config(options.model)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    source = Source(
        tokenizer,
        options.documents or 0,
        options.length,
        options.seed,
        limit,
        options.max_new_tokens,
        options.sample,
        options.datasets_folder,
        options.allow_code_execution,
    )
    prepared = [(task, documents_of(task, source)) for task in tasks]
    for task, documents in prepared:
        check_fits(task, documents, limit)
    model = load_model(options.model, options.dtype, options.device, options.quiet)
    dtype = str(model.dtype).removeprefix("torch.")
    settings = {"model": options.model, "dtype": dtype, "seed": options.seed}
    settings |= {name: getattr(options, name) for name in ("sample", "max_new_tokens") if getattr(options, name)}
    folder = RunFolder(options.output, settings)
    here = [method for method in methods if method.environment is None]
    elsewhere = [method for method in methods if method.environment is not None]
    failed: list[Any] = []
    try:
        batch_size, retry, quiet = options.batch_size, options.retry, options.quiet
        run(model, tokenizer, here, prepared, folder, batch_size=batch_size, retry=retry, quiet=quiet)
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
    from .tasks import get_task, suites

    known = suites()
    names = [task for name in _names("--tasks", text) for task in known.get(name, [name])]
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
