"""Figures of a document against a computation in float64, and figures over documents against known cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_diffkv.evaluation.comparison import CHUNK_TOKENS, compare_logits
from hf_diffkv.evaluation.statistics import estimate

VOCABULARY = 50


def draw(positions: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(positions, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", [1, CHUNK_TOKENS, CHUNK_TOKENS + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distributions_compared(positions: int, dtype: torch.dtype) -> None:
    mine, dense = draw(positions, 0).to(dtype), draw(positions, 1).to(dtype)
    # some likeliest tokens are the same
    dense[1::3] = mine[1::3]
    ids = torch.randint(VOCABULARY, (positions,), generator=torch.Generator().manual_seed(2)).tolist()
    p, q = (np.exp(x.double().numpy()) for x in (dense, mine))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    found = compare_logits(mine, dense, ids)
    assert found["kl"] == (pytest.approx((p * np.log(p / q)).sum(), rel=1e-5), positions)
    assert found["top1"] == ((p.argmax(-1) == q.argmax(-1)).sum(), positions)
    assert found["nll"] == (pytest.approx(-np.log(q[range(positions), ids]).sum(), rel=1e-5), positions)


def test_equal_distributions() -> None:
    logits = draw(CHUNK_TOKENS + 3, 0)
    assert compare_logits(logits, logits, [0] * len(logits))["kl"] == (0.0, len(logits))
    # the same distribution, another constant
    found = compare_logits(logits + 5, logits, [0] * len(logits))
    assert found["top1"] == (len(logits), len(logits))
    assert 0 <= found["kl"][0] < 1e-3


def test_kl_is_of_the_dense_cache() -> None:
    """KL(dense || method) is large where the method rules out what the dense cache expects, and not the other way."""
    sure, open_ = torch.tensor([[20.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert compare_logits(sure, open_, [0])["kl"][0] == pytest.approx(10 - math.log(2), rel=1e-4)
    assert compare_logits(open_, sure, [0])["kl"][0] == pytest.approx(math.log(2), rel=1e-4)


def test_mean_is_of_sums_and_weights() -> None:
    found = estimate([(1, 2), (9, 18), (0, 0)])
    assert (found.total, found.weight, found.mean) == (10, 20, 0.5)


def test_one_document_says_nothing_about_others() -> None:
    found = estimate([(3, 4)])
    assert (found.low, found.mean, found.high) == (0.75, 0.75, 0.75)


def test_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no documents"):
        estimate([])
    for sums in ([(0, 0)], [(0, 0), (0, 0)]):
        found = estimate(sums)
        assert found.weight == 0 and all(map(math.isnan, (found.mean, found.low, found.high)))


def test_interval_is_that_of_the_normal_approximation() -> None:
    """400 coins, half of them heads: 1.96 standard errors of a share, sqrt(0.25 / 400), on either side."""
    found = estimate([(index % 2, 1) for index in range(400)])
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.005)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.005)
    quarter = estimate([(index % 2, 1) for index in range(100)])
    assert quarter.high - quarter.low == pytest.approx(2 * (found.high - found.low), rel=0.1)


def test_interval_of_two_documents() -> None:
    """A resample of 2 is both the same with a chance of a quarter each, so the interval is from one to the other."""
    found = estimate([(0, 1), (1, 1)])
    assert (found.low, found.mean, found.high) == (0, 0.5, 1)
