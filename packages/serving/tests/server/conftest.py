"""The fixture `served`, which skips where the server's packages are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def served(capfd: pytest.CaptureFixture) -> Iterator[Callable]:
    """Runs `use` with a client of a server with some options."""
    from operated_server import serving

    yield from serving(capfd)
