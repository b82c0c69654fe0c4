"""Beginnings of requests and the replicas that hold them. Nothing here uses Ray, and routers need not communicate."""

from __future__ import annotations

import functools
import hashlib
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# characters of a piece, about 128 tokens of English
PIECE = 512
# maximum pieces of a request to consider, about 32,000 tokens
MOST_PIECES = 256
KEY_BYTES = 8
WORD = (1 << 8 * KEY_BYTES) - 1
# 2^64 divided by the golden ratio, odd: Knuth's multiplicative hashing
REPLICA_FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Wanted:
    """Preferences of a request for the replica that it goes to.

    Attributes:
        keys: keys of its beginnings.
        replica: name of the replica to ask if it exists; None for any.
    """

    keys: tuple[int, ...] = ()
    replica: str | None = None


def beginnings(body: Any) -> tuple[int, ...]:
    """Returns the keys of a request's beginnings, the shortest first; none for a body without a prompt.

    A beginning ends after each message and every 512 characters. The keys of two requests agree as far as their texts.

    Args:
        body: parsed JSON body of a request to `/v1/chat/completions`, `/v1/completions` or `/v1/responses`.
    """
    if not isinstance(body, Mapping):
        return ()
    parts = [body[name] for name in ("tools", "instructions") if body.get(name)]
    for name in ("messages", "prompt", "input"):
        value = body.get(name)
        if value:
            # a list of token ids is one prompt
            several = isinstance(value, list) and not isinstance(value[0], int)
            parts += value if several else [value]
    keys: list[int] = []
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, sort_keys=True, ensure_ascii=False)
        for start in range(0, max(len(text), 1), PIECE):
            digest.update(text[start : start + PIECE].encode("utf-8", "surrogatepass"))
            keys.append(int.from_bytes(digest.digest(), "big"))
            if len(keys) == MOST_PIECES:
                return tuple(keys)
        digest.update(b"\0")
    return tuple(keys)


class Places:
    """Remembers which replicas got which beginnings, and ranks replicas for a request.

    A new beginning goes to one of two replicas determined by its first key alone, so that independent routers agree. A
    replica whose queue is longer than the shortest by more than `slack` is avoided; the idlest replica, which gets the
    request instead, then holds the beginning too.

    Args:
        slack: number of requests.
        capacity: number of keys to remember; the most recently used ones are kept.
        holders: maximum number of replicas to remember for a key.
    """

    def __init__(self, slack: int = 8, capacity: int = 200_000, holders: int = 8) -> None:
        self._slack, self._capacity, self._most = slack, capacity, holders
        self._holders: OrderedDict[int, tuple[Hashable, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, keys: Sequence[int], replica: Hashable) -> None:
        """Notes that a request with these beginnings went to `replica`."""
        for key in keys:
            others = tuple(other for other in self._holders.pop(key, ()) if other != replica)
            self._holders[key] = (replica, *others)[: self._most]
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def rank(self, keys: Sequence[int], queues: Mapping[Any, int]) -> list[list[Any]]:
        """Groups replicas in the order in which to ask them. Within a group, the shortest queue decides.

        Args:
            keys: result of `beginnings`.
            queues: number of requests of every existing replica.
        """
        if not queues:
            return []
        least = min(queues.values())
        limit = least + self._slack
        found = [replica for replica in self._holding(keys, queues) if queues[replica] <= limit]
        if not found and keys:
            found = [replica for replica in _two_for(keys[0], queues) if queues[replica] <= limit]
        if not found:
            # not any two: when an idle one joins, the beginnings of all others would move
            idlest = [replica for replica in queues if queues[replica] == least]
            found = random.sample(idlest, min(2, len(idlest)))
        return [found, random.sample(list(queues), min(2, len(queues)))]

    def _holding(self, keys: Sequence[int], queues: Mapping[Any, int]) -> list[Any]:
        """Returns the replicas that hold the longest known beginning."""
        for key in reversed(keys):
            if found := [replica for replica in self._holders.get(key, ()) if replica in queues]:
                return found
        return []


def _two_for(key: int, replicas: Iterable[Any]) -> list[Any]:
    """Returns two replicas by rendezvous hashing, so that few keys move when a replica joins or leaves."""

    def weight(replica: Any) -> int:
        mixed = (_number(replica) ^ key) * REPLICA_FACTOR & WORD
        return (mixed ^ mixed >> 32) * REPLICA_FACTOR & WORD

    return heapq.nlargest(2, replicas, key=weight)


@functools.lru_cache(maxsize=1 << 16)
def _number(replica: Any) -> int:
    """Returns 64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(str(replica).encode(), digest_size=KEY_BYTES).digest(), "big")
