"""Gains on normalised keys: the random model has the requested gains, and more bits lose less."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from hf_diffkv.config import Precision

LENGTH = 100


def test_loss(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    key_gains = script("key_gains")
    for name, size in {"LAYERS": 1, "HIDDEN": 64, "HEADS": 2, "QUERY_HEADS": 2}.items():
        monkeypatch.setattr(key_gains, name, size)
    gains = key_gains.GAINS["30 on a slow pair, else 1"]
    model = key_gains.random_model(gains, False, 3.0)
    attention = model.model.layers[0].self_attn
    assert attention.k_norm.weight.tolist() == [30.0 if d in (60, 124) else 1.0 for d in range(128)]
    assert attention.q_norm.weight.eq(1).all() and attention.k_proj.bias.std() > 2
    assert key_gains.random_model(gains, True, 0.0).model.layers[0].self_attn.q_norm.weight.max() == 30
    ids = torch.randint(key_gains.VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    losses = [key_gains.loss(model, ids, Precision.parse(name)) for name in ("K2V2", "K4V4", "K6V6")]
    assert 1 > losses[0] > 8 * losses[1] > 64 * losses[2] > 0
