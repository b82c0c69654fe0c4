"""Feedback that a model's heads have for all requests, whatever their queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ModelFeedback:
    """What `feedback_of` gives for each head of a model, and which heads of it some rows have.

    Attributes:
        matrix: bfloat16 [model_layers, model_heads, dim, dim], contiguous; shared by all that reads it.
        layer, head: int64 [layers] and [heads], which of them rows have that are [layers, batch, heads].

    Raises:
        ValueError: a matrix of another form.
    """

    matrix: Tensor
    layer: Tensor
    head: Tensor

    def __post_init__(self) -> None:
        matrix = self.matrix
        square = matrix.ndim == 4 and matrix.shape[2] == matrix.shape[3] and matrix.is_contiguous()
        if not square or matrix.dtype != torch.bfloat16:
            raise ValueError(
                f"matrix must be contiguous bfloat16 [layers, heads, dim, dim], not {matrix.dtype} "
                f"{list(matrix.shape)}."
            )

    @property
    def matrices(self) -> Tensor:
        """Those of all heads, [model_layers * model_heads, dim, dim]."""
        return self.matrix.flatten(0, 1)

    def of_rows(self, rows: int) -> Tensor:
        """Which of `matrices` each of so many rows has, int64 [rows]."""
        place = self.layer[:, None] * self.matrix.shape[1] + self.head
        batch = rows // place.numel()
        return place[:, None].expand(-1, batch, -1).reshape(-1)
