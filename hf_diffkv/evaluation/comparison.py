"""Compares a method with the dense cache, by generated tokens and by next-token distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

# positions compared at once; with a vocabulary of 256k, a position takes 1 MB
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Agreement:
    """Agreement between the tokens that two runs generated.

    Attributes:
        tokens: number of positions.
        until_difference: number of equal tokens before the first difference.
        equal: number of positions with the same token.
    """

    tokens: int
    until_difference: int
    equal: int

    @classmethod
    def of(cls, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Agreement:
        """Compares the token ids of each turn; extra tokens of a longer turn count as different."""
        same = [a == b for turns in zip(first, second) for a, b in zip_longest(*turns)]
        return cls(len(same), same.index(False) if False in same else len(same), sum(same))


def compare_logits(logits: Tensor, reference: Tensor, ids: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Returns the sum over positions and their number, by metric.

    Args:
        logits, reference: logits of the method and of the dense cache, [positions, vocabulary], of any float dtype.
        ids: token ids that follow the positions.

    Returns:
        `kl`: KL(dense || method) in nats. `top1`: number of positions with the same most likely token. `nll`: negative
        log probability of `ids` with the method.
    """
    kl = top1 = nll = 0.0
    targets = torch.tensor(list(ids), device=logits.device)
    for start in range(0, len(ids), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        mine = logits[part].float().log_softmax(-1)
        theirs = reference[part].to(logits.device).float().log_softmax(-1)
        kl += float((theirs.exp() * (theirs - mine)).sum())
        top1 += float((mine.argmax(-1) == theirs.argmax(-1)).sum())
        nll -= float(mine.gather(-1, targets[part, None]).sum())
    count = float(len(ids))
    return {"kl": (max(kl, 0.0), count), "top1": (top1, count), "nll": (nll, count)}
