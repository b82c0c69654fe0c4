"""Whether the server accepts requests, and if not, why."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from ..batching.manager import DiffKVBatchingManager
from .errors import RefusedError


@dataclass
class Health:
    """State of a server: ready, failed, or draining.

    Args:
        grace: seconds that answers under way have to finish once the server is told to stop.

    Attributes:
        draining_since: `time.monotonic` when the server was told to stop; None before.
    """

    engine: DiffKVBatchingManager
    grace: float
    draining_since: float | None = field(default=None, init=False)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine; None while it runs."""
        return self.engine.failure

    @property
    def grace_left(self) -> float:
        """Seconds until answers under way are ended; infinite if the server has not been told to stop."""
        if self.draining_since is None:
            return math.inf
        return max(0.0, self.draining_since + self.grace - time.monotonic())

    def drain(self) -> None:
        """Starts refusing new requests."""
        if self.draining_since is None:
            self.draining_since = time.monotonic()

    def refusal(self) -> RefusedError | None:
        """Returns the refusal of a new request, or None if it is accepted."""
        if self.failure is not None:
            return RefusedError(503, f"the engine failed and takes no requests: {self.failure}", code="engine_failed")
        if self.draining_since is not None:
            # by then a balancer has another server, or this one is back
            headers = {"retry-after": str(math.ceil(self.grace_left) + 1)}
            return RefusedError(503, "the server is stopping and takes no requests.", code="draining", headers=headers)
        return None

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Status and content of `/health`."""
        refusal = self.refusal()
        if refusal is None:
            return 200, {"status": "ok"}
        return 503, {"status": refusal.code, "reason": str(refusal)}
