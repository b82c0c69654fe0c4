"""Captures on a GPU beside other work of the process, on other devices, and where they fail."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from test_models_on_gpu import build
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing


def generate(model: PreTrainedModel, graphs_wanted: bool, **options: object) -> tuple[torch.Tensor, DiffKVCache]:
    generator = torch.Generator(model.device).manual_seed(1)
    tokens = torch.randint(0, 256, (1, 299), device=model.device, generator=generator)
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16, cuda_graphs=graphs_wanted)
    cache = DiffKVCache(model.config, config)
    options = {"do_sample": False, "max_new_tokens": 40, "attention_mask": torch.ones_like(tokens), **options}
    return model.generate(tokens, **passing(cache), **options), cache


def test_a_capture_that_fails_leaves_the_device_usable(device, steps, monkeypatch, caplog) -> None:
    model = build(torch.bfloat16).to(device)
    expected, _ = generate(model, False)
    layer = model.model.layers[1]
    forward = layer.forward

    def reads(hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        assert bool(hidden.isfinite().all())
        return forward(hidden, *args, **kwargs)

    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "hf_diffkv"):
        patch.setattr(layer, "forward", reads)
        got, _ = generate(model, True)
        generate(model, True, do_sample=True)
    assert torch.equal(got, expected)
    assert caplog.text.count("not captured") == 1 and [step.replays for step in steps] == [0]
    assert torch.cuda.current_stream() == stream
    # these fail in a process that PyTorch believes to be in a capture
    torch.rand(4, device=device)
    torch.cuda.empty_cache()
    got, cache = generate(build(torch.bfloat16).to(device), True)
    cache.check_integrity()
    assert steps[-1].captures == 1 and steps[-1].replays == 38


def test_every_device_captures_for_itself(device, steps) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    model = build(torch.bfloat16)
    for index in (0, 1):
        model = model.to(torch.device("cuda", index))
        expected, _ = generate(model, False)
        got, cache = generate(model, True)
        assert torch.equal(got, expected)
        assert steps[-1].captures == 1 and steps[-1].replays == 38
        cache.check_integrity()
    assert torch.cuda.current_device() == 0


def test_other_threads_go_on_during_captures(device, steps) -> None:
    """They allocate and wait for their own work."""
    model = build(torch.bfloat16).to(device)
    expected, _ = generate(model, False)
    stop, failed = threading.Event(), []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for size in range(1, 1 << 20):
                    if stop.is_set():
                        return
                    float(torch.ones(size * 4096 % (1 << 24) + 1, device=device).sum())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            got, _ = generate(model, True)
            assert torch.equal(got, expected)
    finally:
        stop.set()
        thread.join()
    assert not failed
    assert [step.captures for step in steps] == [1, 1, 1]
