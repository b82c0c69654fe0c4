"""Captured decode steps with a forward compiled by `compile_config` or by the user, on the CPU."""

from __future__ import annotations

import logging

import interpreted  # noqa: F401
import pytest
import torch
from captured_steps import FIELDS, assert_alike, assert_same_levels, build, generate, padded, run
from recorded_graph import RecordedGraph, RepeatedWork
from transformers import CompileConfig

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache import graphs
from hf_diffkv.cache.graphs import within_graph
from hf_diffkv.compat import passed

pytestmark = pytest.mark.usefixtures("recorded")
# a compiler that leaves operations unchanged, so that the recorder sees them
EAGER = CompileConfig(backend="eager", fullgraph=True)


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing is compiled beforehand, and compiling something twice is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def prompt(seed: int, padding: int = 0) -> dict[str, torch.Tensor]:
    return dict(zip(("tokens", "attention_mask"), padded(seed, padding, 10)))


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.slow
def test_the_same_text_from_a_compiled_forward(steps, padding: int) -> None:
    """There is one graph and one capture, whatever is refreshed or grows; another cache uses the same graph."""
    model = build(2)
    given = prompt(1, padding)
    torch._dynamo.utils.counters.clear()
    cache, eager = assert_alike(model, new=8, compile_config=EAGER, **given)
    (step,) = steps
    assert step.compiled and step.captures == 1 and step.replays == 6
    assert compiled_graphs() == 1
    assert_same_levels(cache, eager)
    run(model, True, new=3, compile_config=EAGER, **given)
    assert steps[1].compiled and steps[1].captures == 1
    assert compiled_graphs() == 1


@pytest.mark.slow
def test_the_forward_is_left_alone_unless_asked(steps) -> None:
    model = build(1)
    torch._dynamo.utils.counters.clear()
    for options in ({}, {"disable_compile": True}, {"disable_compile": True, "compile_config": EAGER}):
        run(model, True, new=4, **prompt(2), **options)
    assert [(step.compiled, step.captures, step.replays) for step in steps] == [(False, 1, 2)] * 3
    assert compiled_graphs() == 0


@pytest.mark.slow
def test_inductor(steps, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that compiled forwards, including one compiled by the user, replay correctly."""
    monkeypatch.setitem(graphs.GRAPH_TYPES, "cpu", lambda device: RepeatedWork(steps[-1].cache.stores))
    model = build(2)
    given = prompt(3, 4)
    expected, eager = run(model, False, new=9, **given)
    torch._dynamo.utils.counters.clear()
    got, cache = run(model, True, new=9, compile_config=CompileConfig(fullgraph=True), **given)
    torch.testing.assert_close(got, expected)
    (step,) = steps
    assert step.compiled and step.captures == 1 and step.replays == 7
    assert compiled_graphs() == 1
    for index in cache.compressed_layers():
        assert torch.equal(cache.levels(index), eager.levels(index))
        torch.testing.assert_close(cache.significance(index), eager.significance(index))


@pytest.mark.slow
def test_a_model_the_user_compiled(steps) -> None:
    model = build(1)
    given = prompt(4, 3)
    expected, _ = run(model, False, new=6, **given)
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    # the prompt, and a step from Python, which has a longer mask than the captured one
    with torch._dynamo.config.patch(error_on_recompile=False):
        got, _ = run(model, True, new=6, **given)
    assert torch.equal(got, expected)
    assert steps[0].captures == 1 and steps[0].replays == 4 and not steps[0].compiled
    again, _ = run(model, True, new=6, **given)
    assert torch.equal(again, expected) and steps[1].replays == 4


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.slow
def test_a_failure_falls_back_to_the_eager_step(steps, caplog, fullgraph: bool) -> None:
    tried = []

    def broken(*args: object) -> None:
        tried.append(args)
        raise RuntimeError("no such kernel\nand much more")

    model = build(1)
    given = prompt(5)
    expected, _ = run(model, False, new=5, **given)
    compile_config = CompileConfig(backend=broken, mode=None, fullgraph=fullgraph)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        for _ in range(2):
            got, _ = run(model, True, new=5, compile_config=compile_config, **given)
            assert torch.equal(got, expected)
    assert [(step.compiled, step.captures, step.replays) for step in steps] == [(False, 1, 3)] * 2
    assert len(tried) == 1 and len(caplog.records) == 1
    assert "not compiled" in caplog.text and "no such kernel" in caplog.text and "much more" not in caplog.text


@pytest.mark.slow
def test_a_quantizer_that_cannot_be_compiled(steps, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantizer:
        is_compileable = False

    model = build(1)
    model.hf_quantizer = Quantizer()
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        run(model, True, new=3, compile_config=EAGER, **prompt(6))
    assert not steps[0].compiled and steps[0].captures == 1
    assert "Quantizer cannot be compiled" in caplog.text


@pytest.mark.slow
def test_a_model_that_asks_for_the_length_is_not_captured(steps, monkeypatch, caplog) -> None:
    """A compiled forward would treat the length as a constant."""
    model = build(1)
    given = prompt(7)
    expected, _ = run(model, False, new=5, **given)
    forward = model.model.layers[0].forward

    def asks(*args: object, **kwargs: object) -> object:
        length = passed(kwargs).get_seq_length()
        return forward(*args, **kwargs) + 0 * length

    monkeypatch.setattr(model.model.layers[0], "forward", asks)
    with caplog.at_level(logging.WARNING, "hf_diffkv"), torch._dynamo.config.patch(error_on_recompile=False):
        got, _ = run(model, True, new=5, compile_config=EAGER, **given)
    assert torch.equal(got, expected)
    assert steps[0].replays == 0 and "decode steps are not captured" in caplog.text


def test_the_compiler_captures_nothing_itself() -> None:
    for mode in (None, "default", "reduce-overhead"):
        found = within_graph(CompileConfig(mode=mode))
        assert (found.mode, found.options, found.dynamic) == (None, {"triton.cudagraphs": False}, False)
    tuned = within_graph(CompileConfig(mode="max-autotune", fullgraph=True, dynamic=True))
    assert tuned.fullgraph and tuned.dynamic
    assert tuned.options == {**torch._inductor.list_mode_options("max-autotune"), "triton.cudagraphs": False}
    assert tuned.options["max_autotune"]
    given = within_graph(CompileConfig(options={"epilogue_fusion": True, "triton.cudagraphs": True}))
    assert given.options == {"epilogue_fusion": True, "triton.cudagraphs": False}
    other = within_graph(CompileConfig(backend="aot_eager"))
    assert (other.backend, other.mode, other.options) == ("aot_eager", None, None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "fastest"}, "mode='fastest' is unknown; use one of"),
        ({"backend": "cudagraphs"}, "captures steps, which DiffKVCache does already"),
        ({"mode": "max-autotune", "options": {"epilogue_fusion": True}}, "both mode and options"),
    ],
)
def test_what_cannot_be_asked_for(options: dict, message: str) -> None:
    model = build(1)
    cache = DiffKVCache(model.config, DiffKVConfig(**FIELDS))
    with pytest.raises(ValueError, match=message):
        generate(model, prompt(8)["tokens"], cache, 3, compile_config=CompileConfig(**options))
    assert cache.get_seq_length() == 0 and not RecordedGraph.made
