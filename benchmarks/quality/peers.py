"""Runs `hf-diffkv evaluate` with the methods in `methods/` as well: kvpress's and custom ones.

    python benchmarks/quality/peers.py --model smollm2 --methods dense,kvpress:snapkv+0.57 --output build/eval

It takes the options of `hf-diffkv evaluate`, and `--submit FILE`, which writes the results to one file for the gallery
(docs/evaluation.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import methods as methods
from hf_diffkv_evaluation.commands.evaluate import evaluate, evaluate_options
from submissions import submission_of, write_submission

from hf_diffkv import cli
from hf_diffkv.commands.console import Command


@click.command("peers.py", cls=Command, help="Run `hf-diffkv evaluate` with the methods in benchmarks/quality/methods.")
@evaluate_options
@click.option("--submit", type=Path, metavar="FILE", help="Write what was measured, for the gallery of methods.")
def command(submit: Path | None, **given: Any) -> None:
    records, settings = evaluate(SimpleNamespace(**given))
    if submit is not None:
        write_submission(submission_of(records, settings), submit)
        print(f"Wrote {submit}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return cli.main(arguments, command, "peers.py")


if __name__ == "__main__":
    sys.exit(main())
