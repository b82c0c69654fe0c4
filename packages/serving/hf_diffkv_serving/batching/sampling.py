"""Sampling per request, with its own temperature, limits and seed, whatever else is in the batch.

The engine samples all requests in the same way, after logits processors. `RequestSampler` is such a processor: for a
request with its own sampling, it chooses a token and leaves the engine no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .engine_names import CHILD, ContinuousBatchingLogitsProcessor, ContinuousBatchingLogitsProcessorList

# below this temperature, the likeliest token is taken, as the division would overflow
GREEDY_BELOW = 1e-5
LIMITS = ("top_k", "top_p", "min_p")
# number of likeliest tokens that are considered first
SORTED = 1024
# maximum digits of an answer's number, which has to fit in 64 bits
MOST_DIGITS = 10
# suffix of the names of processors that prepare draws
WARPER = "LogitsWarper"
# other limits of a `GenerationConfig`, with the value that disables each
OTHER_LIMITS = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}


@dataclass(frozen=True)
class Sampling:
    """Sampling of one request's tokens. It is passed to the engine as `add_request(..., sampling=Sampling(...))`.

    Attributes:
        temperature: divisor of the scores; 0 takes the likeliest token.
        top_k: number of likeliest tokens to draw from; 0 for all.
        top_p: total probability of the tokens to draw from, which are the fewest likeliest ones that reach it.
        min_p: minimum probability of a token to draw, as a share of the likeliest one's.
        seed: seed of the draws. It determines the draw from given scores at a given position of the answer.
        top_logprobs: number of alternatives to note with the logprob of each token; None notes nothing. They are taken
            from scores before temperature and limits, and returned as `TokenLogprobs` in `GenerationOutput.logprobs`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for invalid values."""
        bounds = {"temperature": (0, float("inf")), "top_k": (0, float("inf")), "top_p": (0, 1), "min_p": (0, 1)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)} is not in [{low}, {high}].")
        if not isinstance(self.seed, Integral):
            raise ValueError(f"seed={self.seed!r} must be an integer.")
        most = self.top_logprobs
        if most is not None and not (isinstance(most, Integral) and most >= 0):
            raise ValueError(f"top_logprobs={most!r} must be an integer of at least 0, or None.")

    @classmethod
    def of(cls, generation_config: Any) -> Sampling:
        """Returns the sampling of a `GenerationConfig`. Raises `ValueError` if it has other limits than these."""
        if not generation_config.do_sample:
            return cls()
        for name, nothing in OTHER_LIMITS.items():
            value = getattr(generation_config, name, None)
            if value is not None and value != nothing:
                raise ValueError(f"generation_config has {name}={value}, which is not supported; set it to {nothing}.")
        fields = ("temperature", "top_k", "top_p", "min_p")
        found = {name: getattr(generation_config, name, None) for name in fields}
        return cls(**{"temperature": 1.0, **{name: value for name, value in found.items() if value is not None}})

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position.

    Attributes:
        logprob: logprob of the chosen token.
        top: tokens and logprobs of the likeliest tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def add_sampler(processors: ContinuousBatchingLogitsProcessorList, draws: bool) -> None:
    """Inserts a `RequestSampler` after the processors that change scores and before those that drop tokens."""
    listed = processors.logits_processor
    place = next((i for i, each in enumerate(listed) if type(each).__name__.endswith(WARPER)), len(listed))
    listed.insert(place, RequestSampler(draws))
    # it gets a row for its arguments, and has none
    processors.tensors_required += 1
    processors.supported_keys.update(RequestSampler.supported_kwargs)
    processors.do_processing = True


def check_logprobs(sampling: Sampling | None, return_logprobs: bool) -> None:
    """Raises `ValueError` if the engine is to return logprobs of tokens that a `Sampling` chooses."""
    if return_logprobs and sampling is not None:
        raise ValueError(
            "sampling cannot be combined with return_logprobs, which covers only the engine's own choices; leave "
            "return_logprobs out and set top_logprobs in sampling."
        )


class RequestSampler(ContinuousBatchingLogitsProcessor):
    """Chooses tokens for the requests that have a `Sampling`. The others are left to the engine.

    Args:
        draws: whether the engine draws tokens rather than taking the likeliest.
    """

    supported_kwargs: dict[str, type] = {"sampling": Sampling}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, draws: bool) -> None:
        self._draws = draws
        # of the coming forward, in the order of its rows of scores
        self._states: list[Any] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        self._states = [request.state for request in requests_with_new_token]
        return torch.empty(0, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Returns `scores` [rows, vocabulary], float32, with one token left in each row that it decides."""
        found = [(row, state, state.logit_processor_kwargs.get("sampling")) for row, state in enumerate(self._states)]
        asked = [each for each in found if each[2] is not None]
        drawn = [each for each in asked if not each[2].is_greedy]
        noted = [each for each in asked if each[2].top_logprobs is not None]
        decided = asked if self._draws else drawn
        if not decided and not noted:
            return scores
        tokens = scores.argmax(-1)
        if drawn:
            rows = [row for row, _, _ in drawn]
            tokens[rows] = draw(scores[rows], [sampling for *_, sampling in drawn], [_uniform(*e[1:]) for e in drawn])
        if noted:
            _note(scores, tokens, noted)
        if decided:
            rows = [row for row, _, _ in decided]
            scores[rows] = torch.full_like(scores[rows], -torch.inf).scatter_(1, tokens[rows, None], 0.0)
        return scores


