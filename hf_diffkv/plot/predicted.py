"""Line plot of the predicted loss of heads over bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .figure import SIZE, SMALL, Picture, new_figure, styled
from .palette import GROUPS, INK

if TYPE_CHECKING:
    from ..config import DiffKVConfig

# inches
LOSS_WIDTH, LOSS_HEIGHT = 6.5, 3.8
# number of ratios, besides the ladder's, at which a precision for each head is predicted
BETWEEN = 12


def loss(config: DiffKVConfig, title: str = "") -> Picture:
    """Plots predicted KL over the bytes of a stored token, with one precision per head and with one for all heads.

    Args:
        config: configuration whose calibration contains the sensitivity of the model's heads.
        title: title of the plot.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the calibration does not contain it.
    """
    from ..heads.allocation import SENSITIVITY, loss_curve

    calibration = config.calibration or {}
    ladder = loss_curve(calibration)
    if not ladder:
        raise ValueError(
            "config does not record what its model's heads lose; `hf-diffkv calibrate --model MODEL` measures it, and "
            "DiffKVConfig.from_pretrained reads the folder that it wrote."
        )
    least, most, own = ladder[0].ratio, ladder[-1].ratio, calibration.get("ratio")
    steps = [least + (most - least) * index / BETWEEN for index in range(1, BETWEEN)]
    points = loss_curve(calibration, steps if own is None else [*steps, own])
    figure = new_figure(LOSS_WIDTH, LOSS_HEIGHT)
    bits = 8 * calibration[SENSITIVITY]["element_bytes"]
    label = f"bytes of a stored token, % of those at {bits} bits per element"
    axis = styled(figure.add_subplot(), title, label, "predicted KL to the dense cache, nats")
    each, alone = GROUPS[:2]
    axis.plot(
        *zip(*((100 * point.ratio, point.each_head) for point in points)),
        color=each.colour,
        label="a precision for each head",
    )
    shared = [(100 * point.ratio, point.one_for_all, str(point.precision)) for point in ladder]
    axis.plot(*zip(*(point[:2] for point in shared)), color=alone.colour, marker=alone.mark, label="one for all heads")
    for x, y, name in shared:
        axis.annotate(name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=SMALL, color=alone.colour)
    for point in points:
        if point.ratio == own:
            place = (100 * point.ratio, point.each_head)
            axis.plot(*place, color=INK, linestyle="none", marker="*", markersize=11, label="this one")
    axis.set_yscale("log")
    axis.legend(frameon=False, fontsize=SIZE)
    return Picture(figure)
