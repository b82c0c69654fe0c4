"""Random numbers that belong to a token: the same for any batch, chunking or order of requests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

HASHES = 2**32
# odd, below 2**31 so that no product exceeds 63 bits
MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)


def token_hash(seed: int, layer: int | Tensor, head: Tensor, position: Tensor) -> Tensor:
    """Whole numbers in [0, 2**32), int64, each as likely as any other. The arguments are int64 and broadcast."""
    mixed: Any = _mix(seed % HASHES)
    for part in (layer, head, position):
        mixed = _mix(mixed ^ part)
    return mixed


def _mix(x: Any) -> Any:
    """A multiply-xorshift hash of 32 bits; inputs that differ in one bit give unrelated outputs."""
    for multiplier, shift in zip(MULTIPLIERS, (15, 13)):
        x = ((x ^ (x >> 16)) + 0x9E3779B9) % HASHES * multiplier % HASHES
        x = x ^ (x >> shift)
    return x
