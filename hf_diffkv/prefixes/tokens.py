"""Normalises token ids, and hashes their prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

DIGEST_BYTES = 16


def as_tokens(name: str, value: Any) -> Tensor:
    """Converts token ids [tokens] or [1, tokens] to int64 [tokens] on the CPU.

    Raises:
        ValueError: the ids have another shape, are not integers, or belong to more than one request.
    """
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        # such as the output of a tokeniser or generate()
        found = next((field for field in ("input_ids", "sequences") if hasattr(value, field)), None)
        remedy = "tokenise the text first" if found is None else f"pass its {found}"
        raise ValueError(f"{name} is a {type(value).__name__}; it must be token ids: {remedy}.") from error
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise ValueError(
            f"{name} has {ids.shape[0]} rows; a prefix store works on one request at a time: call it for each row."
        )
    if ids.ndim not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(
            f"{name} is {ids.dtype} {tuple(ids.shape)}; it must be token ids, integers [1, tokens] or [tokens]."
        )
    return ids.detach().reshape(-1).to("cpu", torch.int64)


def digests(ids: Tensor, lengths: Iterable[int]) -> dict[int, str]:
    """Hashes the first n ids for every n in `lengths`, in one pass over `ids` (int64 [tokens])."""
    array: Any = ids.contiguous().numpy()
    content = memoryview(array).cast("B")
    running, done, found = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, {}
    for length in sorted(set(lengths)):
        running.update(content[8 * done : 8 * length])
        done = length
        found[length] = running.copy().hexdigest()
    return found
