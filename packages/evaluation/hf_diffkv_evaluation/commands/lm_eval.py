"""`hf-diffkv lm-eval`: runs lm-evaluation-harness with the additional model `hf-diffkv`."""

from __future__ import annotations

import importlib.util
import sys

import click

from hf_diffkv.commands.console import Command
from hf_diffkv.extras import install

USAGE = """The model hf-diffkv is the harness's hf with a cache that you choose. Its --model_args, besides those of hf:

  cache=METHOD   diffkv (default), diffkv:K8V4, diffkv:3/0.02, fp8, quanto:4, dense and so on, as
                 `hf-diffkv evaluate --list` shows
  FIELD=VALUE    a field of DiffKVConfig, with cache=diffkv: alpha_high=3, window=128, rotate=True and so on

  hf-diffkv lm-eval --model hf-diffkv --model_args pretrained=MODEL,cache=diffkv:K8V4 --tasks gsm8k --batch_size 8

Only tasks that generate are run with a compressed cache. All arguments: hf-diffkv lm-eval run --help
"""
# beginning of the harness's error for unknown tasks
NOT_FOUND = "Tasks not found: "
FOLLOWS = "What follows is the harness's own help."
MISSING = "The harness is not installed, so its own help is missing here: {}"


# all arguments, including options, go to the harness
@click.command(
    "lm-eval",
    cls=Command,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness: --model hf-diffkv --model_args pretrained=M,cache=C ..."""
    asks_help = not arguments or not {"-h", "--help"}.isdisjoint(arguments)
    if asks_help:
        there = importlib.util.find_spec("lm_eval") is not None
        click.echo(f"{USAGE}\n{FOLLOWS if there else MISSING.format(install('eval'))}\n")
        if not there:
            return
    else:
        # imported here, as it takes seconds; raises an error with the install command if there is no harness
        from ..lm_eval import register

        register()
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    except ValueError as error:
        # the harness has no error class for it
        if not str(error).startswith(NOT_FOUND):
            raise
        names = str(error).removeprefix(NOT_FOUND)
        raise click.UsageError(
            f"--tasks: the harness has no {names}; `hf-diffkv lm-eval ls tasks` lists all."
        ) from error
    finally:
        sys.argv = before
