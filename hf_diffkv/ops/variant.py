"""What the ahead-of-time report compiles: one kernel with one choice of types and constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..presets import PRESETS

# the presets' pages (their numbers: `presets.UNIFORM_NUMBERS`)
UNIFORM_PRECISIONS = tuple(fields["high"] for fields in PRESETS.values())
UNIFORM_DIMS = (64, 128)
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
        num_warps, num_stages: launch options.
        options: further launch options, for example `{"maxnreg": 168}`.
        targets: what the variant is shipped for.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 2
    options: dict[str, object] = field(default_factory=dict)
    targets: tuple[str, ...] = TARGETS
