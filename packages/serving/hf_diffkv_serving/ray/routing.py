"""The replicas' request router, which Ray Serve asks where a request goes."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# Ray copies everything this module defines, so classes that senders use too must be defined in another module
from .beginnings import Places, Wanted


class BeginningRouter(RequestRouter):
    """Sends a request whose first argument is a `Wanted` to a replica that holds its beginning and has room."""

    def initialize_state(self, **options: Any) -> None:
        """Takes the arguments of `Places`."""
        self._places = Places(**options)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas to ask, one after another."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        wanted = _wanted(pending_request)
        if pending_request is not None:
            # if all of them are full, wait before asking again
            pending_request.routing_context.should_backoff = True
        if named := [replica for name, replica in replicas.items() if name.unique_id == wanted.replica]:
            return [named]
        # a replica that was not asked recently counts as idle, and is asked before it gets anything
        queues = {name: self.replica_queue_len_cache.get(name) or 0 for name in replicas}
        return [[replicas[name] for name in group] for group in self._places.rank(wanted.keys, queues)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers where the request went."""
        self._places.note(_wanted(pending_request).keys, replica_id)


def _wanted(request: PendingRequest | None) -> Wanted:
    found = request.args[0] if request is not None and request.args else None
    return found if isinstance(found, Wanted) else Wanted()
