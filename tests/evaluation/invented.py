"""A task and methods that need no model, for the tests of what runs and reports them."""

from __future__ import annotations

from typing import Any

import torch

from hf_diffkv.evaluation.methods import METHODS, HeldBytes, Method
from hf_diffkv.evaluation.session import Session
from hf_diffkv.evaluation.tasks import TASKS, Document, Task
from hf_diffkv.evaluation.tasks.base import KL, RIGHT, Source, Sums

TASK, GOOD, BAD = "invented", "good", "bad"


class NoModel(torch.nn.Linear):
    """Weights to tell it by, which nothing runs."""

    device, dtype = torch.device("cpu"), torch.float32


MODEL = NoModel(2, 2)
# bytes of the dense cache of document 0, 1, ...
DENSE_BYTES = (1000, 3000, 2000)


class Invented(Task):
    """Notes what is measured; whatever raises is in `raising`, by method and document."""

    metrics = (RIGHT, KL)
    count = 3
    length = 8
    measured: list[tuple[str, str]] = []
    raising: dict[tuple[str, str], BaseException] = {}

    def documents(self, source: Source) -> list[Document]:
        return [Document(f"{TASK}-{index}", tuple(range(source.length))) for index in range(source.count)]

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        label = session.method.label
        self.measured.append((label, document.name))
        if (label, document.name) in self.raising:
            raise self.raising[label, document.name]
        # every method is compared with what the dense cache observed of the same document
        assert reference == (None if label == "dense" else document.name)
        index = int(document.name[-1])
        share = {"dense": 1.0, GOOD: 0.5, BAD: 0.2}[label]
        sums = {"right": (10 * share, 10.0), "kl": ((1 - share) * (index + 1), index + 1.0)}
        held = HeldBytes(int(DENSE_BYTES[index] * share), simulated=label == BAD)
        return sums, document.name, {"held": held, "index": index}


class Empty(Method):
    def new_cache(self, model: Any) -> None:
        return None


def add_invented() -> None:
    """Registers them, under `names`, and forgets what was measured."""
    Invented.measured, Invented.raising = [], {}
    TASKS.add(TASK)(Invented)
    for name in (GOOD, BAD):
        METHODS.add(name)(lambda options: Empty())
    # the dense method needs a model
    METHODS._entries["dense"] = lambda options: Empty()
