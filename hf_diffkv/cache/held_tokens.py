"""Token ids that a cache holds, as far as `generate()` has provided them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Ids of consecutive tokens.

    Attributes:
        start: position of the first token, padding included.
        ids: int64 [batch, tokens]; never written to.
    """

    start: int
    ids: Tensor

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.ids.shape[1]


class HeldTokens:
    """Remembers the token ids of `generate()` calls, to detect a prompt that does not continue them.

    Positions filled by embeddings or by the user's own forwards stay unknown. In decode steps ids are kept by
    reference, so that nothing is computed or read. A forward's ids count once the cache has seen all tokens that it was
    to add.
    """

    def __init__(self) -> None:
        # pieces, and seen tokens before and after the last noted forward; replaced whole, as any thread may read it
        self._held: tuple[list[Piece], int, int] = ([], 0, 0)

    def pieces(self, seen: int) -> list[Piece]:
        """Returns the known ids among the `seen` tokens of a cache, in order and without overlaps."""
        pieces, before, after = self._held
        return list(pieces) if seen == after else _cut(pieces, min(seen, before))

    def take_up(self, pieces: list[tuple[int, Tensor]], seen: int) -> None:
        """Sets the known ids of a cache with `seen` tokens; `pieces` holds start and ids of each `Piece`."""
        self._hold([Piece(start, ids) for start, ids in pieces], seen)

    def note(self, ids: Tensor, new: int, seen: int, of_user: bool) -> None:
        """Notes that a forward is about to add the last `new` tokens of `ids` to a cache with `seen` tokens.

        Args:
            ids: int64 [batch, tokens].
            of_user: whether `ids` belongs to the user, who may write to it afterwards.
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
        """Compares a prompt with the known ids of the `seen` tokens it should begin with. Reads the device.

        Args:
            input_ids: int64 [batch, tokens], the whole text.
            attention_mask: [batch, tokens]; None hides no token.

        Raises:
            ValueError: the prompt differs from the cached tokens.
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
            f"input_ids do not begin with the tokens that the cache holds: they differ from position {position} of "
            f"sequence {row} on, where the cache has token {int(held[row, column])} and input_ids "
            f"{int(input_ids[row, position])}. To continue, pass the whole conversation with exactly the ids that "
            "generate() was given and returned; for another prompt, or after beam search, which leaves beams other "
            "than the returned one in the cache, call cache.reset() or use a new DiffKVCache."
        )

    def crop(self, seen: int, tokens: int) -> None:
        """Forgets the last `tokens` of `seen`."""
        self._hold(_cut(self.pieces(seen), seen - tokens), seen - tokens)

    def select(self, index: Tensor, seen: int) -> None:
        """Reorders sequences: sequence i becomes the former sequence index[i]; index: int64 [sequences]."""
        pieces = self.pieces(seen)
        chosen = [Piece(piece.start, piece.ids.index_select(0, index.to(piece.ids.device))) for piece in pieces]
        self._hold(chosen, seen)

    def clear(self) -> None:
        """Forgets all ids, for an empty cache."""
        self._hold([], 0)

    def _hold(self, pieces: list[Piece], seen: int) -> None:
        self._held = (pieces, seen, seen)

    def __deepcopy__(self, memo: dict) -> HeldTokens:
        twin = HeldTokens()
        # lists of pieces are never changed in place
        twin._held = self._held
        return twin


def _cut(pieces: list[Piece], seen: int) -> list[Piece]:
    """Returns the pieces of the first `seen` tokens."""
    return [Piece(piece.start, piece.ids[:, : seen - piece.start]) for piece in pieces if piece.start < seen]
