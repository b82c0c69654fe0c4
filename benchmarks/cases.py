"""The models and the kinds of compressed tokens used in the GPU benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import rows

from hf_diffkv.config.presets import PRESETS
from hf_diffkv.pages.layout import UNIFORM_NUMBERS
from hf_diffkv.precision import Precision

# query heads, KV heads, head_dim
MODELS = {"llama-3-8b": (32, 8, 128), "qwen2.5-7b": (28, 4, 128)}
K8V4, K4V2 = Precision(8, 4), Precision(4, 2)


@dataclass(frozen=True)
class Stored:
    """Storage format of a case's tokens.

    Attributes:
        high, low: precisions of the two levels.
        shares: shares of the tokens outside the window at the high and at the low level.
        numbers: keyword arguments of `random_rows` for the sizes of metadata and positions in pages.
    """

    high: Precision
    low: Precision
    shares: tuple[float, float]
    numbers: Mapping[str, int] = field(default_factory=dict)

    def tokens(self, outside: int) -> tuple[int, int]:
        """Returns the number of a row's tokens at each level, given `outside` tokens outside the window."""
        return int(self.shares[0] * outside), int(self.shares[1] * outside)

    def needed_bytes(self, batch: int, heads: int, dim: int, tokens: tuple[int, int]) -> int:
        """Estimates the bytes that `random_rows` allocates."""
        return rows.needed_bytes(self.high, self.low, batch, heads, dim, tokens, self.numbers)

    def random_rows(self, *size: Any, **options: Any) -> rows.RandomRows:
        """Returns `rows.random_rows` with all arguments before `batch` filled in."""
        return rows.random_rows(self.high, self.low, *size, **options, numbers=self.numbers)


def _uniform(precision: Precision, numbers: Mapping[str, int] | None = None) -> Stored:
    return Stored(precision, precision, (1.0, 0.0), numbers or {})


# the presets have pages without scores, all others use the paper's
CONFIGS = {
    "FP16": _uniform(Precision(16, 16)),
    "K8V8": _uniform(Precision(8, 8)),
    "K8V4": Stored(K8V4, K4V2, (1.0, 0.0)),
    "K4V2": Stored(K8V4, K4V2, (0.0, 1.0)),
    "30/40/30": Stored(K8V4, K4V2, (0.3, 0.4)),
    **{name: _uniform(fields["high"], UNIFORM_NUMBERS) for name, fields in PRESETS.items()},
    # a pair of measured heads; rows have tokens at either precision, so that both loops run
    "K6V5-K4V3": Stored(Precision(6, 5), Precision(4, 3), (0.5, 0.5), UNIFORM_NUMBERS),
}
