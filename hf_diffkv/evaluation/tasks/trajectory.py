"""A long generation, one token at a time: every method goes along what the dense cache wrote."""

from __future__ import annotations

from typing import Any

import torch

from ..comparison import compare_logits
from ..session import Session
from . import task
from .base import KL, PERPLEXITY, TOP1, Document, Metric, Source, Sums, Task
from .text import passages

STEPS = 200
QUARTERS = 4
LATE = Metric("kl_late", "KL, last quarter", False, digits=4)


@task("trajectory")
class Trajectory(Task):
    """KL, top-1 agreement and perplexity along `STEPS` tokens that the dense cache samples."""

    metrics = (KL, TOP1, PERPLEXITY, LATE)
    count = 1
    length = 1000

    def documents(self, source: Source) -> list[Document]:
        return [
            Document(f"trajectory-{index}", context, extra={"steps": STEPS, "seed": source.seed, "more_tokens": STEPS})
            for index, (context, _) in enumerate(passages(source, "trajectory", 0))
        ]

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        steps = document.extra["steps"]
        generator = torch.Generator().manual_seed(document.extra["seed"])
        logits = [session.forward(document.context)[-1]]
        ids: list[int] = [] if reference is None else reference["ids"]
        for step in range(steps):
            if reference is None:
                # likeliest tokens run into loops, which tell nothing
                ids.append(int(torch.multinomial(logits[-1].float().softmax(-1).cpu(), 1, generator=generator)))
            logits.append(session.forward([ids[step]])[-1])
        held = session.held()
        written = torch.stack(logits[:-1])
        dense = written if reference is None else reference["logits"]
        sums = compare_logits(written, dense, ids)
        late = steps - steps // QUARTERS
        sums["kl_late"] = compare_logits(written[late:], dense[late:], ids[late:])["kl"]
        return sums, {"ids": ids, "logits": written}, {"held": held}
