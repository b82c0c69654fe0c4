"""Centres of keys: errors match a dense computation, and a stretch's mean removes what its tokens share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

HEADS, TOKENS, DIM = 2, 96, 32


def test_means_of_stretches(script: Callable[[str], ModuleType]) -> None:
    keys = torch.randn(HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    means = script("key_centres").stretch_means(keys, 40)
    assert means.shape == keys.shape
    for start, end in ((0, 40), (40, 80), (80, 96)):
        expected = sum(keys[:, token] for token in range(start, end)) / (end - start)
        for token in (start, end - 1):
            torch.testing.assert_close(means[:, token], expected)


def test_errors_of_logits(script: Callable[[str], ModuleType]) -> None:
    centres = script("key_centres")
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(HEADS, TOKENS, DIM, generator=generator)
    query = torch.randn(HEADS, 8, DIM, generator=generator)
    # stretches far apart from one another
    keys[:, 48:] += 50 * torch.randn(HEADS, 1, DIM, generator=generator)
    of_row = centres.logit_errors(query, keys, torch.zeros(()))
    of_stretches = centres.logit_errors(query, keys, centres.stretch_means(keys, 48))
    assert (of_stretches < of_row / 20).all()
    # 4 bits between the ends of about 32 normal elements leave an error of the squared step over 12
    rest = keys - centres.stretch_means(keys, 48)
    step = (rest.amax(-1) - rest.amin(-1)) / 15
    expected = (query.square().sum(-1).mean(1)) * step.square().mean(1) / 12
    torch.testing.assert_close(of_stretches, expected, rtol=0.25, atol=0.0)


def test_a_centre_that_is_the_same_for_all_tokens_changes_nothing(script: Callable[[str], ModuleType]) -> None:
    centres = script("key_centres")
    keys = torch.randn(HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    query = torch.randn(HEADS, 8, DIM, generator=torch.Generator().manual_seed(3))
    shifted = centres.logit_errors(query, keys, torch.full((DIM,), 3.0))
    torch.testing.assert_close(shifted, centres.logit_errors(query, keys, torch.zeros(())), rtol=0.02, atol=0.0)
