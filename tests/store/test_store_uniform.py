"""Prompts of stores that keep every token: kernels without host reads, against the dense simulation."""

from __future__ import annotations

import interpreted  # noqa: F401
import pytest
import torch
import uniform_oracle
from given_stores import attend_prompt, new_store
from launches import FIRST_READS, turns_of_layers
from simulated_storage import rotation
from test_compressed import left_padding
from test_rotated import RotatedPair, held_offset

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import Store, begin_forward, check_integrity

K5V3 = Precision(5, 3)
FEW_BITS = {"high": Precision(4, 3, 2, 1), "low": Precision(4, 3, 2, 1), "sinks": 2}
# the first head at the low precision and the second at the high one, and the other way round
PER_HEAD = {"high": K5V3, "low": Precision(3, 2), "alpha_high": ((float("inf"), 0.0),)}
K8V4_FIRST = {"high": Precision(8, 4), "low": Precision(4, 3, 2, 1), "alpha_high": ((0.0, float("inf")),)}


def uniform(precision: Precision, **fields) -> DiffKVConfig:
    return DiffKVConfig(**{"high": precision, "low": precision, "alpha_high": 0.0, "metadata_bits": 16, **fields})


def enter_at_once(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Stores tokens in one go, by kernels or their reference, while everything else runs as on a CPU."""
    monkeypatch.setattr(Store, "stores_by_kernel", property(lambda store: not store.layout.selects))
    if how == "reference":
        monkeypatch.setattr("hf_diffkv.ops.store_prompt.launch.store_prompt", uniform_oracle.store_prompt)


@pytest.mark.parametrize(
    "how, dtype, fields",
    [
        ("kernels", torch.float32, {"high": K5V3, "low": K5V3, "sinks": 3, "page_bytes": 1280}),
        ("kernels", torch.bfloat16, {"center": False}),
        ("kernels", torch.float16, {"rotate": False, "metadata_bits": 32}),
        ("reference", torch.float32, {"high": K5V3, "low": K5V3, "sinks": 3, "page_bytes": 1280}),
        ("reference", torch.float32, {"rotate": False, "center": False}),
        ("kernels", torch.float32, {**FEW_BITS, "adaptive_rounding": True}),
        ("reference", torch.float32, {**FEW_BITS, "adaptive_rounding": True}),
        ("kernels", torch.float32, {**PER_HEAD, "sinks": 3, "page_bytes": 1280}),
        ("kernels", torch.bfloat16, {**PER_HEAD, "center": False, "metadata_bits": 32}),
        ("kernels", torch.float32, {**K8V4_FIRST, "adaptive_rounding": True}),
        ("reference", torch.float32, {**PER_HEAD, "sinks": 3, "page_bytes": 1280}),
        ("reference", torch.float32, {**K8V4_FIRST, "adaptive_rounding": True}),
    ],
    ids=str,
)
@pytest.mark.sampled(10)
def test_prompts_turns_and_steps(how: str, dtype: torch.dtype, fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded prompts that stay in their windows and leave them, with earlier content, and pages that fill up."""
    enter_at_once(monkeypatch, how)
    # a rotation of this many channels is by powers of two, and exact
    pair = RotatedPair(uniform(Precision(8, 8), **{"window": 8, "page_bytes": 3200, **fields}), 2, 2, 2, 64, dtype)
    if dtype != torch.float32:
        # outputs of at most 16 are rounded before and after they are rotated back
        pair.output_tolerance = 16 * 2**-8
    with use_backend("reference"):
        pair.follow(7, valid=left_padding((7, 3)))
        pair.follow(40, 1, 1, 5, valid=torch.tensor([[True] * 40, [False] * 4 + [True] * 36]))
    check_integrity(pair.store)
    stored = torch.where(pair.store.low_heads, pair.store.low_count, pair.store.high_count)
    assert stored.min() > 30 and not pair.store.invalid
    if pair.store.config.center:
        assert held_offset(pair).abs().amax() > 1


@pytest.mark.parametrize("how", ["kernels", "reference"])
@pytest.mark.parametrize("wrong", ["nan", "infinite", "rotated"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.sampled(3)
def test_what_cannot_be_stored_is_seen_at_the_next_look(how: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded token may contain anything."""
    enter_at_once(monkeypatch, how)
    pair = RotatedPair(uniform(K5V3, window=8), 1, 1, 1, 32, torch.float32)
    # channels with the rotation's signs add up to sqrt(32) times as much in one channel
    bad = {"nan": float("nan"), "infinite": float("inf"), "rotated": 8000 * rotation(32)[0].sign()}[wrong]
    store, valid = pair.store, torch.ones(1, 30, dtype=torch.bool)
    for place, shown in ((0, False), (20, True)):
        key, value, query = (pair.draw(1, 30) for _ in range(3))
        value[:, :, place] = bad
        valid[0, 0] = shown
        begin_forward(store, 30)
        attend_prompt(
            store,
            0,
            query,
            key,
            torch.nan_to_num(value, 0.0) if not shown else value,
            softmax=Softmax(0.2),
            valid=valid,
        )
    with pytest.raises(ValueError, match="NaN, infinite or beyond 16376"):
        store.look()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinite_elements_that_stay_unquantised_are_refused(side: str, dtype: torch.dtype) -> None:
    """The square of the limit is also infinite if nothing is quantised."""
    pair = RotatedPair(uniform(Precision(16, 16), center=False, window=4), 1, 1, 1, 16, dtype)
    states = {"key": pair.draw(1, 9), "value": pair.draw(1, 9)}
    states[side][:, :, 3, 2] = float("inf")
    with use_backend("kernels"):
        begin_forward(pair.store, 9)
        attend_prompt(pair.store, 0, pair.draw(1, 9), *states.values(), softmax=Softmax(0.2))
        with pytest.raises(ValueError, match="NaN, infinite or beyond"):
            pair.store.look()


@pytest.mark.parametrize("name", ["balanced", "quality"])
@pytest.mark.slow
def test_launches_and_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a layer launches few kernels after attention, and that only the first one reads the device.

    Rounding keys for queries takes eight more launches. Three of them choose codes, which saves a fifth of a prompt's
    time (docs/notes/gpu-runs.md).
    """
    store = new_store(DiffKVConfig.preset(name, window=8), 2, 2, 1, 32, 32)
    with monkeypatch.context() as patches:
        found = launches_of_turns(store, patches)
    # a prompt in the window, one that leaves it and is centred, and a turn over stored tokens (docs/kernels.md)
    rounded = 8 * (name == "balanced")
    assert [len(after) for after in found] == [3 + rounded, 7 + rounded, 5 + rounded], found
    if name == "balanced":
        # a layer with both tiers has the same launches
        per_head = DiffKVConfig.preset(name, window=8, low=Precision(3, 3), alpha_high=((0.0,), (float("inf"),)))
        store = new_store(per_head, 2, 2, 1, 32, 32)
        store.set_thresholds(1, float("inf"), 0.0)
        assert launches_of_turns(store, monkeypatch) == found
        assert store.low_count[1].min() > 8 and not store.high_count[1].any()


def launches_of_turns(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the second layer's launches after attention, for a prompt and two turns of two requests."""
    found = []
    for layer, after, reads in turns_of_layers(store, 32, monkeypatch):
        assert "store_new_kernel" in after
        assert reads == (FIRST_READS if layer == 0 else [])
        found += [after] if layer == 1 else []
    return found
