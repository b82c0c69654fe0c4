"""Runs lm-evaluation-harness with any cache of `methods`.

The harness finds models only in its own registry, so `hf-diffkv lm-eval` registers this one and then runs the harness's
command line. In Python use `lm_eval.simple_evaluate(model=DiffKVLM(...), ...)`.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
from torch import Tensor

from hf_diffkv.arguments import similar
from hf_diffkv.cache.diffkv_cache import DiffKVCache
from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods.dense import DENSE
from hf_diffkv.evaluation.methods.diffkv import CONFIG_FIELDS, DiffKVMethod
from hf_diffkv.evaluation.session import Session
from hf_diffkv.extras import install
from hf_diffkv.running.models import resolve_model

from .methods import get_method

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import model_registry
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise EvaluationError(f"lm-evaluation-harness is needed: {install('eval')} ({error}).") from error

MODEL_NAME = "hf-diffkv"

# a name under which the harness shows messages like its own
_logger = logging.getLogger("lm_eval.models.hf_diffkv")


class DiffKVLM(HFLM):
    """The harness's Transformers model with a cache of one method.

    Args:
        pretrained: folder, Hub id, short name (`resolve_model`), or a loaded model.
        cache: name of a method, for example `diffkv`, `diffkv:K8V4`, `quanto:4`, `dense`.
        batch_size: batch size as in `HFLM`; other than 1 only with methods that hold several requests in one cache.
        **kwargs: arguments of `HFLM`; fields of `DiffKVConfig` become options of `cache`.

    Raises:
        EvaluationError: the method is unknown or does not work with the model or batch size, options are unknown or
            belong to another method, or the model is an encoder-decoder model.
    """

    def __init__(self, pretrained: Any, cache: str = "diffkv", batch_size: int | str = 1, **kwargs: Any) -> None:
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in CONFIG_FIELDS}
        self.method = get_method(method_name(cache, fields))
        if self.method.environment is not None:
            raise EvaluationError(
                f"cache={cache} needs its own environment ({self.method.environment.name}); use "
                "benchmarks/quality/peers.py."
            )
        if not self.method.batches and str(batch_size) != "1":
            raise EvaluationError(
                f"batch_size={batch_size}: a cache of {self.method.label!r} holds one request; use batch_size=1."
            )
        self.cached_tokens = self.cached_bytes = 0
        self.simulated = False
        self.diffkv_config: dict[str, Any] | None = None
        try:
            name = resolve_model(pretrained) if isinstance(pretrained, str) else pretrained
        except ValueError as error:
            raise EvaluationError(f"pretrained={pretrained}: {error}") from error
        try:
            super().__init__(name, batch_size=batch_size, **kwargs)
        except TypeError as error:
            unknown = next((each for each in kwargs if f"keyword argument '{each}'" in str(error)), None)
            if unknown is None:
                raise
            close = similar(unknown, CONFIG_FIELDS)
            hint = f"did you mean {close[0]}?" if close else "leave it out."
            raise EvaluationError(
                f"{unknown} is neither an argument of the harness's hf model nor a field of DiffKVConfig; {hint}"
            ) from error
        try:
            self.method.new_cache(self.model)
        except (UnsupportedModelError, ValueError) as error:
            raise EvaluationError(f"cache={self.method.label}: {error}") from error

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        if self.backend != "causal":
            raise EvaluationError("an encoder-decoder model cannot be used with --model hf-diffkv; use --model hf.")

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        """Generates for one left-padded batch with a new cache. Returns token ids [batch, tokens] with prompts.

        Raises:
            EvaluationError: the budget of the cache is too small.
        """
        session = Session(self.model, self.method)
        cache = session.cache
        try:
            with torch.no_grad(), self.method.attached(session.model, session.cache):
                written = super()._model_generate(context, max_length, stop, **passing(cache), **kwargs)
        except MemoryError as error:
            raise EvaluationError(f"cache={self.method.label}: {error}") from error
        held = session.held()
        self.cached_bytes += held.bytes
        # the last generated token is never cached
        generated = written.shape[1] - context.shape[1] - 1
        self.cached_tokens += int(kwargs["attention_mask"].sum()) + context.shape[0] * generated
        self.simulated |= held.simulated
        self.diffkv_config = cache.config.to_dict() if isinstance(cache, DiffKVCache) else None
        return written

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that the model generates after each request's context."""
        texts = super().generate_until(requests, disable_tqdm)
        if self.cached_tokens:
            _logger.info("cache=%s: %d bytes per token", self.method.label, self.cached_bytes // self.cached_tokens)
        return texts

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores requests with the dense cache. Raises `EvaluationError` for other caches."""
        self._refuse_likelihood(requests)
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores requests with the dense cache. Raises `EvaluationError` for other caches."""
        self._refuse_likelihood(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _refuse_likelihood(self, requests: list[Instance]) -> None:
        if self.method.label != DENSE:
            tasks = ", ".join(sorted({request.task_name for request in requests if request.task_name}))
            raise EvaluationError(
                f"cache={self.method.label} cannot answer log-likelihood requests ({tasks}): they score a text in one "
                "forward, which reads nothing from a cache, so every cache would give the same; use tasks that "
                "generate, or cache=dense."
            )

    def get_model_info(self) -> dict[str, Any]:
        """Returns the harness's information for its results, with the cache and its measured bytes per token."""
        info = {
            "method": self.method.label,
            "config": self.diffkv_config,
            "tokens": self.cached_tokens,
            "bytes": self.cached_bytes,
            "bytes_per_token": self.cached_bytes / self.cached_tokens if self.cached_tokens else None,
            "simulated": self.simulated,
        }
        return {**super().get_model_info(), "kv_cache": info}


def method_name(cache: str, fields: dict[str, Any]) -> str:
    """Returns the name of the method `cache` with fields of `DiffKVConfig` as additional options.

    Raises:
        EvaluationError: fields are given to another method.
    """
    if not fields:
        return cache
    if not isinstance(get_method(cache), DiffKVMethod):
        raise EvaluationError(f"{', '.join(fields)}: options of cache=diffkv, not of cache={cache}; leave them out.")
    values = "+".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()
    )
    return f"{cache}{'+' if ':' in cache else ':'}{values}"


def register() -> None:
    """Registers this model with the harness as `hf-diffkv`. Further calls do no harm."""
    model_registry.register(MODEL_NAME, target=DiffKVLM)
