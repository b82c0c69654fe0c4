"""The whole store on the Triton kernels, in the interpreter, against the dense simulation."""

from __future__ import annotations

import interpreted  # noqa: F401
import pytest
import torch
from dense_simulation import WINDOW, Rule
from given_stores import select_rows
from policy_simulation import FirstTokens, LeanKV
from test_compressed import Pair, left_padding
from test_rotated import RotatedPair, assert_offsets, held_offset
from tiny_models import tiny_model

from hf_diffkv import DiffKVCache
from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.backend import use_backend
from hf_diffkv.ops.softmax import Softmax
from hf_diffkv.store import read_tokens
from hf_diffkv.store.step import prepare_step


@pytest.mark.parametrize(
    "high, low",
    [
        (Precision(8, 4), Precision(4, 2)),
        (Precision(16, 16), Precision(8, 8)),
        (Precision(6, 4), Precision(5, 3)),
    ],
    ids=lambda p: p.name,
)
@pytest.mark.slow
def test_prompt_steps_and_turn(high: Precision, low: Precision) -> None:
    config = DiffKVConfig(high, low, alpha_high=1.1, alpha_low=0.6, window=8)
    pair = Pair(config, 2, heads=1, group=2, dim=32, dtype=torch.float32)
    pair.tolerance = 2e-3
    with use_backend("kernels"):
        pair.forward(70, left_padding((70, 33)))
        pair.compare_levels()
        pair.steps(12)
        pair.compare_levels()
        pair.forward(9, torch.tensor([[True] * 9, [False] * 4 + [True] * 5]))
        pair.steps(3)
        pair.compare_levels()
        select_rows(pair.store, torch.tensor([1, 1, 0]))
    assert pair.store.batch_size == 3


@pytest.mark.parametrize("sinks, window, lengths", [(4, 8, (7, 3)), (3, 6, (5, 2))])
@pytest.mark.slow
def test_rotated_rows_and_sinks(sinks: int, window: int, lengths: tuple[int, int]) -> None:
    """Rows are centred when they leave the window; one is initially shorter than the sinks."""
    config = DiffKVConfig(alpha_high=1.1, alpha_low=0.6, window=window, sinks=sinks)
    pair = RotatedPair(config, 2, heads=1, group=2, dim=64, dtype=torch.float32)
    pair.tolerance = 2e-3
    with use_backend("kernels"):
        pair.forward(max(lengths), left_padding(lengths))
        for _ in range(8):
            pair.forward(1)
            pair.compare_levels()
        pair.forward(40, torch.tensor([[True] * 40, [False] * 4 + [True] * 36]))
        pair.compare_levels()
        pair.steps(3)
        pair.compare_levels()
    assert_offsets(pair)
    assert held_offset(pair).abs().amax() > 1
    assert (read_tokens(pair.store, 0).levels[0, :, :sinks] == WINDOW).all()


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sinks": torch.tensor([0.5, -1.0])}], ids=str)
@pytest.mark.parametrize("alpha_high", [0.0, 1.1])
def test_a_first_prompt_with_softcap_or_sinks_is_not_centred(alpha_high: float, options: dict) -> None:
    config = DiffKVConfig(alpha_high=alpha_high, window=1, sinks=0)
    pair = RotatedPair(config, 1, heads=1, group=2, dim=16, dtype=torch.float32)
    pair.tolerance = pair.output_tolerance = 2e-3
    with use_backend("kernels"):
        for tokens in (3, 1):
            pair.forward(tokens, **options)
            assert not held_offset(pair).any()


@pytest.mark.parametrize(
    "policy, options, rule",
    [("leankv", {"high_cut": 0.3, "low_cut": 0.1}, LeanKV(0.3, 0.1)), ("first_tokens", {"first": 9}, FirstTokens(9))],
    ids=["leankv", "first_tokens"],
)
@pytest.mark.slow
def test_thresholds_that_policies_set(policy: str, options: dict, rule: Rule) -> None:
    config = DiffKVConfig(policy=policy, policy_options=options, window=8, page_bytes=1024)
    pair = Pair(config, 2, heads=1, group=1, dim=16, dtype=torch.float32, rule=rule)
    pair.tolerance = 2e-3
    with use_backend("kernels"):
        pair.forward(50, left_padding((50, 21)))
        for _ in range(8):
            pair.forward(1)
            pair.compare_levels()


def test_a_captured_step_takes_queries_of_another_dtype() -> None:
    """Some models have queries and keys of different dtypes, which a step from Python also accepts."""
    found = []
    for rounded in (False, True):
        cache = DiffKVCache(tiny_model("llama").config, DiffKVConfig(alpha_high=1.0, window=4))
        layer, generator = cache.layers[0], torch.Generator().manual_seed(0)
        for tokens in (9, 1):
            query, key, value = (torch.randn(1, n, tokens, 16, generator=generator) for n in (4, 2, 2))
            with use_backend("kernels"):
                if tokens > 1:
                    layer.update(key, value)
                    layer.attend(query, Softmax(0.25))
                    continue
                prepare_step(layer.store)
                query = query.to(torch.bfloat16)
                query = query.float() if rounded else query
                found.append(layer.attend_captured(query, key, value, None, Softmax(0.25)))
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], found[1].to(torch.bfloat16))
