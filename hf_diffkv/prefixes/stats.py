"""What a prefix store tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpectedPrefix:
    """What of a prefix a request that waits will find.

    Attributes:
        tier: the fastest one that holds its longest prefix; None where none is stored. tokens: of that prefix.
        resident: whether that is the first tier, from which it comes at once.
        loading: whether it is being brought there.
    """

    tier: str | None = None
    resident: bool = False
    loading: bool = False
    tokens: int = 0


@dataclass(frozen=True)
class PrefixEntry:
    """One stored prefix.

    Attributes:
        tokens: its length.
        tier: the fastest tier that holds it: "device", "host" or "disk".
        bytes: what it takes there; files with all that is in them.
        on_disk: whether the folder has it, too.
        hits: lookups of this store that it answered.
        score: requests for it that are announced or under way (CaR).
    """

    tokens: int
    tier: str
    bytes: int
    on_disk: bool
    hits: int
    score: int


@dataclass(frozen=True)
class PrefixStats:
    """What a store did since it was made.

    Attributes:
        lookups: calls of `lookup`.
        hits: how many of them found a prefix, by the tier that held it.
        tokens: tokens of all prompts looked up.
        tokens_reused: how many of them were in a prefix, and so not computed.
        bytes_read: what hits, and loading ahead of them, took out of each tier.
        bytes_written: what came into each tier.
        loaded_ahead, offloaded: prefixes brought up for requests that waited, and moved down before they had to, by the
            thread of `PrefixStore.start`.
        disk_errors: files of the folder that could not be read, written or removed, or were damaged.
        lookup_seconds: time spent in `lookup`.
        seconds_per_token: of a prompt, as `PrefixStore.measure` found it; None before.
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
        """What the reused tokens would have taken at the measured speed, less what all lookups took."""
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
