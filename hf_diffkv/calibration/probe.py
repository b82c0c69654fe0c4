"""Tests whether a model's keys survive few bits, on about two hundred tokens and within seconds.

Some models (Qwen2.5-7B, Gemma 3 270M) have key channels so large that 4 bits leave little of the other channels. With
such keys, a low level loses information the model needs, even for tokens of low significance.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

from ..cache.resolve import config_of
from ..config import DiffKVConfig, Precision
from ..config.presets import one_level
from ..evaluation.comparison import compare_logits
from ..evaluation.methods import Method
from ..evaluation.methods.dense import DenseMethod
from ..evaluation.methods.diffkv import DiffKVMethod
from ..evaluation.session import Session
from ..evaluation.tasks.text import texts
from .documents import check_tokenizer

PROBED_BITS = (8, 6, 4, 2)
# share of the tokens that are stored before the model reads the others
STORED = 0.75
MIN_PROBED = 16
# docs/calibration.md has the measurements behind it
FRAGILE_KL = 0.1


@dataclass(frozen=True)
class KeyProbe:
    """Loss from fewer bits per key element; values stay exact.

    Attributes:
        kl: mean KL divergence of the next-token distribution from the dense cache's, in nats, by bits.
        tokens: number of tokens measured.
        seconds: duration of the measurement.
    """

    kl: dict[int, float]
    tokens: int
    seconds: float

    def survives(self, bits: int) -> bool:
        """Returns whether keys of `bits` bits have a KL of at most `FRAGILE_KL`.

        Raises:
            KeyError: these bits were not measured.
        """
        return self.kl[bits] <= FRAGILE_KL

    def __str__(self) -> str:
        figures = ", ".join(
            f"{bits} bits {kl:.4f}{'' if self.survives(bits) else ' (fragile)'}" for bits, kl in self.kl.items()
        )
        return f"KL of keys at {figures}; {self.tokens} tokens, {self.seconds:.1f} s"


def probe_keys(
    model: Any,
    tokenizer: Any = None,
    text: str | None = None,
    tokens: int = 200,
    *,
    bits: tuple[int, ...] = PROBED_BITS,
    config: DiffKVConfig | None = None,
) -> KeyProbe:
    """Measures the loss at each number of key bits.

    Three quarters of the tokens are stored with exact values and keys of these bits. The model then reads the rest, and
    its predictions are compared with those for a dense cache.

    Args:
        model: loaded decoder-only model.
        tokenizer: tokenizer of the model; without one tokens are drawn at random.
        text: text of at least `tokens` tokens; None uses a text from Python's documentation.
        tokens: number of tokens.
        bits: numbers of key bits to measure.
        config: configuration that gives `rotate`, `center`, `metadata_bits` and the groups of the precisions; None uses
            the default.

    Raises:
        ValueError: a text is given without a tokenizer, the text or number of tokens is too small, bits are missing or
            not supported, or `model` is not the model itself.
        UnsupportedModelError: a `DiffKVCache` does not work with the model.
    """
    if text is not None and tokenizer is None:
        raise ValueError("text needs a tokenizer.")
    if tokens < MIN_PROBED:
        raise ValueError(f"tokens={tokens} must be at least {MIN_PROBED}.")
    if isinstance(bits, int) or not bits:
        raise ValueError(f"bits={bits!r} must be a tuple of at least one number, such as (8, 4).")
    config_of(model)
    started = time.perf_counter()
    ids = _ids(model, tokenizer, text, tokens)
    base = config or DiffKVConfig()
    methods = {count: DiffKVMethod(_fields(count, base)) for count in bits}
    reference = _logits(model, DenseMethod(), ids)
    following = ids[int(STORED * tokens) + 1 :]
    kl = {}
    for count, method in methods.items():
        total, weight = compare_logits(_logits(model, method, ids), reference, following)["kl"]
        kl[count] = total / weight
    return KeyProbe(kl, tokens, time.perf_counter() - started)


def without_fragile_level(config: DiffKVConfig, model: Any, tokenizer: Any = None) -> DiffKVConfig:
    """Returns `config`, changed to keep all tokens at the high level if the model's keys do not survive the low.

    Args:
        config: configuration to check; pruning is left as it is.
        model: loaded decoder-only model. It runs on about 200 tokens (`probe_keys`), unless the low level has as many
            key bits as the high one or no tokens.
        tokenizer: tokenizer of the model; without one tokens are drawn at random.

    Raises:
        ValueError: `model` is not the model itself.
        UnsupportedModelError: a `DiffKVCache` does not work with the model.
    """
    config_of(model)
    if config.low.k_bits >= config.high.k_bits or config.alpha_high == config.alpha_low:
        return config
    bits = config.low.k_bits
    if probe_keys(model, tokenizer, bits=(bits,), config=config).survives(bits):
        return config
    if config.policy == "diffkv":
        return replace(config, alpha_high=config.alpha_low)
    return replace(config, low=config.high)


def _fields(bits: int, base: DiffKVConfig) -> dict[str, Any]:
    groups = {precision.k_bits: precision.k_groups for precision in (base.high, base.low)}
    fields = {name: getattr(base, name) for name in ("rotate", "center", "metadata_bits")}
    return {**one_level(Precision(bits, 16, groups.get(bits, 1))), "window": 1, "sinks": 0, **fields}


def _ids(model: Any, tokenizer: Any, text: str | None, tokens: int) -> list[int]:
    if tokenizer is None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        rng = random.Random(0)
        return [rng.randrange(vocabulary) for _ in range(tokens)]
    check_tokenizer(tokenizer)
    ids = tokenizer(texts()[0] if text is None else text, verbose=False).input_ids[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens but {tokens} are needed; give a longer text or lower tokens.")
    return list(ids)


def _logits(model: Any, method: Method, ids: list[int]) -> Any:
    stored = int(STORED * len(ids))
    session = Session(model, method)
    session.forward(ids[:stored])
    return session.forward(ids[stored:-1], keep=len(ids) - stored - 1)
