"""A long generation, one token at a time: every method goes along what the dense cache wrote."""

from __future__ import annotations

from typing import Any

import torch

from ..comparison import compare_logits
from ..session import Session
from . import task
from .base import KL, PERPLEXITY, TOP1, Document, Metric, Source, Sums, Task
from .text import shuffled, stretches

STEPS = 200
QUARTERS = 4
BY_QUARTER = tuple(Metric(f"kl_{part}", f"KL, quarter {part}", False, digits=4) for part in range(1, QUARTERS + 1))


@task("trajectory")
class Trajectory(Task):
    """KL, top-1 agreement and perplexity along tokens that the dense cache samples; KL of each quarter of them too."""

    metrics = (KL, TOP1, PERPLEXITY, *BY_QUARTER)
    count = 1
    length = 1000

    def documents(self, source: Source) -> list[Document]:
        steps = source.max_new_tokens or STEPS
        found = stretches(shuffled(source, "trajectory"), source.tokenizer, source.count, source.length, 0)
        extra = {"steps": steps, "seed": source.seed, "more_tokens": steps}
        return [Document(f"trajectory-{index}", document.context, extra=extra) for index, document in enumerate(found)]

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
        for index, metric in enumerate(BY_QUARTER):
            part = slice(index * steps // QUARTERS, (index + 1) * steps // QUARTERS)
            sums[metric.name] = compare_logits(written[part], dense[part], ids[part])["kl"]
        return sums, {"ids": ids, "logits": written}, {"held": held}
