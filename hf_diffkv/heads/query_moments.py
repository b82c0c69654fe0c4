"""Second moments of the queries of a model's heads, used to round keys of generated tokens.

They are nearly constant for a model, so one measurement serves all requests. A store reads them but does not own them:
they do not count towards a cache's bytes and are not saved, forked or moved with rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..ops.rotation import rotation_matrix
from ..ops.rounding.moments import feedback_of
from ..replacing import save_tensors
from .mark import Mark
from .recognition import MARK_KEY

MOMENTS_FORMAT = "query moments 1"
# metadata entries that say where the moments come from
ORIGIN = ("model_type", "model_digest", "documents_digest")
# share of the mean diagonal added to the diagonal, in case the queries do not span all directions
ADDED_SHARE = 1e-6


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """Second moment q q^T of each KV head, averaged over the queries of all layers that read it, up to a factor.

    Attributes:
        model_type: `model_type` of the model's text configuration.
        model_digest: digest of the weights, as `hf_diffkv.heads.weights.model_digest` returns it.
        documents_digest: digest of the measured documents' tokens.
        triangles: Cholesky factor L of the moment L L^T for each compressed layer, bfloat16
            [heads, key_dim * (key_dim + 1) / 2], the rows of the lower triangle concatenated. The product is positive
            semidefinite even after L is rounded.
        mark: mark by which copies and relatives of the model are recognised; None without one.

    Raises:
        ValueError: tensors have another shape or dtype or values that are not finite, or there are none.
    """

    model_type: str
    model_digest: str
    documents_digest: str
    triangles: tuple[Tensor, ...]
    mark: Mark | None = None
    _feedback: dict[tuple, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for layer, triangle in enumerate(self.triangles):
            fits = triangle.ndim == 2 and triangle.dtype == torch.bfloat16
            dim = _dim_of(triangle) if fits else 0
            if not fits or dim * (dim + 1) // 2 != triangle.shape[1] or not triangle.isfinite().all():
                raise ValueError(
                    f"layer {layer} must be finite bfloat16 [heads, key_dim * (key_dim + 1) / 2], not "
                    f"{triangle.dtype} {list(triangle.shape)}."
                )
        if not self.triangles:
            raise ValueError("there are no layers.")

    @classmethod
    def of(
        cls,
        model_type: str,
        model_digest: str,
        documents_digest: str,
        moments: Sequence[Tensor],
        mark: Mark | None = None,
    ) -> QueryMoments:
        """Creates an instance from the moment of each compressed layer, [heads, key_dim, key_dim]."""
        return cls(model_type, model_digest, documents_digest, tuple(map(_triangle_of, moments)), mark)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and key_dim of each compressed layer."""
        return tuple((triangle.shape[0], _dim_of(triangle)) for triangle in self.triangles)

    def check_layers(self, count: int) -> None:
        """Raises `ValueError` unless the model has as many compressed layers as were measured."""
        if count != len(self.triangles):
            raise _misfit(f"{len(self.triangles)} layers", f"{count} layers of this model are compressed")

    def check_layer(self, index: int, heads: int, key_dim: int) -> None:
        """Raises `ValueError` unless compressed layer `index` was measured with `heads` heads of `key_dim` channels."""
        if (heads, key_dim) != self.shapes[index]:
            found, dim = self.shapes[index]
            raise _misfit(f"{found} KV heads of {dim} in layer {index}", f"that layer has {heads} of {key_dim}")

    @torch.inference_mode(False)
    def feedback(self, heads: int, key_dim: int, rotate: bool, device: torch.device) -> Tensor:
        """Returns `ModelFeedback.matrix` for layers of this head shape, rotated or not; computed once per device."""
        key = heads, key_dim, rotate, device
        if key not in self._feedback:
            matrix = rotation_matrix(key_dim, torch.float64, torch.device("cpu")) if rotate else None
            found = [
                feedback_of(moment_of(triangle), matrix)
                if shape == (heads, key_dim)
                else torch.eye(key_dim, dtype=torch.float64, device="cpu").expand(heads, -1, -1)
                for triangle, shape in zip(self.triangles, self.shapes)
            ]
            self._feedback[key] = torch.stack(found).to(torch.bfloat16).to(device)
        return self._feedback[key]

    def __deepcopy__(self, memo: dict) -> QueryMoments:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_feedback": {}}

    def save(self, path: str | os.PathLike) -> None:
        """Writes the moments to a safetensors file. Raises `OSError`."""
        metadata = {"format": MOMENTS_FORMAT, **{name: getattr(self, name) for name in ORIGIN}}
        if self.mark is not None:
            metadata[MARK_KEY] = json.dumps(self.mark.to_dict())
        tensors = {str(layer): triangle.contiguous() for layer, triangle in enumerate(self.triangles)}
        save_tensors(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike) -> QueryMoments:
        """Reads a file written by `save`; returns the same object as long as the file does not change.

        Raises:
            ValueError: the file does not hold query moments.
            OSError: the file cannot be read.
        """
        path = Path(path).resolve()
        state = path.stat()
        return _load(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _load(path: Path, changed: int, size: int) -> QueryMoments:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != MOMENTS_FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {MOMENTS_FORMAT!r}")
            # copied, because the file may be replaced
            triangles = tuple(file.get_tensor(str(layer)).clone() for layer in range(len(file.keys())))
        mark = Mark.from_dict(json.loads(metadata[MARK_KEY])) if MARK_KEY in metadata else None
        model_type, model_digest, documents_digest = (metadata[name] for name in ORIGIN)
        return QueryMoments(model_type, model_digest, documents_digest, triangles, mark)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} does not hold the moments of a model's queries: {error}") from error


def moment_of(triangle: Tensor) -> Tensor:
    """Returns L L^T, float64 [heads, dim, dim]."""
    dim = _dim_of(triangle)
    lower = torch.zeros(triangle.shape[0], dim, dim, dtype=torch.float64, device="cpu")
    row, column = torch.tril_indices(dim, dim, device="cpu")
    lower[:, row, column] = triangle.double().cpu()
    return lower @ lower.mT


def _triangle_of(moment: Tensor) -> Tensor:
    moment = moment.double().cpu()
    dim = moment.shape[1]
    mean = moment.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
    some = (ADDED_SHARE * mean)[:, None, None] * torch.eye(dim, dtype=torch.float64, device="cpu")
    row, column = torch.tril_indices(dim, dim, device="cpu")
    return torch.linalg.cholesky(moment + some)[:, row, column].to(torch.bfloat16)


def _dim_of(triangle: Tensor) -> int:
    return int(((8 * triangle.shape[-1] + 1) ** 0.5 - 1) / 2 + 0.5)


def _misfit(measured: str, found: str) -> ValueError:
    return ValueError(
        f"the query moments that were found are for {measured}, but {found}; measure them again with `hf-diffkv "
        "calibrate --model MODEL`, or remove the file; under tensor parallelism call cache.attach(model) first."
    )