def draw(scores: Tensor, samplings: Sequence[Sampling], uniform: Sequence[float]) -> Tensor:
    """Chooses a token for each row.

    Args:
        scores: [rows, vocabulary], float32.
        samplings: sampling of each row; none is greedy.
        uniform: number in [0, 1) for each row, which decides among the tokens that may be drawn.

    Returns:
        [rows], int64.
    """
    size = scores.shape[1]
    probabilities = (scores / _column([s.temperature for s in samplings], scores)).softmax(-1)
    # sorting whole vocabularies takes longer than the forwards of small models, and a limit is seldom further down
    ordered, tokens = probabilities.topk(min(SORTED, size))
    allowed = _allowed(ordered, samplings)
    drawn = tokens.gather(1, _place(ordered * allowed, uniform)).squeeze(1)
    if ordered.shape[1] == size:
        return drawn
    further = [row for row, last in enumerate(allowed[:, -1].tolist()) if last or samplings[row].top_k > SORTED]
    for row in further:
        one, number = probabilities[row : row + 1], uniform[row : row + 1]
        if samplings[row].top_k or samplings[row].top_p < 1:
            ordered, tokens = one.sort(descending=True)
            place = _place(ordered * _allowed(ordered, samplings[row : row + 1]), number)
            drawn[row] = tokens[0, place[0, 0]]
        else:
            drawn[row] = _place(one * (one >= samplings[row].min_p * one.max()), number)[0, 0]
    return drawn


def _allowed(ordered: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Returns bool [rows, tokens], whether a token may be drawn; `ordered` has descending probabilities."""
    size = ordered.shape[1]
    top_k, top_p, min_p = (_column([getattr(s, name) for s in samplings], ordered) for name in LIMITS)
    of_top_k = torch.arange(size, device=ordered.device) < top_k.where(top_k > 0, size)
    # the share is of the tokens that `top_k` leaves
    whole = torch.where(top_k > 0, (ordered * of_top_k).sum(-1, keepdim=True), 1.0)
    likelier = ordered.cumsum(-1) - ordered
    allowed = of_top_k & ((likelier < top_p * whole) | (top_p == 1)) & (ordered >= min_p * ordered[:, :1])
    # the likeliest may always be drawn
    allowed[:, 0] = True
    return allowed


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _place(weights: Tensor, uniform: Sequence[float]) -> Tensor:
    """Returns [rows, 1], the index in `weights` [rows, tokens] that a row's number in [0, 1) hits."""
    reached = weights.cumsum(-1, dtype=torch.float64)
    whole = reached[:, -1:]
    wanted = torch.tensor(uniform, dtype=torch.float64, device=weights.device)[:, None] * whole
    # a product may round up to the whole
    place = torch.searchsorted(reached, wanted.minimum(whole.nextafter(torch.zeros_like(whole))), right=True)
    # nothing is reached if scores are NaN; the request fails
    return place.clamp_(max=weights.shape[1] - 1)


def _uniform(state: Any, sampling: Sampling) -> float:
    """Returns a number in [0, 1) that depends only on the seed, the answer and the token's position in it."""
    start = state._true_initial_tokens or len(state.initial_tokens)
    # a preempted request has its new tokens in its prompt
    position = len(state.initial_tokens) - start + len(state.generated_tokens)
    child = str(state.request_id).rpartition(CHILD)
    # other requests may have similar names
    answer = int(child[2]) + 1 if child[1] and child[2].isdecimal() and len(child[2]) <= MOST_DIGITS else 0
    # numpy would round a list with a 64-bit number to floats
    key = np.array([int(sampling.seed) % 2**64, answer], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=position)
    return float(np.random.Generator(bits).random())


def _note(scores: Tensor, tokens: Tensor, noted: list[tuple[int, Any, Sampling]]) -> None:
    """Adds the logprobs of `tokens` [rows] to the requests that want them."""
    rows = [row for row, _, _ in noted]
    most = max(sampling.top_logprobs or 0 for *_, sampling in noted)
    logprobs = scores[rows].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[rows, None]).squeeze(1).tolist()
    values, likeliest = (found.tolist() for found in logprobs.topk(min(most, logprobs.shape[1]), dim=-1))
    for i, (_, state, sampling) in enumerate(noted):
        top = tuple(zip(likeliest[i], values[i]))[: sampling.top_logprobs]
        # the engine keeps them if a request is preempted, and returns them with its tokens
        state.logprobs.append(TokenLogprobs(chosen[i], top))
