"""Stands in for llama.cpp in tests: its caches use this library's methods on tiny-lm."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_diffkv.evaluation.methods import get_method
from hf_diffkv.evaluation.session import Session

LAYERS, HEADS, DIM = 6, 2, 64
# the methods that stand in for the types
STAND_INS = {"f16": "dense", "q8_0": "diffkv:K8V8", "q4_0": "diffkv:K4V2"}


class StandIn:
    """Stands in for a `LlamaCpp`.

    Args:
        model: tiny-lm.
        prompt_tokens: number of tokens after which memory is requested; None allows any.

    Attributes:
        broken: types that are unavailable.
        made: types of the caches made, in order.
        open: number of caches that were not closed.
    """

    threads = 2

    def __init__(self, model: Any, prompt_tokens: int | None = None) -> None:
        import llama_context

        self.model, self.prompt_tokens = model, prompt_tokens
        self.shape = llama_context.Shape(LAYERS, HEADS * DIM, HEADS * DIM)
        self.broken: set[str] = set()
        self.made: list[str] = []
        self.open = 0

    def new_cache(self, types: Any, tokens: int) -> StandInCache:
        self.made.append(types.keys)
        if types.keys in self.broken:
            raise RuntimeError(f"no {types.keys}\nhere")
        self.open += 1
        return StandInCache(self, Session(self.model, get_method(STAND_INS[types.keys])), types, tokens)


class StandInCache:
    """Stands in for a `LlamaCache` of at most `capacity` tokens."""

    def __init__(self, program: StandIn, session: Session, types: Any, capacity: int) -> None:
        self.program, self.session, self.types, self.capacity = program, session, types, capacity
        self.prompt: Session | None = None

    @property
    def tokens(self) -> int:
        return self.session.seen

    def forward(self, ids: Any, keep: int = 1) -> np.ndarray:
        logits = self.session.forward(ids, keep).float().numpy()
        assert self.tokens <= self.capacity
        if self.prompt is None:
            self.prompt = self.session.branch()
        return logits

    def forget(self, tokens: int) -> None:
        assert self.prompt is not None and tokens == self.prompt.seen
        self.session = self.prompt.branch()

    def held(self) -> Any:
        assert self.program.prompt_tokens in (None, self.tokens)
        return self.program.shape.held(self.types, self.tokens)

    def close(self) -> None:
        self.program.open -= 1
