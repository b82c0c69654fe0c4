"""The state of one device, from one forward to the next."""

from __future__ import annotations

from ..pages.layout import NARROW_POSITIONS
from .bounds import HostBounds
from .compaction import compact_round
from .forward import enters_at_once
from .window import center_rows


class Store(HostBounds):
    """Pages and windows of `num_layers` layers on one device.

    A token of a request has an index among the request's real tokens (padding never counts). The exact ones are the
    sinks, below `sink_end`, and those from `window_start` on; pages/window.py. Rows are (layer, request, head).

    Args:
        config: the user's choices.
        num_layers: compressed layers that live here.
        batch_size, num_heads: requests and KV heads on this device.
        key_dim, value_dim: elements of one head.
        dtype, device: of the model's keys and values.
        total_layers: compressed layers of the model; None takes `num_layers`.
        first_head: index in the model of the first head here.
        max_positions: no request is to have more tokens, padding included; None where that is not known.

    Raises:
        ValueError: a precision that does not fit the head.
        MemoryError: `max_bytes` cannot hold the windows.
    """

    def begin(self, tokens: int) -> None:
        """Starts a forward of `tokens` new tokens: runs the compaction that is due and makes room.

        Raises:
            ValueError: the tokens would be more than positions can count, or see `check_values`.
            MemoryError: there is no room; the cache is as it was.
        """
        self.check_positions(tokens)
        self.settle()
        self.forward = None
        if tokens > 1 and not enters_at_once(self):
            self.check_values()
        if tokens == 1 and self.seen > 0 and not self.recording:
            self.prepare_step()
        self.seen += tokens

    def check_positions(self, tokens: int) -> None:
        """Raises `ValueError` if pages cannot hold the positions of so many more tokens."""
        if self.layout.high.position_bytes == 2 and self.seen + tokens > NARROW_POSITIONS:
            raise ValueError(
                f"{self.seen + tokens} tokens are beyond the model's max_position_embeddings and have positions that "
                "16 bits cannot hold; use DiffKVConfig(metadata_bits=32)."
            )

    def prepare_step(self) -> None:
        """Makes room for one generated token per request. Raises as `begin` does."""
        self.refresh_if_due()
        self.count_step()

    def count_step(self) -> None:
        """Notes that a step runs for which there is room."""
        self._steps_left -= 1
        self.steps_since_compaction += 1
        self.compaction_due = self.compacts_after_step(0)

    def compacts_after_step(self, steps: int = 1) -> bool:
        """Whether a compaction is due once `steps` more steps have run."""
        return self.steps_since_compaction + steps >= self.config.compaction_interval

    def settle(self) -> None:
        """Runs the compaction of the last step, if it is still to be done."""
        if not self.compaction_due:
            return
        self.compact()
        self.compaction_done()

    def compact(self) -> None:
        """The device's part of a compaction: as many rounds as tokens left the windows."""
        if self.centers_soon:
            center_rows(self)
        for _ in range(self.config.compaction_interval):
            compact_round(self)

    def compaction_done(self, done: bool = True) -> None:
        """Notes that the compaction that was due has run, if `done`."""
        if done:
            self.compaction_due = False
            self.steps_since_compaction = 0

    def withdraw(self, tokens: int) -> None:
        """Undoes `begin` for a forward whose first layer stored nothing."""
        self.seen -= tokens
        self.padding.length = min(self.padding.length, self.seen)
        self.compaction_due = False
        if tokens == 1 and self.seen > 0 and not self.recording:
            self.steps_since_compaction -= 1
