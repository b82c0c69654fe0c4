"""Contexts in which the cache makes its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Makes tensors without gradients within the block that can be changed in any mode later.

    Tensors that are made within `torch.inference_mode` could not be changed outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
