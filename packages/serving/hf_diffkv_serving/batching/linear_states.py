"""States of linear attention and convolutions in continuous batching: one of each per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from hf_diffkv.cache.errors import HandOverError

from .linear_layers import LinearModule

# names of a layer's states in the cache
STATES = ("conv_states", "recurrent_states")


class LinearStates:
    """The states of every slot, in all layers that have some.

    Args:
        templates: cache layers as the model leaves them for one request, by index.

    Initially there is one slot.
    """

    def __init__(self, templates: dict[int, LinearAttentionLayer]) -> None:
        self._templates = templates
        self._held = {
            (layer, name, index): torch.zeros_like(state)
            for layer, template in templates.items()
            for name, index, state in _states(template)
        }
        self._slot_bytes = self.bytes
        # tokens of the running forward, and the layers that are still to run in it
        self._tokens = 0
        self._to_run: set[int] = set()
        self._prompts: list[tuple[int, int, int, int]] = []
        self._step_slots = self._step_at = torch.zeros(0, dtype=torch.int64)

    @property
    def bytes(self) -> int:
        """Bytes on the device, including those of idle slots."""
        return sum(state.nbytes for state in self._held.values())

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Implements `slot_room.PerSlot`. While the number of slots changes, one state tensor is held twice."""
        return slots * self._slot_bytes + max(state.nbytes for state in self._held.values())

    def resize(self, slots: int, tokens: int) -> None:
        """Implements `slot_room.PerSlot`."""
        for name, state in self._held.items():
            kept = min(slots, state.shape[0])
            if kept < max(slots, state.shape[0]):
                fresh = self._held[name] = state.new_zeros(slots, *state.shape[1:])
                fresh[:kept] = state[:kept]

    def move(self, slot: int, to: int) -> None:
        """Implements `slot_room.PerSlot`."""
        self.fork(slot, to)

    def fork(self, slot: int, twin: int) -> None:
        """Gives `twin` a copy of the states of `slot`."""
        for state in self._held.values():
            state[twin] = state[slot]

    def begin(self, forward: Sequence[tuple[int, int, int]]) -> None:
        """Starts a forward.

        Args:
            forward: slot, past tokens and new tokens of each request, in the order in which they are packed.
        """
        steps, self._prompts, at = [], [], 0
        for slot, past, tokens in forward:
            if past and tokens == 1:
                steps.append((slot, at))
            elif tokens:
                self._prompts.append((slot, at, past, tokens))
            at += tokens
        self._tokens, self._to_run = at, set(self._templates)
        pairs = torch.tensor(steps, dtype=torch.int64).view(-1, 2)
        device = next(iter(self._held.values())).device
        self._step_slots, self._step_at = pairs.to(device).unbind(1)

    def run(self, module: LinearModule, hidden_states: Tensor) -> Tensor:
        """Runs a module for the packed tokens of the forward, each request with its own states.

        Args:
            hidden_states: [1, tokens, hidden].

        Returns:
            [1, tokens, hidden].

        Raises:
            HandOverError: the forward was not started by `begin`.
        """
        if module.layer not in self._to_run or hidden_states.shape[:2] != (1, self._tokens):
            raise HandOverError(
                "the model ran alongside the manager: its linear attention keeps the states of the manager's "
                "requests. Stop the manager before using the model for anything else, or use pause()."
            )
        self._to_run.discard(module.layer)
        output = torch.empty_like(hidden_states)
        if self._step_slots.numel():
            states = self._of(module.layer, self._step_slots)
            output[0, self._step_at] = module.run(hidden_states[0, self._step_at][:, None], states)[:, 0]
            self._keep(module.layer, self._step_slots, states)
        for slot, at, past, tokens in self._prompts:
            mine = torch.tensor([slot], device=hidden_states.device)
            states = self._of(module.layer, mine) if past else self._fresh(module.layer)
            parts = [tokens] if module.goes_on or not past else [1] * tokens
            for part in parts:
                output[:, at : at + part] = module.run(hidden_states[:, at : at + part], states)
                at += part
            self._keep(module.layer, mine, states)
        return output

    def _fresh(self, layer: int) -> LinearAttentionLayer:
        return LinearAttentionLayer(self._templates[layer].number_of_states)

    def _of(self, layer: int, slots: Tensor) -> LinearAttentionLayer:
        """Returns a cache layer with copies of the states of `slots`."""
        template, found = self._templates[layer], self._fresh(layer)
        for name, index, _ in _states(template):
            getattr(found, name)[index] = self._held[layer, name, index][slots]
            getattr(found, f"is_{name}_initialized")[index] = True
        found.device, found.dtype = template.device, template.dtype
        found.conv_kernel_size = dict(template.conv_kernel_size)
        found.has_previous_state = dict(template.has_previous_state)
        return found

    def _keep(self, layer: int, slots: Tensor, states: LinearAttentionLayer) -> None:
        for name, index, state in _states(states):
            self._held[layer, name, index][slots] = state


def _states(layer: LinearAttentionLayer) -> list[tuple[str, int, Tensor]]:
    """Returns name, index and tensor [rows, ...] of each state of a layer."""
    held = [(name, index, state) for name in STATES for index, state in getattr(layer, name).items()]
    return [(name, index, state) for name, index, state in held if state is not None]
