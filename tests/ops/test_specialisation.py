"""Binaries that Triton would compile.

On a GPU, it compiles separate binaries for numbers that are 1, and for numbers and addresses that are multiples of 16.
This takes seconds, and fails while a step is captured. The interpreter compiles nothing.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import interpreted  # noqa: F401
import pytest
import torch
from chosen_ops import prefill_attention
from hand_past import attend_prompt
from tiny_models import tiny_model
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.config.presets import preset_named
from hf_diffkv.ops.backend import use_backend

OPTIONS = {"num_warps", "num_stages", "maxnreg"}
BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


def specialised(kernel: InterpretedFunction, args: tuple, kwargs: dict[str, Any]) -> dict[str, tuple]:
    """Type and class ("D": a multiple of 16, None: not specialised) of each argument, as determined by a GPU launch."""
    named = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    given = inspect.signature(kernel.fn).bind(*args, **named).arguments
    found = {}
    for parameter in JITFunction(kernel.fn, **kernel.kwargs).params:
        asked = not parameter.do_not_specialize
        aligned = not parameter.do_not_specialize_on_alignment
        value = given[parameter.name]
        if not parameter.is_constexpr and value is not None:
            found[parameter.name] = native_specialize_impl(BACKEND, value, parameter.is_const, asked, aligned)
    return found


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, tuple]]]:
    """Classes of the arguments of every launch, by kernel name."""
    found = defaultdict(list)
    run = InterpretedFunction.run

    def note(self: InterpretedFunction, *args: Any, grid: tuple, warmup: bool = False, **kwargs: Any) -> Any:
        found[self.fn.__name__].append(specialised(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", note)
    return found


def check(launches: dict[str, list[dict[str, tuple]]]) -> None:
    """Checks that every kernel saw one class per argument, and only multiples of 16 if there is a class."""
    wrong = {
        (kernel, name, *found)
        for kernel, calls in launches.items()
        for call in calls
        for name, found in call.items()
        if found not in ((found[0], "D"), (found[0], None)) or found[0] == "constexpr"
    }
    assert not wrong, sorted(wrong, key=str)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields, kernels",
    [
        (
            {"alpha_high": 1.0, "alpha_low": 0.3},
            {"column_scores", "past_scores", "find_victims_kernel", "level_window_kernel", "level_new_kernel"},
        ),
        (preset_named("quality"), {"leave_window_kernel", "store_new_kernel", "advance_kernel"}),
    ],
    ids=["chosen", "all"],
)
def test_a_generation_compiles_every_kernel_once(launches, fields: dict, kernels: set[str]) -> None:
    """With one request and one KV head, the data of one layer may start at any address."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16, **sizes)
    model = model.to(torch.bfloat16).eval()
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(**{**fields, "window": 4, "page_bytes": 512}))
    mask = torch.ones(1, 64, dtype=torch.int64)
    mask[:, 0] = 0
    seen = 0
    with use_backend("kernels"), torch.no_grad():
        for tokens in (21, 1, 1, 16, 1, 1):
            seen += tokens
            ids = torch.arange(tokens)[None]
            model(ids, attention_mask=mask[:, :seen], **passing(cache))
    assert {"append_kernel", "attend_kernel", "finish_kernel", "move_tokens_kernel"} <= launches.keys()
    assert {"flash_forward", "past_forward", "row_extents"} <= launches.keys()
    assert {"plan_rows_kernel", "assign_pages_kernel", *kernels} <= launches.keys()
    check(launches)


@pytest.mark.parametrize("length", [1, 16, 19])
def test_prompts_of_any_length_compile_every_kernel_once(launches, length: int) -> None:
    """Passes views as a caller may: a mask, padding, a dense past, and one KV head with a stride of one."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 40, 16, generator=generator) for heads in (2, 1, 1))
    key = key.as_strided(key.shape, (1, 1, 16, 1))
    first = 40 - length
    everything = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with use_backend("kernels"):
        for extra in (
            {"mask": everything.tril()[..., first:, first:]},
            {"valid": everything[0, :, 0, first:]},
            {
                "past_key": key[:, :, :first],
                "past_value": value[:, :, :first],
                "past_valid": everything[:, :, 0, :first],
                "observation_window": 1,
                "sinks": torch.zeros(3)[1:],
            },
        ):
            parts = (part[:, :, first:] for part in (query, key, value))
            attend_prompt(prefill_attention, *parts, scaling=0.25, **extra)
    check(launches)
