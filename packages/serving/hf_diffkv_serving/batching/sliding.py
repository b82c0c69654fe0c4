"""Sliding-window layers in continuous batching: uncompressed, in the blocks of Transformers' own allocator.

Every slot has room for one request's windows, so that a request with a slot never waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_diffkv.cache.dense import dense_attention
from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.pages.reserve import reserve

from .engine_names import CachePool, SlidingAttentionCacheAllocator
from .shapes import SLIDING_PAGE, SPARE_PAGES, AttentionShape, SlidingShape

# queries of a prompt that attend at a time if the window is shorter
FEWEST_QUERIES = 128
_attend = partial(dense_attention, dropout=0.0, causal=False)


class SlidingWindows:
    """Windows of all sliding-window layers, for each request by its name.

    Args:
        text_config: configuration of the model's decoder.
        sliding: sliding-window layers of the model.
        shape: shape of their attention.

    Raises:
        UnsupportedModelError: keys or values are not as long as the model's configuration says.
    """

    def __init__(self, text_config: Any, sliding: SlidingShape, shape: AttentionShape) -> None:
        self.window, self.layers = sliding.window, frozenset(sliding.layers)
        self._sliding, self._shape = sliding, shape
        self._allocator = SlidingAttentionCacheAllocator(
            index=0,
            config=text_config,
            num_key_value_heads=shape.num_heads,
            cache_dtype=shape.dtype,
            page_size=SLIDING_PAGE,
            layer_indices=list(sliding.layers),
            allow_block_sharing=False,
        )
        if not shape.key_dim == shape.value_dim == self._allocator.head_dim:
            raise UnsupportedModelError(
                f"keys and values of {shape.key_dim} and {shape.value_dim} elements, where the configuration says "
                f"{self._allocator.head_dim}, are not supported by the sliding windows of Transformers' engine; use "
                "generate()."
            )
        self._memory = reserve(shape.device)
        self._blocks = 0
        self._forward = _PackedForward([], [], [], shape.device)
        self.resize(1, 1)

    @property
    def bytes(self) -> int:
        """Bytes on the device, including those of idle slots."""
        return self._memory.committed + self._memory.slack

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Implements `slot_room.PerSlot`."""
        held = self._sliding.bytes(self._shape, slots, tokens)
        copied = 0 if self._memory.grows_in_place else self._memory.committed
        return held + max(self._memory.granularity, self._memory.slack) + copied

    def resize(self, slots: int, tokens: int) -> None:
        """Implements `slot_room.PerSlot`. Blocks after the last remaining one move to free ones."""
        size, blocks = self._allocator.bytes_per_block, slots * self._sliding.pages(tokens)
        tables, end = self._allocator.block_table, SPARE_PAGES + blocks
        owned = {block for table in tables.values() for block in table}
        free = [block for block in range(SPARE_PAGES, end) if block not in owned]
        moved = dict(zip(sorted(block for block in owned if block >= end), free))
        if moved:
            at = torch.tensor([list(moved), list(moved.values())], device=self._memory.device)
            rows = self._memory.tensor[: self._memory.committed].view(-1, size)
            rows[at[1]] = rows[at[0]]
            for table in tables.values():
                table[:] = [moved.get(block, block) for block in table]
        before = self._memory.committed
        if end * size < before:
            self._memory.shrink(end * size)
        self._memory.commit(end * size)
        self._memory.tensor[before : end * size] = 0
        pool = CachePool(blocks, 1)
        self._allocator.register_cache_tensor(size, blocks * size, self._memory.tensor[: end * size], pool)
        pool.free_blocks(self._allocator.index, free[len(moved) :])

    def move(self, slot: int, to: int) -> None:
        """Implements `slot_room.PerSlot`. Nothing moves, as windows are found by request name."""

    @property
    def requests(self) -> set[str]:
        """Names of the requests that hold something."""
        return set(self._allocator.block_table)

    def release(self, request_id: str) -> None:
        """Forgets a request, if it holds anything."""
        self._allocator.free_blocks(request_id, no_cache=True)

    def fork(self, request_id: str, twin: str, tokens: int) -> None:
        """Gives `twin` a copy of what a request of `tokens` tokens holds."""
        self._allocator.copy_blocks(*self._allocator.fork_blocks(request_id, twin, tokens))

    def begin(self, forward: Sequence[tuple[str, int, int]]) -> None:
        """Starts a forward.

        Args:
            forward: name, past tokens and new tokens of each request, in the order in which they are packed.
        """
        read, write, spans = [], [], []
        for request_id, past, tokens in forward:
            self._allocator.allocate_cache_to_request(request_id, past, tokens)
            read += self._allocator.get_read_indices(request_id, past, tokens)
            write += self._allocator.get_write_indices(request_id, past, tokens)
            spans.append((tokens, self._allocator.get_seqlen_k(past, tokens)))
        if not any(past for _, past, _ in forward):
            read = []
        self._forward = _PackedForward(read, write, spans, self._memory.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attends from the packed tokens of a forward, and stores them; arguments and result as in `Slots.attend`."""
        forward = self._forward
        packed = (tensor[0].transpose(0, 1) for tensor in (key, value))
        keys, values = self._allocator.update(*packed, layer, forward.read, forward.write)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        if forward.step_at.numel():
            # [steps, heads, 1, dim], and [steps, kv_heads, keys, dim]
            rows = query[0, :, forward.step_at].transpose(0, 1)[:, :, None]
            held = (forward.rows(tensor).transpose(1, 2) for tensor in (keys, values))
            stepped = _attend(rows, *held, forward.step_mask, softmax)
            output[0, :, forward.step_at] = stepped[:, :, 0].transpose(0, 1)
        for at, tokens, start, length in forward.prompts:
            held = (tensor[start : start + length].transpose(0, 1)[None] for tensor in (keys, values))
            output[:, :, at : at + tokens] = self._attend_prompt(query[:, :, at : at + tokens], *held, softmax)
        return output

    def _attend_prompt(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Attends in parts of the queries, each with its visible keys. The last query is at the last key."""
        parts, past, size = [], key.shape[2] - query.shape[2], max(self.window, FEWEST_QUERIES)
        for first in range(0, query.shape[2], size):
            part = query[:, :, first : first + size]
            low, high = max(0, past + first - self.window + 1), past + first + part.shape[2]
            distance = torch.arange(past + first, high, device=query.device)[:, None]
            distance = distance - torch.arange(low, high, device=query.device)
            mask = ((distance >= 0) & (distance < self.window))[None, None]
            parts.append(_attend(part, key[:, :, low:high], value[:, :, low:high], mask, softmax))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def dense_layers(self, request_id: str, seen: int) -> dict[int, DynamicSlidingWindowLayer]:
        """Returns the windows of a request of `seen` tokens as layers of a separate cache, by index."""
        index = self._allocator.get_read_indices(request_id, seen, 0)
        read, nothing = torch.tensor(index, dtype=torch.int64, device=self._memory.device), self._nothing()
        found = {}
        for layer in sorted(self.layers):
            held = [tensor.transpose(0, 1)[None] for tensor in self._allocator.update(*nothing, layer, read, read[:0])]
            found[layer] = DynamicSlidingWindowLayer(sliding_window=self.window)
            found[layer].update(*held)
            found[layer].cumulative_length = seen
        return found

    def load(self, request_id: str, layers: dict[int, DynamicSlidingWindowLayer]) -> None:
        """Gives a request that holds nothing yet what `layers` hold."""
        for layer, dense in layers.items():
            seen, held = dense.cumulative_length, dense.keys.shape[2]
            self._allocator.allocate_cache_to_request(request_id, 0, seen)
            index = self._allocator.get_write_indices(request_id, seen - held, held)
            write = torch.tensor(index, dtype=torch.int64, device=self._memory.device)
            rows = (tensor[0].transpose(0, 1) for tensor in (dense.keys, dense.values))
            self._allocator.update(*rows, layer, write[:0], write)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        """Returns empty keys and values."""
        shape = (0, self._allocator.num_key_value_heads, self._allocator.head_dim)
        empty = torch.empty(shape, dtype=self._allocator.cache_dtype, device=self._memory.device)
        return empty, empty


class _PackedForward:
    """Places at which the tokens of one forward are read, written and attend.

    Args:
        read, write: rows of the allocator's memory.
        spans: numbers of new and of visible tokens of each request.

    Attributes:
        step_at: int64 [steps], places of the requests with one token.
        step_keys: int64 [steps, keys], rows of the allocator's result.
        step_mask: bool [steps, 1, 1, keys]; None if all steps see the same number of keys.
        prompts: place, tokens, first row and number of rows of the allocator's result, for each other request.
    """

    def __init__(self, read: list[int], write: list[int], spans: list[tuple[int, int]], device: torch.device) -> None:
        self.read, self.write = (torch.tensor(i, dtype=torch.int64, device=device) for i in (read, write))
        self.prompts: list[tuple[int, int, int, int]] = []
        steps, at, start = [], 0, 0
        for tokens, length in spans:
            if tokens == 1:
                steps.append((at, start, length))
            elif tokens:
                # a prompt of one token that is to be forked has none here
                self.prompts.append((at, tokens, start, length))
            at, start = at + tokens, start + length
        self.step_at, starts, lengths = torch.tensor(steps, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
        most = max((length for _, _, length in steps), default=0)
        place = torch.arange(most, device=device)
        # beyond a request's own keys, its first one is repeated and masked
        shown = place < lengths[:, None]
        self.step_keys = starts[:, None] + place * shown
        alike = len({length for _, _, length in steps}) == 1
        self.step_mask = None if alike else shown[:, None, None]
        self._only_steps = alike and len(steps) == len(spans)

    def rows(self, packed: Tensor) -> Tensor:
        """Returns keys or values of requests with one token, [steps, keys, kv_heads, dim], from those of all."""
        return packed.unflatten(0, (len(self.step_at), -1)) if self._only_steps else packed[self.step_keys]
