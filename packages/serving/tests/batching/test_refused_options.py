"""Options, models and budgets that continuous batching refuses before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from batching import LOSSY, chunks, prompts, request_config
from tiny_models import tiny_model
from transformers import CompileConfig, ContinuousBatchingConfig, PreTrainedModel

from hf_diffkv import DiffKVConfig


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_async_batching": True}, "use_async_batching=True"),
        ({"cpu_offload_space": 1.0}, "cpu_offload_space=1.0"),
        ({"default_compile_level": 1}, "default_compile_level=1"),
        ({"compile_config": CompileConfig()}, "compile_config=CompileConfig"),
        ({"scheduler_type": "random"}, "scheduler_type='random'"),
    ],
)
def test_options_of_the_engine_that_do_not_go(model: PreTrainedModel, options: dict, message: str) -> None:
    config = request_config(LOSSY)
    config.compile_config = options.pop("compile_config", None)
    with pytest.raises(ValueError, match=message):
        model.init_continuous_batching(config, ContinuousBatchingConfig(**options))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("make", "config", "error", "message"),
    [
        (lambda: tiny_model("mistral", sliding_window=24), LOSSY, ValueError, "only sliding-window layers"),
        (
            lambda: tiny_model("llama4_text"),
            LOSSY,
            ValueError,
            "other than full, sliding and linear attention .chunked_attention",
        ),
        (lambda: tiny_model("deepseek_v3"), LOSSY, ValueError, "latents"),
        (lambda: tiny_model("llama"), DiffKVConfig(alpha_high=(1.0,) * 3), ValueError, "alpha_high has 3 entries"),
    ],
)
def test_models_and_fields_that_do_not_go(
    make: Callable[[], PreTrainedModel], config: DiffKVConfig, error: type, message: str
) -> None:
    model = make()
    with pytest.raises(error, match=message):
        model.init_continuous_batching(request_config(config), chunks())
    assert model.config._attn_implementation == "sdpa"


def test_a_budget_that_holds_nothing(model: PreTrainedModel) -> None:
    with pytest.raises(MemoryError, match="max_bytes=3000"):
        model.generate_batch(prompts((5,)), request_config(LOSSY, 3000), chunks())
    assert model.config._attn_implementation == "sdpa"
