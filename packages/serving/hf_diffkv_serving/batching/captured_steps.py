"""Captured decode steps in continuous batching: the forward of a batch in which every request has one token.

Tables and scratch stay in place until the number of slots, or their length, changes. A graph of the model's forward
therefore serves any requests: their slots are one of its inputs. Batches are padded to powers of two with tokens that
no slot gets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_diffkv.cache import graphs
from hf_diffkv.ops.backend import use_kernels
from hf_diffkv.ops.softmax import Softmax

from .attention import PackedCache
from .engine_cache import ContinuousCache

_logger = logging.getLogger("hf_diffkv")


class StepCache(PackedCache):
    """Stands in for the cache within a captured forward.

    Args:
        cache: cache that it stands in for.
        tokens: number of tokens of the forward.

    Attributes:
        slots: int64 [tokens], slot of each token's request; the number of slots for tokens without a request.
        stepping: bool [slots], whether the slot has a token.
        rehearsing: whether attention leaves everything unchanged.
        mask: bool [1, 1, 1, 1], placeholder for a mask. Without one, models look for padding on the device.
    """

    def __init__(self, cache: ContinuousCache, tokens: int) -> None:
        self._cache, self.rehearsing = cache, False
        self.slots = torch.full((tokens,), cache.slots.count, device=cache.device)
        self.stepping = torch.zeros(cache.slots.count, dtype=torch.bool, device=cache.device)
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=cache.device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        softmax: Softmax,
        sliding_window: int | None = None,
    ) -> Tensor:
        """Attends like `ContinuousCache.attend`."""
        if self.rehearsing:
            return query.new_zeros(*query.shape[:3], value.shape[3])
        count, given = self._cache.slots.count, []
        for tensor in (query, key, value):
            rows = tensor.new_zeros(count + 1, tensor.shape[1], 1, tensor.shape[3])
            rows[self.slots, :, 0] = tensor[0].transpose(0, 1)
            given.append(rows[:count])
        stepped = self._cache.attend_steps(layer, given, softmax, self.stepping)
        return stepped[self.slots.clamp(max=count - 1), :, 0].transpose(0, 1)[None]


class _Step:
    """A graph and the buffers of its inputs.

    Args:
        size: tokens of the forward.
    """

    def __init__(self, cache: ContinuousCache, size: int) -> None:
        self.cache = StepCache(cache, size)
        self.nobody = cache.slots.count
        self.ids, self.positions = (torch.zeros(1, size, dtype=torch.int64, device=cache.device) for _ in range(2))
        self.graph: Any = None
        # [1, size, vocabulary], what the graph leaves
        self.logits = torch.empty(0)

    def fill(self, slots: Sequence[int], inputs: dict[str, Any]) -> None:
        """Copies the tokens of a forward, whose requests are in `slots`, into the buffers."""
        tokens, cache = len(slots), self.cache
        self.ids[:, :tokens] = inputs["input_ids"]
        self.positions[:, :tokens] = inputs["position_ids"]
        cache.slots.copy_(torch.tensor([*slots, *[self.nobody] * (cache.slots.numel() - tokens)]))
        cache.stepping.zero_()
        cache.stepping[cache.slots[:tokens]] = True

    def capture(self, model: Any, device: torch.device) -> None:
        """Records the forward without running it. Raises whatever it raises."""
        inputs = {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": self.cache.mask}

        def work() -> Tensor:
            return model(**inputs, use_cache=False, cache=self.cache).logits

        # all compiling and tuning happens here
        self.cache.rehearsing = True
        work()
        self.cache.rehearsing = False
        self.graph = graphs.GRAPH_TYPES[device.type](device)
        self.logits = self.graph.capture(work)


class CapturedSteps:
    """Stands in for the model where the engine calls it.

    Args:
        model: model that runs everything but plain decode steps.
        cache: cache of the engine.

    Attributes:
        captures, replays: number of captured and of replayed steps.
    """

    def __init__(self, model: Any, cache: ContinuousCache) -> None:
        self.model, self.cache = model, cache
        self.captures = self.replays = 0
        # where everything was after the last uncaptured step; capturing must not be the first use of a kernel
        self._warm: tuple | None = None
        self._steps: dict[int, _Step] = {}
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        slots = [] if self._failed or inputs.get("attention_mask") is not None else self.cache.begin_steps()
        if not slots:
            return self.model(**inputs)
        place = tuple(part.store.addresses() for part in self.cache.slots.parts)
        if place != self._warm:
            output = self.model(**inputs)
            self._warm = tuple(part.store.addresses() for part in self.cache.slots.parts)
            self._steps.clear()
            return output
        size = min(1 << (len(slots) - 1).bit_length(), self.cache.slots.count)
        step = self._steps.get(size) or _Step(self.cache, size)
        step.fill(slots, inputs)
        if step.graph is None and not self._capture(step):
            return self.model(**inputs)
        self._steps[size] = step
        step.graph.replay()
        self.replays += 1
        logits, kept = step.logits[:, : len(slots)], inputs.get("logits_to_keep")
        return SimpleNamespace(logits=logits.clone() if kept is None else logits[:, kept])

    def _capture(self, step: _Step) -> bool:
        try:
            step.capture(self.model, self.cache.device)
        except Exception as error:  # models fail in many ways; nothing has run on the device, so the step can go on
            self._failed = True
            reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
            _logger.warning("decode steps are not captured, which is slower: %s", ": ".join(reason))
            return False
        self.captures += 1
        return True


def captures_steps(model: Any, cache: ContinuousCache, asked: bool) -> bool:
    """Returns whether the engine's decode steps are captured.

    Args:
        asked: whether the configuration asks for it.
    """
    stores = [part.store for part in cache.slots.parts]
    return (
        asked
        and cache.device.type in graphs.GRAPH_TYPES
        and cache.sliding is None
        and cache.linear is None
        and cache.slots.ranks.alone
        and not graphs.rotates_by_length(model)
        and all(store.pool.grows_in_place and use_kernels(store.device, store.dtype) for store in stores)
    )
