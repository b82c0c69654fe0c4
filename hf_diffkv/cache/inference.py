"""Contexts in which the cache creates its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Makes the block create tensors without gradients, which can later be changed in any mode.

    Tensors created within `torch.inference_mode` could not be changed outside it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
