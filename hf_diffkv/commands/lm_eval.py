"""`hf-diffkv lm-eval`: lm-evaluation-harness with one more model, `hf-diffkv`."""

from __future__ import annotations

import click

from .help import Command


# all arguments, options too, are the harness's
@click.command(
    "lm-eval",
    cls=Command,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run lm-evaluation-harness: --model hf-diffkv --model_args pretrained=M,cache=C ..."""
    from ..evaluation import lm_eval

    lm_eval.run(arguments)
