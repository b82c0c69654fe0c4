"""Which token ids a cache holds, as far as `generate()` has shown them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Ids of consecutive tokens.

    Attributes:
        start: position of the first, padding counted.
        ids: int64 [batch, tokens]; never written to.
    """

    start: int
    ids: Tensor

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.start + self.ids.shape[1]


class HeldTokens:
    """Remembers the ids that `generate()` runs a model on, to know a prompt that does not continue them.

    Positions that other calls filled, embeddings or a forward of one's own, stay unknown. In decode steps ids are kept
    by reference, so that nothing is computed or read. The ids of a forward count once the cache is found to have
    seen as many tokens as it was to add.
    """

    def __init__(self) -> None:
        # and the seen tokens before and after the forward noted last; replaced as a whole, as any thread may read it
        self._held: tuple[list[Piece], int, int] = ([], 0, 0)

    def pieces(self, seen: int) -> list[Piece]:
        """What is known of the `seen` tokens of a cache, in order and without overlaps."""
        pieces, before, after = self._held
        return list(pieces) if seen == after else _cut(pieces, min(seen, before))

    def take_up(self, pieces: list[tuple[int, Tensor]], seen: int) -> None:
        """Knows of a cache that has `seen` tokens the `pieces`, each a `Piece`'s start and ids."""
        self._hold([Piece(start, ids) for start, ids in pieces], seen)

    def note(self, ids: Tensor, new: int, seen: int, of_user: bool) -> None:
        """Notes that a forward is about to add the last `new` tokens of `ids` to a cache that has `seen` tokens.

        Args:
            ids: int64 [batch, tokens]. of_user: whether they may be written to afterwards, as the user holds them.
        """
        pieces = self.pieces(seen)
        last = pieces[-1] if pieces and pieces[-1].end == seen else None
        known = seen + new - ids.shape[1]
        added = ids[:, ids.shape[1] - new :]
        if last is None or last.ids.shape[0] != ids.shape[0]:
            pieces.append(Piece(seen, added.clone()))
        elif of_user or known > last.start:
            pieces[-1] = Piece(last.start, torch.cat([last.ids, added.to(last.ids.device)], dim=1))
        else:
            pieces[-1] = Piece(last.start, ids[:, last.start - known :])
        self._held = (pieces, seen, seen + new)

    def check(self, input_ids: Tensor, attention_mask: Tensor | None, seen: int) -> None:
        """Compares a prompt with what is known of the `seen` tokens it should begin with. Reads the device.

        Args:
            input_ids: int64 [batch, tokens], the whole text. attention_mask: [batch, tokens]; None hides no token.

        Raises:
            ValueError: they part.
        """
        tokens, device = input_ids.shape[1], input_ids.device
        pieces = [piece for piece in self.pieces(seen) if piece.start < tokens]
        if not pieces or pieces[0].ids.shape[0] != input_ids.shape[0]:
            return
        held = torch.cat([piece.ids[:, : tokens - piece.start].to(device) for piece in pieces], dim=1)
        place = torch.cat([torch.arange(piece.start, min(piece.end, tokens), device=device) for piece in pieces])
        other = held != input_ids[:, place]
        if attention_mask is not None:
            other &= attention_mask[:, place].to(other.device, torch.bool)
        columns = other.any(0)
        if not bool(columns.any()):
            return
        column = int(columns.int().argmax())
        row, position = int(other[:, column].int().argmax()), int(place[column])
        raise ValueError(
            f"input_ids do not begin with the tokens that the cache holds: they part at position {position} of "
            f"sequence {row}, where the cache has token {int(held[row, column])} and input_ids "
            f"{int(input_ids[row, position])}. To continue, pass the whole conversation with the very ids that "
            "generate() was given and returned; for another prompt call cache.reset() or use a new DiffKVCache."
        )

    def crop(self, seen: int, tokens: int) -> None:
        """Forgets the last `tokens` of `seen`."""
        self._hold(_cut(self.pieces(seen), seen - tokens), seen - tokens)

    def select(self, index: Tensor, seen: int) -> None:
        """Makes sequence i what sequence index[i] was; index: int64 [sequences]."""
        pieces = self.pieces(seen)
        chosen = [Piece(piece.start, piece.ids.index_select(0, index.to(piece.ids.device))) for piece in pieces]
        self._hold(chosen, seen)

    def clear(self) -> None:
        """Forgets everything; the cache is empty."""
        self._hold([], 0)

    def _hold(self, pieces: list[Piece], seen: int) -> None:
        self._held = (pieces, seen, seen)

    def __deepcopy__(self, memo: dict) -> HeldTokens:
        twin = HeldTokens()
        # no list of pieces is ever changed
        twin._held = self._held
        return twin


def _cut(pieces: list[Piece], seen: int) -> list[Piece]:
    """Those among the first `seen` tokens."""
    return [Piece(piece.start, piece.ids[:, : seen - piece.start]) for piece in pieces if piece.start < seen]
