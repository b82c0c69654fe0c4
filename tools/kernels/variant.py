"""Kernel variants of the ahead-of-time report: one kernel with one choice of types and constants."""

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
# of heads with a precision each; the first pair is compiled in all its forms, the others where they are modelled
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

    Numbers and addresses that the kernel lets Triton specialise count as multiples of 16, which launchers make sure of.

    Attributes:
        name: unique among all variants, for example `store_tokens-K8V4-d128`.
        kernel: the `@triton.jit` function.
        signature: Triton type of every runtime argument by name, for example `{"pages": "*u8", "count": "i32"}`.
        constexprs: value of every `tl.constexpr` parameter by name.
        num_warps, num_stages: launch options; None leaves the stages to Triton's default for the target.
        options: further launch options, for example `{"maxnreg": 168}`.
        targets: targets for which the variant ships.
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
        """Returns the variant under another name."""
        return replace(self, name=name)


def uniform_layouts() -> list[tuple[str, PageLayout]]:
    """Returns the name and layout of pages without scores, for bfloat16 models and each preset's precision."""
    precisions = [fields["high"] for fields in PRESETS.values()]
    return [
        (f"{one.name}_unscored", PageLayout.build(one, one, dim, dim, 2, **UNIFORM_NUMBERS))
        for one, dim in product(precisions, UNIFORM_DIMS)
    ]


def paired_layouts(pairs: Sequence[tuple[str, str]] = PAIRS[:1]) -> list[tuple[str, PageLayout]]:
    """Pages likewise whose heads have one precision of a pair each, and what each is called."""
    return [
        (f"{high}-{low}_unscored", PageLayout.build(*map(Precision.parse, (high, low)), dim, dim, 2, **UNIFORM_NUMBERS))
        for (high, low), dim in product(pairs, UNIFORM_DIMS)
    ]
