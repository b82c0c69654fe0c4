"""Generation in a separate thread, which reports its progress to a waiting one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_diffkv.compat import passing

# how long a caller waits for a token before it can do something else
PATIENCE_SECONDS = 0.2


@dataclass(frozen=True)
class StreamedStep:
    """Signals that a layer of the prompt's forward is done, or a token has come.

    Attributes:
        layers: number of layers that have read the prompt.
        token: id of the token; None for a layer.
        seconds: `time.perf_counter` at that time.
        bytes: bytes that the cache held at that time.
    """

    layers: int
    token: int | None
    seconds: float
    bytes: int


class _Stream(BaseStreamer, StoppingCriteria):
    """Passes steps from the generating thread to another one, which may stop it."""

    def __init__(self, held: Callable[[], int]) -> None:
        self.items: queue.SimpleQueue = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.held, self.layers = held, 0
        self.prompt_came = self.prompt_read = False

    def put(self, value: Tensor) -> None:
        if self.prompt_came:
            self.prompt_read = True
            self.items.put(StreamedStep(self.layers, int(value), time.perf_counter(), self.held()))
        self.prompt_came = True

    def end(self) -> None:
        pass

    def layer_done(self, *args: Any) -> None:
        """Hook after each layer's attention, when the cache holds that layer."""
        if not self.prompt_read:
            self.layers += 1
            self.items.put(StreamedStep(self.layers, None, time.perf_counter(), self.held()))

    def next(self) -> Any:
        """Returns the next item, or None if none comes for `PATIENCE_SECONDS`."""
        try:
            return self.items.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            return None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.stopped.is_set(), device=input_ids.device)


def layers_of(model: Any) -> list[Any]:
    """Returns the first module of each layer with a `layer_idx`: its attention, or a layer that holds it."""
    found: dict[int, Any] = {}
    for module in model.modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int):
            found.setdefault(layer_idx, module)
    return list(found.values())


def stream_steps(
    model: Any, ids: Tensor, cache: Any, max_new_tokens: int, held: Callable[[], int]
) -> Generator[StreamedStep | None, None, None]:
    """Yields the prompt's layers, then greedy tokens, as they come; None if nothing has come for a while.

    Closing the iterator stops the model. The model's errors are raised.

    Args:
        ids: int64 [1, tokens].
        held: function that returns the bytes `cache` holds; called by the generating thread.
    """
    stream = _Stream(held)
    end = object()

    def work() -> None:
        try:
            with _hooks(model, stream.layer_done):
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    **passing(cache),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    streamer=stream,
                    stopping_criteria=[stream],
                )
            stream.items.put(end)
        except BaseException as error:
            stream.items.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while (item := stream.next()) is not end:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stream.stopped.set()
        thread.join()


@contextmanager
def _hooks(model: Any, hook: Callable[..., None]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in layers_of(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
