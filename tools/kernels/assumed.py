"""Launches for a device that need not be present."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_diffkv.ops import backend


@contextmanager
def assume_device(device: backend.Device) -> Iterator[None]:
    """Makes launchers treat every tensor as being on `device` within the block; for launches that are not executed."""
    previous, backend._assumed = backend._assumed, device
    try:
        yield
    finally:
        backend._assumed = previous
