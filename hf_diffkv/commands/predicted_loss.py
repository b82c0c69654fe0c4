"""What a model's heads are predicted to lose over bytes, for `hf-diffkv plan`: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .console import Failure, one_line, paragraph, progress, table

if TYPE_CHECKING:
    from ..config import DiffKVConfig
    from ..config.loss_curve import Loss


def predicted(config: DiffKVConfig) -> tuple[Loss, ...]:
    """By bytes, the configuration's own among them; empty where heads were not measured."""
    from ..config.loss_curve import loss_curve

    own = _own(config)
    return loss_curve(config.calibration or {}, [] if own is None else [own])


def loss_text(config: DiffKVConfig, points: tuple[Loss, ...]) -> str:
    """A table, where the configuration's own line is marked."""
    from ..config.allocation import SENSITIVITY

    own = _own(config)
    rows = [
        (
            f"{point.ratio:.1%}{'*' if point.ratio == own else ''}",
            f"{point.each_head:.4f}",
            "" if point.one_for_all is None else f"{point.one_for_all:.4f} ({point.precision})",
        )
        for point in points
    ]
    bits = 8 * (config.calibration or {})[SENSITIVITY]["element_bytes"]
    title = (
        "Predicted loss, as KL to the dense cache in nats, by the bytes of a stored token, in % of those at "
        f"{bits} bits an element:"
    )
    lines = [paragraph(title), "", table(("bytes", "a precision for each head", "one for all"), rows)]
    return "\n".join(lines if own is None else [*lines, "", "* the cache above"])


def draw_loss(config: DiffKVConfig, points: tuple[Loss, ...], path: Path, quiet: bool) -> None:
    """Writes the picture.

    Raises:
        click.UsageError: heads were not measured.
        Failure: Matplotlib is missing, or the file cannot be written.
    """
    from ..plot import loss

    if not points:
        raise click.UsageError(
            "--plot draws what heads are predicted to lose, and those of this model were not measured; "
            "`hf-diffkv calibrate --ratio` measures them, and --config takes the folder that it wrote."
        )
    try:
        loss(config).save(path)
    except (ImportError, OSError, ValueError) as error:
        raise Failure(f"--plot {path}: {one_line(error)}") from error
    progress(f"drew {path}", quiet)


def _own(config: DiffKVConfig) -> float | None:
    return (config.calibration or {}).get("ratio")
