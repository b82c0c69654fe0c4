"""Captured decode steps give the same text as steps from Python, on the CPU with a recorded graph."""

from __future__ import annotations

import logging
from collections import Counter

import interpreted  # noqa: F401
import policy_simulation  # noqa: F401  makes "first_tokens" known
import pytest
import torch
from captured_steps import (
    FIELDS,
    HEAD_PRECISIONS,
    assert_alike,
    assert_same_levels,
    build,
    generate,
    padded,
    run,
)
from recorded_graph import RecordedGraph
from transformers import AutoTokenizer
from triton.runtime.interpreter import InterpretedFunction

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache import graphs
from hf_diffkv.compat import passed, passing
from hf_diffkv.running.models import TINY_LM
from hf_diffkv.store.read import IntegrityError

pytestmark = pytest.mark.usefixtures("recorded")
STATE = ("high_count", "low_count", "length", "window_start", "window_key", "window_score")


@pytest.fixture(scope="module")
def model():
    return build(1)


@pytest.mark.slow
def test_the_same_text_across_refreshes_and_growth(steps) -> None:
    tokens, mask = padded(1, 5)
    cache, eager = assert_alike(build(2), tokens, 12, {}, attention_mask=mask)
    (step,) = steps
    # one step runs from Python, and the next is captured for all later ones
    assert step.replays == 10 and step.captures == 1
    assert len(RecordedGraph.made) == step.captures
    # the pool has grown along the way, and the cache is as it would have been
    store, other = cache.stores.all[0], eager.stores.all[0]
    assert cache.get_seq_length() == eager.get_seq_length() == 23
    for name in STATE:
        assert torch.equal(getattr(store, name), getattr(other, name)), name
    assert_same_levels(cache, eager)


@pytest.mark.parametrize(
    "layers, fields",
    [
        (1, {"policy": "leankv", "policy_options": {"low_cut": 0.03}, "max_bytes": 30_000}),
        (2, {"policy": "leankv", "policy_options": {"high_cut": 0.3}}),
        (3, {"policy": "first_tokens", "policy_options": {"first": 1}}),
    ],
    ids=lambda value: value["policy"] if isinstance(value, dict) else "",
)
@pytest.mark.slow
def test_policies_are_captured(steps, layers: int, fields: dict) -> None:
    tokens = torch.randint(0, 96, (1, 9), generator=torch.Generator().manual_seed(1))
    cache, eager = assert_alike(build(layers), tokens, 7, fields)
    assert steps[0].replays == 5
    store, other = cache.stores.all[0], eager.stores.all[0]
    for name in ("high_count", "low_count", "window_start", "alpha_high", "alpha_low"):
        assert torch.equal(getattr(store, name), getattr(other, name)), name


@pytest.mark.slow
def test_layers_of_several_precisions(steps) -> None:
    """Layers of each pair have their own store."""
    model = build(3, num_key_value_heads=2)
    tokens, mask = padded(1, 5)
    cache, eager = assert_alike(model, tokens, 12, {"head_precisions": HEAD_PRECISIONS}, attention_mask=mask)
    (step,) = steps
    assert step.replays == 10 and step.captures == 1
    assert cache.get_seq_length() == eager.get_seq_length() == 23
    assert len(cache.stores.all) == len(eager.stores.all) == 3
    for store, other in zip(cache.stores.all, eager.stores.all):
        assert store.seen == store.padding.length == 23 and (store.high_count + store.low_count > 0).any()
        for name in STATE:
            assert torch.equal(getattr(store, name), getattr(other, name)), name


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, tuple]]:
    """List of all launches: whether each was captured, and its `form`."""
    found: list[tuple[bool, tuple]] = []
    launch = InterpretedFunction.run

    def note(self: InterpretedFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        found.append((RecordedGraph.current is not None, form(self, args, kwargs)))
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", note)
    return found


@pytest.mark.slow
def test_several_stores_launch_no_more_for_a_layer(steps, launched: list) -> None:
    """Each store has its own compaction, and each layer launches the same as in a single store."""
    model = build(2)
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(8))
    found = []
    for chosen in (["K8V4"], ["K4V4"]):
        cache, _ = assert_alike(model, tokens, 4, {"head_precisions": [["K8V4"], chosen]})
        found.append((len(cache.stores.all), Counter(name for captured, (name, _) in launched if captured)))
        launched.clear()
    (one, of_one), (two, of_two) = found
    assert (one, two) == (1, 2) and [step.captures for step in steps] == [1, 1]
    assert of_two["attend_kernel"] == 2
    assert of_two == of_one + Counter(["plan_rows_kernel", "assign_pages_kernel", "move_tokens_kernel"])


@pytest.mark.slow
def test_several_stores_under_a_budget(steps) -> None:
    """Each store's ring is made ahead of time and stays in place."""
    model = build(2, num_key_value_heads=2)
    tokens = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(3))
    fields = {"head_precisions": HEAD_PRECISIONS[:2]}
    _, cache = run(model, True, tokens, 8, {**fields, "max_bytes": 20_000, "page_bytes": 1024})
    assert steps[0].captures == 1 and steps[0].replays == 6 and len(cache.stores.all) == 2


