"""The `hf-diffkv` command: finds and runs a subcommand, and turns errors into a line and an exit code.

Exit codes: 0 done, 1 failed or with a bad result, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from . import __version__
from .arguments import similar
from .commands import COMMANDS, load
from .commands.console import Context, log_on_terminal, one_line, width
from .evaluation.errors import EvaluationError

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
PROGRAM = "hf-diffkv"
TRY = {
    "hf-diffkv generate --example": "A long document: answer, memory, time.",
    "hf-diffkv chat --preset small": "Chat; /memory shows the cache's size.",
    "hf-diffkv demo": "Show both caches side by side in a browser.",
}


class Commands(click.Group):
    """Group that imports a command when it is requested."""

    context_class = Context

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return load(name) if name in COMMANDS else None

    def resolve_command(self, context: click.Context, arguments: list[str]) -> Any:
        name = arguments[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = similar(name, COMMANDS)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(COMMANDS)}."
            context.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(context, arguments)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # before the options and the list of commands
        with formatter.section("Try"):
            formatter.write_dl(list(TRY.items()))
        super().format_options(context, formatter)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=Commands,
    name=PROGRAM,
    help="A KV cache for Transformers models that stores keys and values in few bits, as many as each attention head "
    "needs; it can also choose tokens and prune, as DiffKV does.",
    epilog="Each command has its own --help. Exit codes: 0 success, 1 failure or a bad result, 2 wrong usage, 130 "
    "interrupted.",
)
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
def hf_diffkv() -> None:
    """All commands."""


def _open_streams() -> None:
    """Makes the standard streams usable.

    Streams that the caller has closed, which are None in Python, become the null device. Characters that stdout's
    encoding lacks are escaped, as on stderr, since an error would end a run in the middle of its text.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None, command: click.Command = hf_diffkv, program: str = PROGRAM) -> int:
    """Runs a command, called `program` in messages, and returns its exit code; None uses the process's arguments."""
    _open_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with log_on_terminal("--quiet" in given):
            settings = {"terminal_width": width(), "help_option_names": ["-h", "--help"], "show_default": True}
            code = command.main(given, prog_name=program, standalone_mode=False, **settings)
        sys.stdout.flush()
        return code or 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.ctx.get_help(), file=sys.stderr)
        return USAGE_ERROR
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        print(f"{program}: {one_line(error.format_message())} ({path} --help)", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        print(f"{program}: {one_line(error.format_message())}", file=sys.stderr)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print(f"\n{program}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader has closed the pipe; the rest of the buffer must not raise again when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EvaluationError as error:
        print(f"{program}: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        # from a file or a device, such as a full disk
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{(error.strerror or one_line(error)).rstrip('.')}.", file=sys.stderr)
        return FAILED
