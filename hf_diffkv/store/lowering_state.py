"""What a store keeps for `lowering.py` beside its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class LoweringState:
    """Knowledge of the heads to lower, and what has been done and said so far.

    Attributes:
        active: whether whole rows are lowered to stay within the budget.
        harm: loss by lowering each head, float64 [model_layers, heads] for this store's heads; None if not known.
        moments: sum of q q^T over the queries of all prompts, [layers, heads, key_dim, key_dim], for which lowered keys
            are rounded; None if the model's moments are known or nothing is rounded.
        tokens: number of tokens that were lowered after they were stored.
        told_full, told_final: whether it was logged that lowering has begun, and that all rows are lowered.
        made_room: whether rows were lowered for the current forward of several tokens.
    """

    active: bool = False
    harm: np.ndarray | None = None
    moments: Tensor | None = None
    tokens: int = 0
    told_full: bool = False
    told_final: bool = False
    made_room: bool = False