def test_a_replay_repeats_what_was_captured(model, steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the compaction out of the graph breaks the cache, which shows that the test above can fail."""
    for place in ("hf_diffkv.store.compaction", "hf_diffkv.cache.graphs"):
        monkeypatch.setattr(f"{place}.compact", lambda store: None)
    tokens = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(1))
    with pytest.raises(IntegrityError, match="a window holds more tokens than it has slots"):
        run(model, True, tokens, 6)
    assert steps[0].replays == 4


@pytest.mark.slow
def test_room_that_runs_out_is_made_and_captured_again(model, steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_TOKENS_AHEAD", 1)
    monkeypatch.setattr("hf_diffkv.store.decode.SCRATCH_TOKENS", 8)
    tokens = torch.randint(0, 96, (1, 6), generator=torch.Generator().manual_seed(2))
    assert_alike(model, tokens, 16)
    assert steps[0].captures > 1 and steps[0].replays + steps[0].captures <= 15


@pytest.mark.slow
def test_a_pool_that_grows_under_a_budget_needs_no_other_capture(model, steps) -> None:
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(3))
    cache, _ = assert_alike(model, tokens, 12, {"max_bytes": 6000})
    assert steps[0].captures == 1 and steps[0].replays == 10
    assert cache.memory().bytes <= 6000 and cache.stores.all[0].pool.capacity > 2


@pytest.mark.slow
def test_heads_are_lowered_between_replays(steps) -> None:
    """The text equals that of steps from Python, which lower the same rows."""
    tokens = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(3))
    model = build(2, num_key_value_heads=2)
    fields = {"high": "K4V4", "low": "K4V4", "alpha_high": 0.0, "alpha_low": 0.0}
    _, free = run(model, False, tokens, 24, {**fields, "max_bytes": 10**6})
    _, final = run(model, False, tokens, 24, fields)
    limit = final.memory().bytes + 2300
    cache, eager = assert_alike(model, tokens, 24, {**fields, "max_bytes": limit})
    (store,), (other,) = cache.stores.all, eager.stores.all
    assert store.lowering.tokens == other.lowering.tokens > 0 and torch.equal(store.low_heads, other.low_heads)
    # from K8V8 via K6V5 to K4V4
    assert store.stage == other.stage == 1 and not store.low_heads.all()
    # tables that widen require a new capture
    assert steps[0].replays >= 12
    assert cache.memory().bytes <= limit


@pytest.mark.slow
def test_heads_of_several_stores_are_lowered_between_replays(steps) -> None:
    """Pages move between the stores, which stay where the graph reads them."""
    tokens = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(3))
    model = build(2, num_key_value_heads=2)
    fields = {"head_precisions": [["K8V8", "K4V2"], ["K4V4", "K4V4"]]}
    _, free = run(model, False, tokens, 24, {**fields, "max_bytes": 10**6})
    limit = free.memory().bytes - 500
    cache, eager = assert_alike(model, tokens, 24, {**fields, "max_bytes": limit})
    assert len(cache.stores.all) == 2
    for store, other in zip(cache.stores.all, eager.stores.all):
        assert store.lowering.tokens == other.lowering.tokens and torch.equal(store.low_heads, other.low_heads)
    assert cache.memory().lowered > 0 and cache.memory().bytes <= limit
    # tables that widen require a new capture
    assert steps[0].replays >= 12


@pytest.mark.slow
def test_a_second_turn_and_a_fork(model, steps) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(3))
    turn = torch.randint(0, 96, (1, 5), generator=torch.Generator().manual_seed(4))
    found = []
    for captured in (False, True):
        logits, cache = run(model, captured, tokens, 6)
        (fork,) = cache.fork(1)
        # the last token is not in the cache yet
        ids = torch.cat([tokens, logits.argmax(-1)[:, :-1], turn], dim=1)
        for each in (cache, fork):
            found.append(torch.stack(generate(model, ids, each, 6).logits, 1))
            each.check_integrity()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert [step.replays for step in steps] == [4, 4, 4]


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
@pytest.mark.slow
def test_what_is_not_captured_runs_from_python(model, steps, options: dict) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(5))
    cache = DiffKVCache(model.config, DiffKVConfig(**FIELDS))
    expected = DiffKVCache(model.config, DiffKVConfig(**FIELDS, cuda_graphs=False))
    sequences = [
        model.generate(tokens, **passing(each), max_new_tokens=4, do_sample=False, **options)
        for each in (cache, expected)
    ]
    assert torch.equal(*sequences)
    assert not RecordedGraph.made
    cache.check_integrity()


@pytest.mark.slow
def test_stop_strings_are_captured(model, steps) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(5))
    options = {"stop_strings": ["no model writes this"], "tokenizer": tokenizer}
    assert_alike(model, tokens, 6, **options)
    assert steps[-1].replays == 4


def test_autocast_is_not_captured(model, steps) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(5))
    cache = DiffKVCache(model.config, DiffKVConfig(**FIELDS))
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, tokens, cache, 4)
    assert steps and not RecordedGraph.made
    cache.check_integrity()


@pytest.mark.slow
def test_a_model_that_asks_for_the_length_is_not_captured(model, steps, monkeypatch, caplog) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(6))
    expected, _ = run(model, False, tokens, 5)
    forward = model.model.layers[0].forward

    def asks(*args: object, **kwargs: object) -> object:
        passed(kwargs).get_seq_length()
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model.layers[0], "forward", asks)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        got, _ = run(model, True, tokens, 5)
    assert torch.equal(got, expected)
    assert steps[0].replays == 0
    assert caplog.text.count("not captured") == 1 and "length of the cache" in caplog.text


@pytest.mark.slow
def test_a_host_read_in_the_model_is_not_captured(model, steps, monkeypatch, caplog) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(6))
    forward = model.model.layers[0].forward

    def reads(hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        assert bool(hidden.isfinite().all())
        return forward(hidden, *args, **kwargs)

    monkeypatch.setattr(model.model.layers[0], "forward", reads)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        run(model, True, tokens, 4)
        run(model, True, tokens, 4)
    assert steps[0].replays == 0 and caplog.text.count("not permitted during a capture") == 1
    # nor is it retried with this model
    assert len(steps) == 1


@pytest.mark.slow
def test_a_full_device_is_no_reason_to_give_up(model, steps, monkeypatch, caplog) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(6))
    capture = RecordedGraph.capture

    def full(self: RecordedGraph, work: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(RecordedGraph, "capture", full)
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        run(model, True, tokens, 4)
    assert "not captured, which is slower: OutOfMemoryError: CUDA out of memory" in caplog.text
    monkeypatch.setattr(RecordedGraph, "capture", capture)
    run(model, True, tokens, 4)
    assert [step.replays for step in steps] == [0, 2]


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "linear"])
@pytest.mark.sampled(100)
def test_rotary_frequencies_that_change_with_the_length(steps, kind: str) -> None:
    """To choose them, models read the length from the device at every step."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 16, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = build(1, rope_parameters=rope)
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(6))
    run(model, True, tokens, 8)
    assert len(steps) == (kind == "linear")


