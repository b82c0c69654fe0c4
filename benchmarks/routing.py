"""Simulates how often requests find their prefixes among many replicas, with the shipped routing.

    python benchmarks/routing.py --replicas 1000

Conversations of several turns, each starting with one of several shared texts, arrive at random and occupy a replica
for a random time. A turn hits if its replica holds the previous turn; a replica evicts the oldest prefixes first.
Nothing is computed: queues and hits follow from the routing alone. The tables appear in docs/distributed.md.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_diffkv_serving.ray.beginnings import Places

# average requests on a replica, as a share of its capacity
LOAD = 0.6
AT_ONCE = 16
SECONDS = 10.0
PAUSE = 10.0


@dataclass(frozen=True)
class Case:
    """Parameters of one simulation.

    Attributes:
        replicas: number of replicas.
        routers: number of routers; a conversation's turns may reach any of them.
        shared: number of texts that conversations begin with, drawn by Zipf's law.
        turns: mean number of turns of a conversation.
        kept: number of conversations that a replica keeps.
        random: whether to take the shorter of two random queues instead of routing by prefix.
        added: number of replicas added halfway through.
        removed: number of replicas removed halfway through.
    """

    replicas: int
    routers: int = 1
    shared: int = 200
    turns: int = 6
    kept: int = 400
    random: bool = False
    added: int = 0
    removed: int = 0


def requests(case: Case, seconds: float, seed: int) -> Iterator[tuple[float, int, int, int]]:
    """Time, conversation, turn and shared text of each request, in order."""
    rng = random.Random(seed)
    rate = case.replicas * AT_ONCE * LOAD / SECONDS
    weights = [1 / (i + 1) for i in range(case.shared)]
    waiting: list[tuple[float, int, int, int]] = []
    now, talks = 0.0, 0
    starts = rate / case.turns
    upcoming = rng.expovariate(starts)
    while now < seconds:
        if waiting and waiting[0][0] < upcoming:
            now, talk, turn, text = heapq.heappop(waiting)
        else:
            now, talk, turn, text = upcoming, talks, 0, rng.choices(range(case.shared), weights)[0]
            talks += 1
            upcoming = now + rng.expovariate(starts)
        yield now, talk, turn, text
        if rng.random() < 1 - 1 / case.turns:
            heapq.heappush(waiting, (now + SECONDS + rng.expovariate(1 / PAUSE), talk, turn + 1, text))


def simulate(case: Case, seconds: float, seed: int = 0) -> dict[str, float]:
    """Shares of turns and of first requests that hit, longest queue relative to the mean, and table sizes.

    If replicas are added or removed, hits are counted over the ten seconds that follow.
    """
    rng = random.Random(seed + 1)
    alive = list(range(case.replicas))
    queues = dict.fromkeys(alive, 0)
    kept: dict[int, OrderedDict[Any, None]] = {replica: OrderedDict() for replica in alive}
    routers = [Places() for _ in range(case.routers)]
    ending: list[tuple[float, int]] = []
    counts: Counter[str] = Counter()
    longest = 0.0
    changed = not (case.added or case.removed)
    half = seconds / 2
    for now, talk, turn, text in requests(case, seconds, seed):
        while ending and ending[0][0] <= now:
            replica = heapq.heappop(ending)[1]
            if replica in queues:
                queues[replica] -= 1
        if not changed and now >= half:
            changed = True
            for replica in range(case.replicas, case.replicas + case.added):
                queues[replica], kept[replica] = 0, OrderedDict()
            for replica in rng.sample(alive, case.removed):
                del queues[replica], kept[replica]
        keys = (hash(("text", text)), *(hash((talk, i)) for i in range(turn + 1)))
        places = rng.choice(routers)
        ranked = [] if case.random else places.rank(keys, queues)
        replica = next(
            (min(group, key=queues.__getitem__) for group in ranked if any(queues[one] < AT_ONCE for one in group)),
            None,
        )
        if replica is None or queues[replica] >= AT_ONCE:
            replica = min(rng.sample(list(queues), 2), key=queues.__getitem__)
        places.note(keys, replica)
        queues[replica] += 1
        heapq.heappush(ending, (now + rng.expovariate(1 / SECONDS), replica))
        held = kept[replica]
        measured = now >= half and (now < half + 10 or not (case.added or case.removed))
        if measured:
            counts["requests"] += 1
            counts["turns"] += turn > 0
            counts["turn hits"] += turn > 0 and (talk, turn - 1) in held
            counts["first"] += turn == 0
            counts["text hits"] += turn == 0 and ("text", text) in held
            longest = max(longest, max(queues.values()))
        held.pop((talk, turn - 1), None)
        for entry in (("text", text), (talk, turn)):
            held.pop(entry, None)
            held[entry] = None
        while len(held) > case.kept:
            held.popitem(last=False)
    return {
        "turns": counts["turn hits"] / max(1, counts["turns"]),
        "texts": counts["text hits"] / max(1, counts["first"]),
        "longest": longest,
        "keys": sum(map(len, routers)) / len(routers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    n = options.replicas
    cases = {
        "by queue alone": Case(n, random=True),
        "1 router": Case(n),
        "10 routers": Case(n, 10),
        "100 routers": Case(n, 100),
        f"10 routers, {n // 10} more replicas": Case(n, 10, added=n // 10),
        f"10 routers, {n // 10} fewer": Case(n, 10, removed=n // 10),
    }
    print("| routing | further turns that hit | first requests that find their text | longest queue | keys a router |")
    print("|---|---|---|---|---|")
    for name, case in cases.items():
        found = simulate(case, options.seconds)
        print(
            f"| {name} | {found['turns']:.1%} | {found['texts']:.1%} | {found['longest']:.0f} | {found['keys']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
