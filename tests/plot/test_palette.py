"""The palette: told apart in grey, by colour-blind people, and read on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_diffkv.plot import palette

# linear RGB -> what a person without green cones sees (Machado, Oliveira and Fernandes 2009, severity 1)
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
STYLES = sorted(set(palette.CACHE_STYLES.values()), key=str)


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE 1976 L*a*b* of linear RGB; L* is how bright it looks, 0 to 100."""
    x, y, z = np.cbrt(TO_XYZ @ light.clip(0, 1) / (0.95047, 1, 1.08883))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    dark, bright = sorted(float((TO_XYZ @ linear(colour))[1]) for colour in (one, other))
    return (bright + 0.05) / (dark + 0.05)


def test_levels_have_different_brightness() -> None:
    brightness = [lab(linear(colour))[0] for colour in palette.LEVELS.values()]
    assert list(palette.LEVELS) == ["high", "low", "window", "pruned"]
    assert min(np.diff(brightness)) > 15


@pytest.mark.parametrize("seen", [np.eye(3), DEUTERANOPIA], ids=["all cones", "no green cones"])
def test_colours_differ(seen: np.ndarray) -> None:
    for one, other in itertools.combinations(palette.LEVELS.values(), 2):
        assert np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(other))) > 30
    for one, other in itertools.combinations(STYLES, 2):
        assert np.linalg.norm(lab(seen @ linear(one.colour)) - lab(seen @ linear(other.colour))) > 12
        assert one.mark != other.mark


@pytest.mark.parametrize(
    "under, over", [("DynamicCache", "StaticCache"), ("QuantizedCache hqq 4 bit", "QuantizedCache quanto 4 bit")]
)
def test_caches_of_the_same_bytes_are_both_seen(under: str, over: str) -> None:
    """The later of two curves that lie on each other leaves gaps in front of the earlier one."""
    assert palette.order_of(under) < palette.order_of(over)
    assert palette.style_of(under).dash == "solid" != palette.style_of(over).dash


def test_text_on_colours_can_be_read() -> None:
    shares = [dict(zip(palette.LEVELS, parts)) for parts in itertools.product((0, 1, 2, 5), repeat=4) if any(parts)]
    colours = [palette.mixed({name: part / sum(one.values()) for name, part in one.items()}) for one in shares]
    assert set(palette.LEVELS.values()) < set(colours)
    assert min(contrast(colour, palette.ink_on(colour)) for colour in colours) > 4.5


def test_terminals_show_the_same_levels() -> None:
    """Their colours are of the cube and the greys among the 256, apart in brightness, each like its own level."""
    steps = (0, 95, 135, 175, 215, 255)
    shown = {16 + i: colour for i, colour in enumerate(itertools.product(steps, repeat=3))}
    shown |= {232 + i: (8 + 10 * i,) * 3 for i in range(24)}
    colours = {name: "#" + "".join(f"{c:02x}" for c in shown[code]) for name, code in palette.TERMINAL.items()}
    assert min(np.diff([lab(linear(colours[name]))[0] for name in palette.LEVELS])) > 10
    for name, colour in colours.items():
        distances = {
            other: np.linalg.norm(lab(linear(level)) - lab(linear(colour))) for other, level in palette.LEVELS.items()
        }
        assert min(distances, key=distances.get) == name
        assert contrast(colour, palette.ink_on(palette.LEVELS[name])) > 4.5


def test_styles_are_those_of_families_and_differ_within() -> None:
    names = ["DynamicCache", "dense", "DiffKV balanced", "diffkv:K8V4", "DiffKV small", "unheard of"]
    styles = palette.styles_of(names)
    assert styles["DynamicCache"].colour == styles["dense"].colour
    assert len({styles[name].colour for name in names[2:5]}) == 1
    assert len({(styles[name].mark, styles[name].dash) for name in names[2:5]}) == 3
    assert palette.style_of("QuantizedCache hqq 4 bit") == palette.style_of("hqq:4")
    assert palette.style_of("QuantizedCache quanto 4 bit") == palette.style_of("quanto:2") != palette.style_of("hqq:4")
    assert styles["unheard of"] == palette.OTHER
    assert sorted(names, key=palette.order_of)[0] == "unheard of"
