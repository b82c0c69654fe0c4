"""Loss by lowering a head, from what was measured of it."""

from __future__ import annotations

import dataclasses

import pytest
from measured_heads import measured
from tiny_models import tiny_model

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.config.diffkv_config import with_calibration
from hf_diffkv.heads.allocation import SENSITIVITY
from hf_diffkv.heads.harm import harm_of

K8V8, K5V4 = Precision(8, 8), Precision(5, 4)
# of K5V4 less that of K8V8, for keys and for values, over what was measured
GROWTH = (0.051 - 0.001) + (0.22 - 0.001) / 5.5


def test_the_harm_is_what_the_loss_grows_by() -> None:
    known = measured(tiny_model("llama"))
    for final in (K5V4, Precision(5, 4, 2, 1)):
        for layer in harm_of(known, K8V8, final):
            assert layer == pytest.approx((1e-2 * GROWTH, 1e-4 * GROWTH))


def test_bits_that_were_not_measured() -> None:
    known = measured(tiny_model("llama"))
    few = dataclasses.replace(
        known,
        **{
            name: {bits: e for bits, e in getattr(known, name).items() if bits < 6}
            for name in ("key_errors", "value_errors")
        },
    )
    assert harm_of(few, K8V8, Precision(6, 4)) is None
    assert harm_of(few, K8V8, K5V4)[0][0] == pytest.approx(1e-2 * (0.051 + 0.22 / 5.5))


def test_caches_of_measured_models_know_it() -> None:
    model = tiny_model("llama")
    calibration = {SENSITIVITY: measured(model).to_dict()}
    config = with_calibration(DiffKVConfig.preset("balanced", max_bytes="1GB"), calibration)
    assert DiffKVCache(model, config).stores.harm(K8V8, K5V4)[1] == pytest.approx((1e-2 * GROWTH, 1e-4 * GROWTH))
    assert DiffKVCache(model, DiffKVConfig.preset("balanced", max_bytes="1GB")).stores.harm is None
    without = with_calibration(DiffKVConfig.preset("balanced"), calibration)
    assert DiffKVCache(model, without).stores.harm is None
