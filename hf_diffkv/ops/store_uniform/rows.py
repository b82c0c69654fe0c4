"""What a layer holds beside its pages, as tokens enter it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class EnteredRows:
    """Tensors of one layer, all changed in place.

    Attributes:
        page_table: int32 [batch, heads, width]. high_count: int32 [batch, heads].
        window_key, window_value: [batch, heads, slots, dim]; window_score: float32 [batch, heads, slots].
        length, window_start, sink_end: int64 [batch].
        key_offset: float32 [batch, heads, key_dim], or [batch, heads, 0] where keys are held without one.
        invalid: bool [], becomes True where a token cannot be stored.
        sink_slots: slots of a window that sinks have.
    """

    page_table: Tensor
    high_count: Tensor
    window_key: Tensor
    window_value: Tensor
    window_score: Tensor
    length: Tensor
    window_start: Tensor
    sink_end: Tensor
    key_offset: Tensor
    invalid: Tensor
    sink_slots: int

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raises `ValueError` unless keys and values, [batch, heads, tokens, dim], fit and all is contiguous."""
        batch, heads, slots, key_dim = self.window_key.shape
        value_dim = self.window_value.shape[3]
        tokens = key.shape[2]
        for name, tensor, shape in (
            ("key", key, (batch, heads, tokens, key_dim)),
            ("value", value, (batch, heads, tokens, value_dim)),
            ("window_value", self.window_value, (batch, heads, slots, value_dim)),
            ("window_score", self.window_score, (batch, heads, slots)),
            ("high_count", self.high_count, (batch, heads)),
            ("length", self.length, (batch,)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}.")
        if key.dtype != self.window_key.dtype or value.dtype != self.window_key.dtype:
            raise ValueError(f"keys and values must be {self.window_key.dtype}, not {key.dtype} and {value.dtype}.")
        held = (self.page_table, self.high_count, self.window_key, self.window_value, self.window_score)
        held += (self.length, self.window_start, self.sink_end, self.key_offset)
        if not all(tensor.is_contiguous() for tensor in held):
            raise ValueError("what a layer holds must be contiguous, as it is written in place.")
