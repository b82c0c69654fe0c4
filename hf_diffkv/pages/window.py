"""Where the exact tokens of a request stand: its first tokens, the sinks, then its newest ones in a ring.

The first `sink_slots` slots of a window hold sinks, token i in slot i, the others are a ring of R = slots - sink_slots
slots, token i in slot sink_slots + i % R. Which tokens are sinks is said for every request: those below `sink_end`,
which is `sink_slots` unless a mask hid some of them. A window holds the tokens [0, sink_end) and [start, length),
with sink_end <= start.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(position: Tensor, sink_end: Tensor | None, sink_slots: int, slots: int) -> Tensor:
    """Slots int64 of tokens; all tensors int64 that broadcast, `sink_end` None without sinks."""
    slot = sink_slots + position % (slots - sink_slots)
    return slot if sink_end is None else torch.where(position < sink_end, position, slot)


def held_tokens(start: Tensor, length: Tensor, sink_end: Tensor | None, sink_slots: int, slots: int) -> Tensor:
    """The token in each slot, int64 [..., slots], -1 where there is none; start, length, sink_end: int64 [...]."""
    start, length = start[..., None], length[..., None]
    ring = torch.arange(slots - sink_slots, device=length.device)
    # slot s of the ring holds the newest token i < length with i % R == s
    token = length - 1 - (length - 1 - ring) % ring.numel()
    token = torch.where(token >= start, token, -1)
    if sink_end is None:
        return token
    first = torch.arange(sink_slots, device=length.device)
    return torch.cat([torch.where(first < torch.minimum(length, sink_end[..., None]), first, -1), token], dim=-1)


def held_count(start: Tensor, length: Tensor, sink_end: Tensor | None) -> Tensor:
    """Tokens in each window, int64, of int64 tensors that broadcast."""
    ring = (length - start).clamp(min=0)
    return ring if sink_end is None else ring + torch.minimum(length, sink_end)
