"""How commands show their help."""

from __future__ import annotations

from collections.abc import Sequence

import click

# columns from which on there is room for help beside an option
SIDE_BY_SIDE = 60


class HelpFormatter(click.HelpFormatter):
    """Puts help below options where there is no room beside them."""

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= SIDE_BY_SIDE else 4, col_spacing)


class Context(click.Context):
    formatter_class = HelpFormatter


class Command(click.Command):
    """A command of `hf-diffkv`."""

    context_class = Context
