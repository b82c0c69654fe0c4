"""The GPU tests at small sizes on the CPU: they run at all, and can pass."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType

import interpreted  # noqa: F401
import pytest
import torch
from tiny_models import tiny_model
from transformers import CompileConfig

from hf_diffkv import DiffKVConfig, Precision

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
K8V4, K4V2, FULL = Precision(8, 4), Precision(4, 2), Precision(16, 16)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Loads a module of tests/gpu with a device that never waits."""
    for folder in ("benchmarks", "tests/gpu"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    torch.manual_seed(0)
    return importlib.import_module


@pytest.fixture
def kernels(load, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("test_kernels_on_gpu")
    monkeypatch.setattr(module, "BEYOND", 2**18)
    return module


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("test_decode_attention", (K8V4, K4V2, 32, 2, 2, (40, 150), torch.float32)),
        ("test_decode_attention", (FULL, FULL, 32, 2, 2, (40, 0), torch.float32)),
        ("test_decode_options", ()),
        ("test_pages_beyond_two_gigabytes", ()),
        ("test_quantisation", (K8V4, 64)),
        ("test_prompt_attention", (70, 32, None)),
        ("test_prompt_attention", (70, 32, 16)),
        ("test_moves", (K4V2, 80)),
        ("test_prompt_attention_over_a_compressed_past", (K8V4, K4V2, 32, 2, 2, (40, 30), 20, torch.float32)),
        ("test_prompt_options_over_a_compressed_past", ((40, 30), 20)),
        ("test_prompt_attention_over_pages_beyond_two_gigabytes", ((40, 30), 20)),
        ("test_compaction", (2, 8)),
    ],
)
@pytest.mark.sampled(100)
def test_kernels(kernels, name: str, arguments: tuple) -> None:
    getattr(kernels, name)(CPU, *arguments)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("test_logits_agree_with_the_cpu", (60, 10)),
        ("test_lossless_generation_is_as_exact_as_a_dense_cache", (torch.bfloat16,)),
        ("test_no_step_waits_between_refreshes", (60, 20)),
        ("test_copies_and_forks_on_a_gpu", ()),
    ],
)
def test_models(load, name: str, arguments: tuple) -> None:
    getattr(load("test_models_on_gpu"), name)(CPU, *arguments)


@pytest.mark.slow
def test_prompts(load) -> None:
    load("test_prompts_on_gpu").test_prompts_and_turns(
        CPU, DiffKVConfig.preset("balanced"), torch.float32, 32, (15, 30)
    )
    load("test_prompts_on_gpu").test_levelled_prompts_and_turns(CPU, DiffKVConfig, torch.float32, 32, (90, 30))
    load("test_prompts_on_gpu").test_rotation(CPU, 80, torch.bfloat16)


def test_prefixes(load, tmp_path: Path) -> None:
    load("test_models_on_gpu").test_prefixes_from_every_tier(CPU, tmp_path)


@pytest.mark.parametrize(
    "module, name, arguments",
    [
        *(("families", "test_lossless_text_is_that_of_a_dense_cache", (name,)) for name in ("gemma2", "qwen3_next")),
        ("families", "test_compressed_logits_are_those_of_the_cpu", ("gpt_oss",)),
        ("families", "test_prompts_in_16_bits_are_as_exact_as_of_a_dense_cache", ("gemma3_text", torch.bfloat16)),
        ("generate", "test_every_mode_gives_the_text_of_a_dense_cache", ("several beams", 3)),
        ("generate", "test_an_assistant_drafts", ()),
        *(("generate", "test_budgets_are_kept", (kind, 300, 30)) for kind in ("heads", "latents")),
        ("generate", "test_infinite_prompts_are_refused", ("key", "K8V4")),
        ("batching", "test_lossless_requests", ("gemma3_text", False)),
        ("batching", "test_compressed_requests", ()),
        ("batching", "test_budgets_and_preemption", ()),
        ("batching", "test_requests_until_full", ()),
    ],
)
@pytest.mark.sampled(4)
def test_families_modes_and_batches(load, module: str, name: str, arguments: tuple) -> None:
    getattr(load(f"test_{module}_on_gpu"), name)(CPU, *arguments)


def test_caches_that_leave_the_device(load, tmp_path: Path) -> None:
    load("test_generate_on_gpu").test_caches_that_leave_the_device(CPU, tmp_path)


@pytest.fixture
def captured(load, recorded, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Records captures, so that what is compiled is compiled to the same operations."""
    module = load("test_graphs_on_gpu")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    compile_model = torch.compile
    monkeypatch.setattr(module, "build", lambda dtype: tiny_model("llama", dtype=dtype, vocab_size=256, **sizes))
    monkeypatch.setattr(module, "PROMPT", 24)
    monkeypatch.setattr(module, "CompileConfig", functools.partial(CompileConfig, backend="eager"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_model(model, backend="eager"))
    return module


@pytest.mark.slow
def test_captured_steps(captured, steps) -> None:
    captured.test_replays_give_the_logits_of_eager_steps(CPU, steps, True, 5)


@pytest.mark.slow
def test_compiled_steps(captured, steps) -> None:
    captured.test_a_compiled_forward_is_captured_once(CPU, steps, True, 4)
    captured.test_no_replay_waits_between_refreshes(CPU, True, 16)


@pytest.mark.slow
def test_models_the_user_compiled(captured, steps) -> None:
    captured.test_a_model_the_user_compiled(CPU, steps, "default", True, 4)