def test_values_that_are_not_finite_are_reported(model, steps, monkeypatch) -> None:
    """The error of a step from Python, when the host next reads the device."""
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(7))
    cache = DiffKVCache(model.config, DiffKVConfig(**FIELDS))
    step = graphs.DecodeStep.__call__

    def poison(self: graphs.DecodeStep, *args: object, **inputs: object) -> object:
        if self.replays == 3:
            cache.stores.all[0].invalid.fill_(True)
        return step(self, *args, **inputs)

    monkeypatch.setattr(graphs.DecodeStep, "__call__", poison)
    with pytest.raises(ValueError, match="NaN, infinite"):
        generate(model, tokens, cache, 20)


def form(kernel: InterpretedFunction, args: tuple, kwargs: dict) -> tuple:
    """Returns what Triton specialises a launch on: dtypes, and whether numbers are 1 or multiples of 16."""
    any_value = kernel.kwargs["do_not_specialize"] or ()
    found = []
    for name, value in {**dict(zip(kernel.arg_names, args)), **kwargs}.items():
        if isinstance(value, torch.Tensor):
            found.append((name, value.dtype, name in any_value or value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in any_value:
            found.append((name, value == 1, value % 16 == 0))
        elif not isinstance(value, (int, float)):
            found.append((name, value))
    return kernel.__name__, tuple(found)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.sampled(100)
def test_a_capture_compiles_nothing(model, steps, launched: list, masked: bool, batch: int) -> None:
    """Checks that the step before the capture has compiled and loaded every launch, which a capture forbids."""
    tokens = torch.randint(0, 96, (batch, 10), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(tokens)
    if masked:
        mask[0, :3] = 0
    run(model, True, tokens, 3, attention_mask=mask)
    assert steps[0].captures == 1
    before, captured = ({form for inside, form in launched if inside is wanted} for wanted in (False, True))
    assert {name for name, _ in captured} > {"append_kernel", "attend_kernel", "move_tokens_kernel"}
    assert captured <= before


@pytest.mark.slow
def test_hidden_states_of_replays_stay(model, steps) -> None:
    tokens = torch.randint(0, 96, (1, 10), generator=torch.Generator().manual_seed(9))
    found = []
    for captured in (False, True):
        cache = DiffKVCache(model.config, DiffKVConfig(**FIELDS, cuda_graphs=captured))
        output = generate(model, tokens, cache, 6, output_hidden_states=True)
        found.append([state for states in output.hidden_states[1:] for state in states])
    assert steps[0].replays == 4 and len(found[0]) == 10
    assert all(map(torch.equal, *found))


def test_the_switch_must_be_a_bool() -> None:
    with pytest.raises(ValueError, match="cuda_graphs='no' must be True or False"):
        DiffKVConfig(cuda_graphs="no")
