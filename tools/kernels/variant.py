"""Kernel variants of the ahead-of-time report: a kernel with one choice of types and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

from hf_diffkv.config import Precision
from hf_diffkv.config.presets import PRESETS
from hf_diffkv.config.until_full import MIDDLES, PRECISE
from hf_diffkv.heads.allocation import HEAD_LADDER, LAST_RUNGS
from hf_diffkv.pages.layout import UNIFORM_NUMBERS, PageLayout

UNIFORM_DIMS = (64, 128)
# for heads with different precisions; the first pair is compiled in all its forms, the others only as modelled
PAIRS = (
    *sorted(combinations(reversed(HEAD_LADDER), 2), key=lambda pair: pair != ("K5V4", "K3V3")),
    # while a budget fills
    *((PRECISE.name, name) for name in LAST_RUNGS),
    *combinations([middle.name for middle in MIDDLES], 2),
    *((MIDDLES[-1].name, name) for name in HEAD_LADDER[:2]),
)
TARGETS = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True)
class KernelVariant:
    """One compiled form of a kernel.

    Numbers and addresses that Triton may specialise are taken to be multiples of 16, which launchers ensure.

    Attributes:
        name: name, unique among all variants, for example `store_tokens-K8V4-d128`.
        kernel: the `@triton.jit` function.
        signature: Triton type of each runtime argument by name, for example `{"pages": "*u8", "count": "i32"}`.
        constexprs: value of every `tl.constexpr` parameter by name.
        num_warps, num_stages: launch options; None uses Triton's default number of stages for the target.
        options: further launch options, for example `{"maxnreg": 168}`.
        targets: targets that the variant ships for.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int | None = None
    options: dict[str, object] = field(default_factory=dict)
    targets: tuple[str, ...] = TARGETS

    def named(self, name: str) -> KernelVariant:
        """Returns the variant with another name."""
        return replace(self, name=name)


def uniform_layouts() -> list[tuple[str, PageLayout]]:
    """Names and layouts of pages without scores, for bfloat16 models at each preset's precision."""
    precisions = [fields["high"] for fields in PRESETS.values()]
    return [
        (f"{one.name}_unscored", PageLayout.build(one, one, dim, dim, 2, **UNIFORM_NUMBERS))
        for one, dim in product(precisions, UNIFORM_DIMS)
    ]


def paired_layouts(pairs: Sequence[tuple[str, str]] = PAIRS[:1]) -> list[tuple[str, PageLayout]]:
    """Names and layouts of such pages whose heads have one of a pair of precisions."""
    return [
        (f"{high}-{low}_unscored", PageLayout.build(*map(Precision.parse, (high, low)), dim, dim, 2, **UNIFORM_NUMBERS))
        for (high, low), dim in product(pairs, UNIFORM_DIMS)
    ]
