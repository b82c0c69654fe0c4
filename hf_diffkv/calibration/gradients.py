"""Losses from changing single heads, by gradients of the predictions that follow a prompt.

Changing a head's keys or values changes its layer's attention output by d. To second order, the KL divergence of a
later prediction is then the mean of (g d)^2 / 2 over random g. Each g is the gradient, with respect to that output, of
the sum of e_y sqrt(p_y) (l_y - E l) over tokens y, with random signs e_y, probabilities p_y and logits l_y. The second
moment of g is the Fisher information. One backward pass with a few rows therefore serves all heads of all layers, and
each layer only repeats its own attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..evaluation.errors import EvaluationError
from .differentiable import differentiable
from .watched import WatchedLayer, run_tokens

# number of random gradients per document
GRADIENTS = 8


class Following:
    """Tokens that follow a prompt, with random gradients of their predictions.

    Args:
        model: model within `watching`.
        layers: layers of the model's cache after the prompt, from `run_prompt`.
        positions: positions in `following` whose predictions count.
        signs: random signs, [samples, positions, vocabulary]; None draws `GRADIENTS` samples, always the same.

    Raises:
        EvaluationError: the model cannot be differentiated.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[Any],
        following: Sequence[int],
        positions: Sequence[int],
        signs: Tensor | None = None,
    ) -> None:
        self._layers = [layer for layer in layers if isinstance(layer, WatchedLayer)]
        self._predictions = len(positions)
        chosen = torch.tensor(list(positions), device=model.device)
        # a row for each gradient
        rows = GRADIENTS if signs is None else len(signs)
        ids = torch.tensor([list(following)], device=model.device).expand(rows, -1)
        for layer in layers:
            if isinstance(layer, WatchedLayer):
                layer.readings = []
            else:
                layer.reorder_cache(torch.zeros(rows, dtype=torch.int64, device=model.device))
        start = self._layers[0].keys.shape[2]
        with torch.inference_mode(False), torch.enable_grad(), differentiable(model):
            logits = run_tokens(model, ids, start, Cache(layers=list(layers)), chosen)
            signs = random_signs(following, *logits.shape[1:]) if signs is None else signs
            self._gradients = self._differentiated(model, logits, signs.to(logits.device))

    def losses(self, index: int, keys: Tensor, values: Tensor) -> tuple[list[float], list[float]]:
        """Returns each head's mean KL in nats with other keys, and with other values, [heads, tokens, dim]."""
        layer = self._layers[index]
        return self._losses(index, keys, layer.values[0]), self._losses(index, layer.keys[0], values)

    def _losses(self, index: int, keys: Tensor, values: Tensor) -> list[float]:
        # for each sample and head
        total: Tensor | float = 0.0
        for reading, gradients in zip(self._layers[index].readings or (), self._gradients[index]):
            change = self._layers[index].changed(reading, keys, values)[0].float()
            # query heads that share a KV head are adjacent
            parts = (tensor.flatten(-2).unflatten(-1, (len(keys), -1)) for tensor in (gradients, change))
            total = total + torch.einsum("sthd,thd->sh", *parts)
        return (torch.as_tensor(total).square().mean(0) / (2 * self._predictions)).tolist()

    def _differentiated(self, model: Any, logits: Tensor, signs: Tensor) -> list[list[Tensor]]:
        """Returns the gradients of each layer's readings, float32 [samples, tokens, query_heads, value_dim]."""
        leaves = [reading.change for layer in self._layers for reading in layer.readings or ()]
        # the same in every row
        probabilities = logits[:1].detach().softmax(-1)
        weight = probabilities.sqrt() * signs
        weight.addcmul_(probabilities, weight.sum(-1, keepdim=True), value=-1)
        try:
            each = iter(torch.autograd.grad(logits, leaves, weight))
        except RuntimeError as error:
            raise EvaluationError(
                f"heads are measured by gradients, but {type(model).__name__} has none ({error}); load it without "
                "quantised weights, or with kernels that can be differentiated."
            ) from error
        return [[next(each).float() for _ in layer.readings or ()] for layer in self._layers]


def random_signs(following: Sequence[int], positions: int, vocabulary: int, samples: int = GRADIENTS) -> Tensor:
    """Returns random signs that depend only on the tokens, int8 [samples, positions, vocabulary] on the CPU."""
    digest = hashlib.sha256(str(list(following)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    shape = samples, positions, vocabulary
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
