"""Statistics of a prefix store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpectedPrefix:
    """Prefix that a waiting request will find.

    Attributes:
        tier: fastest tier that holds the longest prefix; None if none is stored.
        resident: whether this is the first tier, which needs no loading.
        loading: whether the prefix is being moved to the first tier.
        tokens: number of tokens of the prefix.
    """

    tier: str | None = None
    resident: bool = False
    loading: bool = False
    tokens: int = 0


@dataclass(frozen=True)
class PrefixEntry:
    """One stored prefix.

    Attributes:
        tokens: number of tokens.
        tier: fastest tier that holds it: "device", "host" or "disk".
        bytes: its size there; for files, their whole size.
        on_disk: whether the folder also has it.
        hits: number of this store's lookups that it answered.
        score: number of announced and running requests for it (CaR).
    """

    tokens: int
    tier: str
    bytes: int
    on_disk: bool
    hits: int
    score: int


@dataclass(frozen=True)
class PrefixStats:
    """Statistics of a store since it was made.

    Attributes:
        lookups: number of calls to `lookup`.
        hits: number of calls that found a prefix, by the tier that held it.
        tokens: number of tokens of all prompts looked up.
        tokens_reused: number of these tokens that were found in a prefix and not recomputed.
        bytes_read: bytes read from each tier by hits and by loading ahead of them.
        bytes_written: bytes written to each tier.
        loaded_ahead, offloaded: number of prefixes that the thread of `PrefixStore.start` moved up for waiting
            requests, and moved down early.
        disk_errors: number of the folder's files that could not be read, written or removed, or were damaged.
        lookup_seconds: time spent in `lookup`.
        seconds_per_token: time per prompt token, from `PrefixStore.measure`; None before that.
    """

    lookups: int
    hits: dict[str, int]
    tokens: int
    tokens_reused: int
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    loaded_ahead: int
    offloaded: int
    disk_errors: int
    lookup_seconds: float
    seconds_per_token: float | None

    @property
    def seconds_saved(self) -> float | None:
        """Time to compute the reused tokens at the measured speed, minus that of all lookups; None if unmeasured."""
        if self.seconds_per_token is None:
            return None
        return self.tokens_reused * self.seconds_per_token - self.lookup_seconds

    def __str__(self) -> str:
        found = ", ".join(f"{count} {tier}" for tier, count in self.hits.items())
        share = self.tokens_reused / self.tokens if self.tokens else 0.0
        saved = "" if self.seconds_saved is None else f"; {self.seconds_saved:.2f} s saved"
        return (
            f"{self.lookups} lookups, hits: {found}; {self.tokens_reused} of {self.tokens} prompt tokens reused "
            f"({share:.0%}){saved}"
        )
