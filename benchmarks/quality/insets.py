"""Quantises normally distributed rows with codes that end inside the range, for the table of `pages/inset.py`.

    python benchmarks/quality/insets.py --elements 64 128

For each number of bits, prints the mean square error relative to the mean square, from end to end and with the best
inset; the factor by which values shrink; and N, where 1/N of the range is left free at each end. Values are divided by
the shrinkage first.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

ELEMENTS, BITS, STEPS = 2_000_000, (2, 3, 4), 96


def quantised(x: Tensor, bits: int, inset: float) -> Tensor:
    """Returns rows [n, elements] decoded from codes that end a fraction `inset` of the range inside its ends."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    inwards = (high - low) * inset
    step = (high - low - 2 * inwards) / (2**bits - 1)
    return ((x - low - inwards) / step).round().clamp(0, 2**bits - 1) * step + low + inwards


def measured(x: Tensor, bits: int, inset: float) -> tuple[float, float]:
    """Returns the mean square error after division by the shrinkage, relative to the mean square, and the shrinkage."""
    found = quantised(x, bits, inset)
    shrinkage = float((found * x).mean() / x.square().mean())
    return float((found / shrinkage - x).square().mean() / x.square().mean()), shrinkage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, nargs="+", default=[16, 32, 64, 96, 128, 192, 256, 512])
    options = parser.parse_args()
    for elements in options.elements:
        x = torch.randn(ELEMENTS // elements, elements, generator=torch.Generator().manual_seed(0))
        for bits in BITS:
            errors = {part: measured(x, bits, part / STEPS) for part in range(STEPS // 4)}
            best = min(errors, key=lambda part: errors[part][0])
            error, shrinkage = errors[best]
            parts = f"{STEPS / best:.1f}" if best else "none"
            print(f"{elements} elements, {bits} bits: {errors[0][0]:.4f} to {error:.4f}, {shrinkage:.4f}, {parts}")


if __name__ == "__main__":
    main()
