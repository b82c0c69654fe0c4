"""Answers of methods to cases, by `generate()` with the method's cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from decoding import generate

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import HeldBytes, Method
from hf_diffkv.evaluation.methods.base import attends_fully
from hf_diffkv.evaluation.methods.dense import DenseMethod
from hf_diffkv.evaluation.session import Session

from .cases import Case
from .shared_prompts import ReadPrompt, can_share, hand_over, read_prompt


@dataclass(frozen=True)
class Answer:
    """Answer to a case.

    Attributes:
        ids: generated token ids, including the one that ended the answer.
        held: memory of the cache at the end; None if the engine cannot tell.
        dense_bytes: memory of a dense cache for the same tokens; None if the engine cannot tell.
        seconds: time to read the prompt and generate, without earlier turns.
        shared: whether the dense cache read the prompt (`shared_prompts.py`); `seconds` of every method then includes
            its time.
        batch: number of cases answered at once (`batches.py`).
    """

    ids: tuple[int, ...]
    held: HeldBytes | None
    dense_bytes: int | None
    seconds: float
    shared: bool = False
    batch: int = 1


class Answering:
    """Answers cases with a model and caches of methods.

    Earlier turns that cases share are read once for each method, and continued in a copy for each case.

    Args:
        model: loaded model.
        share: whether methods take over prompts read by the dense cache, if they can (`shared_prompts.py`).

    Raises:
        EvaluationError: the dense bytes per token are undefined, because not all layers attend to all tokens.
    """

    def __init__(self, model: Any, share: bool = False) -> None:
        if not attends_fully(model):
            raise EvaluationError(
                f"{type(model).__name__} has layers that do not attend to all tokens; these tasks count bytes per "
                "token and need a --model without them."
            )
        self.model, self.share = model, share
        self.bytes_per_token = _bytes_per_token(model)
        self._earlier: tuple[int, ...] = ()
        self._begun: dict[str, Session] = {}
        self._prompt: ReadPrompt | None = None

    def answer(self, method: Method, case: Case) -> Answer:
        """Answers one case with a separate cache of the method."""
        if self.share and not case.earlier and can_share(method, self.model):
            return self._answer_shared(method, case)
        session = self._session(method, case.earlier)
        started = time.perf_counter()
        ids = generate(session, case.ids, case.limit, **options_for(case.ends))
        return self._answer(session, ids, time.perf_counter() - started)

    def _answer_shared(self, method: Method, case: Case) -> Answer:
        if self._prompt is None or self._prompt.ids != case.ids:
            self._prompt = None
            self._prompt = read_prompt(self.model, case.ids)
        prompt, started = self._prompt, time.perf_counter()
        session = hand_over(self.model, method, prompt)
        ids = [prompt.token]
        if prompt.token not in case.ends and case.limit > 1:
            ids += generate(session, ids, case.limit - 1, **options_for(case.ends))
        seconds = prompt.seconds + time.perf_counter() - started
        return replace(self._answer(session, ids, seconds), shared=True)

    def _answer(self, session: Session, ids: Sequence[int], seconds: float) -> Answer:
        return Answer(tuple(ids), session.held(), self.bytes_per_token * session.seen, seconds)

    def _session(self, method: Method, earlier: tuple[int, ...]) -> Session:
        if not earlier:
            return Session(self.model, method)
        if earlier != self._earlier:
            self._earlier, self._begun = earlier, {}
        if method.label not in self._begun:
            session = Session(self.model, method)
            session.forward(earlier)
            self._begun[method.label] = session
        return self._begun[method.label].branch()


def options_for(ends: Sequence[int]) -> dict[str, Any]:
    """Returns options of `generate()` for plain greedy decoding, whatever the model's own defaults are."""
    return {"do_sample": False, "repetition_penalty": 1.0, "eos_token_id": list(ends), "pad_token_id": ends[0]}


def _bytes_per_token(model: Any) -> int:
    session = Session(model, DenseMethod())
    session.forward([0])
    return session.held().bytes
