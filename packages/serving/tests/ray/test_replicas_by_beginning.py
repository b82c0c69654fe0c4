"""Routing of requests by keys of their beginnings and the replicas that hold these."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hf_diffkv_serving.ray.beginnings import MOST_PIECES, PIECE, Places, beginnings


def chat(*texts: str) -> dict:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_keys_agree_as_far_as_requests_do() -> None:
    document = "".join(str(i) for i in range(1000))
    first, other = beginnings(chat("be kind", document, "why?")), beginnings(chat("be kind", document, "when?"))
    agreed = sum(a == b for a, b in zip(first, other))
    assert agreed == len(first) - 1 > len(document) // PIECE
    # a further turn begins with all of the first one
    assert beginnings(chat("be kind", document, "why?", "because"))[: len(first)] == first
    # within a text, pieces of 512 characters agree
    one, two = (beginnings({"prompt": document[: 4 * PIECE] + end}) for end in ("x", "y"))
    assert len(one) == len(two) == 5 and one[:4] == two[:4] and one[4] != two[4]
    # what one message holds is not what two hold
    assert beginnings({"prompt": ["ab", "c"]})[-1] != beginnings({"prompt": ["a", "bc"]})[-1]
    assert beginnings({"prompt": [1, 2, 3]}) != beginnings({"prompt": [1, 2, 4]})
    assert beginnings({**chat("a"), "tools": [{"type": "function"}]})[0] != beginnings(chat("a"))[0]
    assert len(beginnings({"prompt": "a" * PIECE * 1000})) == MOST_PIECES
    assert beginnings(None) == beginnings([]) == beginnings({"model": "m"}) == beginnings({"prompt": ""}) == ()


def test_a_request_goes_to_who_has_the_longest_beginning() -> None:
    places, idle = Places(slack=2), dict.fromkeys("abcd", 0)
    places.note((1, 2), "a")
    places.note((1, 2, 3), "b")
    places.note((1, 5), "c")
    assert places.rank((1, 2, 3, 4), idle)[0] == ["b"]
    assert places.rank((1, 2, 9), idle)[0] == ["b", "a"]
    assert places.rank((1, 5, 9), idle)[0] == ["c"]
    # within the slack it has its turn, beyond it another one is asked
    assert places.rank((1, 5, 9), {**idle, "c": 2})[0] == ["c"]
    assert all("c" not in group for group in places.rank((1, 5, 9), {**idle, "c": 3})[:-1])
    # one that is gone
    assert places.rank((1, 2, 3, 4), dict.fromkeys("acd", 0))[0] == ["a"]
    assert places.rank((1,), {}) == []


def test_routers_agree_on_what_nobody_has_seen() -> None:
    replicas = dict.fromkeys(range(20), 0)
    keys = range(4000)
    chosen = {key: tuple(Places().rank((key,), replicas)[0]) for key in keys}
    assert chosen == {key: tuple(Places().rank((key,), replicas)[0]) for key in keys}
    assert all(len(set(two)) == 2 for two in chosen.values())
    # 200 keys of each, with a standard deviation of 14
    assert all(130 < count < 270 for count in Counter(two[0] for two in chosen.values()).values())
    # with one replica more, keys move to it alone
    more = {key: Places().rank((key,), {**replicas, 20: 0})[0][0] for key in keys}
    moved = [key for key in keys if more[key] != chosen[key][0]]
    assert all(more[key] == 20 for key in moved) and 120 < len(moved) < 270


@pytest.mark.parametrize("come", [1, 4])
def test_busy_replicas_give_those_that_come_no_more_than_their_share(come: int) -> None:
    stay, under_way_each, talks = 8, 30, 2000
    places = Places()
    for talk in range(talks):
        places.note((talk,), talk % stay)
    # the oldest request ends whenever another one comes
    under_way = deque(list(range(stay)) * under_way_each)
    queues = {replica: under_way.count(replica) for replica in range(stay + come)}
    moved = 0
    for talk in range(talks):
        replica = min(places.rank((talk,), queues)[0], key=queues.__getitem__)
        moved += replica != talk % stay
        under_way.append(replica)
        queues[replica] += 1
        queues[under_way.popleft()] -= 1
    assert 0 < moved / talks < come / (stay + come)
    assert max(queues.values()) - min(queues.values()) < under_way_each / 2


def test_keys_used_last_are_remembered() -> None:
    places = Places(capacity=3, holders=2)
    places.note((1, 2), "a")
    places.note((3,), "a")
    places.note((1,), "b")
    places.note((4,), "a")
    assert len(places) == 3
    idle = dict.fromkeys("abc", 0)
    assert places.rank((1,), idle)[0] == ["b", "a"]
    places.note((1,), "c")
    assert places.rank((1,), idle)[0] == ["c", "b"]
    # 2 was used longest ago
    assert places._holding((2,), idle) == []
