"""Waits of the host for the device, which no kernel needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits(checked: bool) -> Iterator[None]:
    """Makes every wait of the host for the device an error."""
    torch.cuda.set_sync_debug_mode("error" if checked else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
