"""What the page offers to choose from, from the most memory to the least, each with what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass

from hf_diffkv import DiffKVConfig

OWN = "your own"


@dataclass(frozen=True)
class Setting:
    """A configuration and what it is good for."""

    config: DiffKVConfig
    explanation: str


SETTINGS = {
    "gentle": Setting(
        DiffKVConfig.preset("quality"),
        "`preset('quality')`: every token is kept, keys in 8 bits and values in 4. Take it when in doubt.",
    ),
    "default": Setting(
        DiffKVConfig.preset("balanced"),
        "`preset('balanced')`, what `DiffKVCache(model)` takes: every token is kept, keys in 5 bits and values in 4.",
    ),
    "small": Setting(
        DiffKVConfig.preset("small"),
        "`preset('small')`: every token is kept, keys in 4 bits and values in 3. Look for small slips.",
    ),
    "paper": Setting(
        DiffKVConfig.paper(),
        "DiffKV as published, without pruning: tokens that get at least the mean attention have keys in 8 bits and "
        "values in 4, the others 4 and 2.",
    ),
    "brutal": Setting(
        DiffKVConfig.paper(alpha_high=8.0, alpha_low=1.0, window=16),
        "Tokens that get less than the mean attention are pruned, before anybody asks for them. See what breaks: facts "
        "of the prompt can be gone where the text still reads well.",
    ),
}
OWN_EXPLANATION = "Two levels and pruning by thresholds of your own; see the README for what each field means."
