"""How far a method's next-token distributions are from those of the dense cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# positions at once: a vocabulary of 256k takes 1 MB per position
CHUNK_TOKENS = 64


def compare_logits(logits: Tensor, reference: Tensor, ids: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Sums over positions and their number, by metric.

    Args:
        logits, reference: [positions, vocabulary] of the method and of the dense cache, any float dtype.
        ids: the tokens that follow the positions.

    Returns:
        `kl`: KL(dense || method) in nats. `top1`: positions with the same likeliest token. `nll`: minus the log
        probability that the method gives to `ids`.
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
