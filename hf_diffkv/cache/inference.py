"""Contexts in which the cache makes its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def ordinary_tensors() -> AbstractContextManager[None]:
    """Returns a context without gradients whose new tensors can be changed in any later mode.

    Tensors that are made within `torch.inference_mode` could not be changed outside of it.
    """
    return _outside_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
