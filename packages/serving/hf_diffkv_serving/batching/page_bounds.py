"""Upper bounds on the pages of a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PageBounds:
    """Upper bounds on the pages of requests in one store.

    Attributes:
        exact: tokens that a request has before the first one leaves its window.
        page_tokens: int64 [layers, heads], minimum tokens in a page of a row, except its last ones.
        selects: whether tokens of a row are chosen for one of two tiers, each of which may end in a partial page.
    """

    exact: int
    page_tokens: np.ndarray
    selects: bool

    def rows(self, tokens: int) -> np.ndarray:
        """Returns int64 [layers, heads], pages of each row of a request of `tokens` tokens."""
        stored = max(0, tokens - self.exact)
        return -(-stored // self.page_tokens) + (self.selects and stored > 0)

    def pages(self, tokens: int) -> int:
        """Returns the pages of a request of `tokens` tokens."""
        return int(self.rows(tokens).sum())

    def full_pages(self, tokens: int) -> int:
        """Returns the least number of full pages in a request of `tokens` tokens, if no tokens are chosen."""
        return int((max(0, tokens - self.exact) // self.page_tokens).sum())

    def more(self, seen: int, tokens: int, held: int, step: int) -> int:
        """Returns the most pages that `tokens` more tokens of a request that has seen `seen` need.

        Args:
            held: pages that the request has.
            step: pages that its next token may need once tokens leave its window.
        """
        if seen and tokens == 1:
            return step if seen >= self.exact else 0
        return self.pages(seen + tokens) - held
