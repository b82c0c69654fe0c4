"""Every family generates as with `DynamicCache` when lossless and compresses where it is said to, or is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import BOTH, FAMILIES, KEPT_CLASSES, LINEAR, LONGER, ORIGINAL_LENGTH, Family
from packaging.version import Version
from runs import Run, tokens
from tiny_models import PRECISIONS_OF_LATENTS, ragged_prompts, tiny_model
from tiny_models import greedy as greedy_output
from torch import Tensor
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.compat import passing

LENGTHS = (90, 41, 7)
NEW_TOKENS = 16
WINDOW = 16
LOSSLESS = DiffKVConfig.lossless(window=WINDOW)
COMPRESSED = DiffKVConfig(alpha_high=1.2, alpha_low=0.5, window=WINDOW)
OF_LATENTS = replace(COMPRESSED, **PRECISIONS_OF_LATENTS)

pytestmark = pytest.mark.oldest
RUNS = [name for name, family in FAMILIES.items() if not family.refused]
REFUSED = [name for name, family in FAMILIES.items() if family.refused]
# the states of recurrent_gemma are in the model
WITH_STATES = [name for name in RUNS if {LINEAR, BOTH} & set(FAMILIES[name].kept) and name != "recurrent_gemma"]


def build(name: str) -> PreTrainedModel:
    """The tiny model of a family, with eager attention; skips where this release does not have it."""
    if name not in CONFIG_MAPPING:
        pytest.skip("this release of Transformers does not have it")
    if Version(transformers.__version__) < Version("{}.{}".format(*FAMILIES[name].since)):
        pytest.skip("the attention of this release's model is not the interface's")
    return tiny_model(name, "eager", **FAMILIES[name].options)


def greedy(model: PreTrainedModel, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Sequences [batch, tokens], logits [NEW_TOKENS, batch, vocabulary], and the cache that was used."""
    ids, mask = ragged_prompts(LENGTHS)
    result = greedy_output(model, ids, mask, NEW_TOKENS, **options)
    return result.sequences, torch.stack(result.logits), result.past_key_values


def rounding(model: PreTrainedModel) -> Tensor:
    """Returns the distance of two dense computations. Gemma 4's tiny models amplify rounding a hundredfold."""
    before, logits = model.config._attn_implementation, []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        logits.append(greedy(model, **passing(DynamicCache(config=model.config)))[1])
    model.set_attn_implementation(before)
    return (logits[0] - logits[1]).abs().max()


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:this model has no plain full-attention layer")
@pytest.mark.sampled(10)
def test_family(name: str) -> None:
    model, family = build(name), FAMILIES[name]
    expected = greedy(model, **passing(DynamicCache(config=model.config)))

    lossless = DiffKVCache(model.config, LOSSLESS)
    actual = greedy(model, **passing(lossless))
    assert torch.equal(actual[0], expected[0])
    difference = (actual[1] - expected[1]).abs().max()
    assert difference < 1e-4 or difference < 2 * rounding(model)
    assert_layers(lossless, family)
    for layer_idx in family.compressed:
        assert torch.equal(lossless.levels(layer_idx), complete_levels(lossless, layer_idx))

    compressed = OF_LATENTS if family.latents else COMPRESSED
    lossy = greedy(model, cache_implementation="diffkv", cache_config=compressed.to_dict())
    assert_layers(lossy[2], family)
    for layer_idx in family.compressed:
        levels = lossy[2].levels(layer_idx)
        below, high = (levels == 0) | (levels == 1), levels == 2
        assert below.any() and high.any()
    torch.testing.assert_close(lossy[1][0], expected[1][0], rtol=0, atol=1e-4)  # the prompt is read uncompressed
    changed = (lossy[1][1:] - expected[1][1:]).abs().max()
    assert changed > 1e-3 if family.compressed else changed < 1e-4, "compression must show, and only there"


def assert_layers(cache: DiffKVCache, family: Family) -> None:
    """The cache compresses the layers it is said to, and keeps Transformers' own elsewhere."""
    cache.check_integrity()
    assert cache.compressed_layers() == list(family.compressed)
    kept = [type(layer).__name__ for layer in cache.layers if not isinstance(layer, DiffKVLayer)]
    allowed = {"DynamicLayer", *(KEPT_CLASSES[kind] for kind in family.kept)}
    assert set(kept) <= allowed
    assert cache.get_seq_length() == max(LENGTHS) + NEW_TOKENS - 1  # the last token was never fed back


def complete_levels(cache: DiffKVCache, layer_idx: int) -> Tensor:
    """Levels where every token is stored: at the high level or in the window; int8 [batch, kv_heads, seen]."""
    seen = cache.get_seq_length()
    positions = torch.arange(seen)
    padding = positions < max(LENGTHS) - torch.tensor(LENGTHS)[:, None]
    levels = torch.where(positions >= seen - WINDOW, 3, 2).expand(len(LENGTHS), seen)
    levels = torch.where(padding, -1, levels).to(torch.int8)
    return levels[:, None].expand_as(cache.levels(layer_idx))


def for_models_with_states(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test for each family with states, by `name`."""
    for mark in (
        pytest.mark.sampled(10),
        pytest.mark.filterwarnings("ignore:this model has no plain full-attention layer"),
        pytest.mark.parametrize("name", WITH_STATES),
    ):
        test = mark(test)
    return test


def attending(name: str) -> PreTrainedModel:
    """Returns the tiny model of a family with this library's attention."""
    model = build(name)
    model.set_attn_implementation("diffkv")
    return model


CHOICES = {
    "select": (lambda cache: cache.batch_select_indices([2, 0]), [2, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reorder": (lambda cache: cache.reorder_cache([1, 1, 0]), [1, 1, 0]),
}


@pytest.mark.parametrize("choice", CHOICES)
@for_models_with_states
def test_chosen_rows_of_models_with_states(name: str, choice: str) -> None:
    model, (choose, index) = attending(name), CHOICES[choice]
    first, more = tokens(3, 40), tokens(len(index), 4, seed=2)
    talk = Run(model, DiffKVCache(model.config, LOSSLESS), 3)
    talk.feed(first)
    choose(talk.cache)
    talk.ids, talk.mask = talk.ids[index], talk.mask[index]
    expected = Run(model, DiffKVCache(model.config, LOSSLESS), len(index))
    expected.feed(first[index])
    torch.testing.assert_close(talk.steps(more), expected.steps(more), rtol=0, atol=1e-4)
    talk.cache.check_integrity()


@for_models_with_states
def test_reset_while_recording_empties_states(name: str) -> None:
    """States keep their size in Transformers, which then fits neither another batch nor steps without recording."""
    model = attending(name)
    cache, fresh = (DiffKVCache(model.config, LOSSLESS) for _ in range(2))
    talk = Run(model, cache, 3)
    talk.feed(tokens(3, 9))
    cache.activate_past_recording()
    talk.feed(tokens(3, 4))
    cache.reset()
    assert cache.memory().bytes == 0
    again, expected = Run(model, cache, 2), Run(model, fresh, 2)
    for count in (9, 1, 1):
        torch.testing.assert_close(again.feed(tokens(2, count)), expected.feed(tokens(2, count)), rtol=0, atol=1e-5)
    assert cache.memory() == fresh.memory() and cache.memory().other_bytes > 0


@for_models_with_states
def test_recurrent_states_give_no_tokens_back(name: str) -> None:
    model = attending(name)
    runs = [Run(model, DiffKVCache(model.config, LOSSLESS), 2) for _ in range(2)]
    for run in runs:
        run.feed(tokens(2, 9))
        run.cache.activate_past_recording()
    recurrent = [getattr(layer, "recurrent_states", None) or {} for layer in runs[0].cache.layers]
    runs[0].feed(tokens(2, 3))
    if any(state is not None for states in recurrent for state in states.values()):
        with pytest.raises(ValueError, match="cannot remove 2 tokens: the recurrent states"):
            runs[0].crop(2)
        runs[0].crop(0)
        runs[1].feed(tokens(2, 3))
    else:
        runs[0].crop(2)
        runs[1].feed(tokens(2, 3)[:, :1])
    runs[1].crop(0)
    step = tokens(2, 1)
    torch.testing.assert_close(runs[0].feed(step), runs[1].feed(step), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [90, ORIGINAL_LENGTH - 4])
@pytest.mark.parametrize("name", LONGER)
def test_past_the_original_length(name: str, tokens: int) -> None:
    """From a prompt that is longer, and from one that becomes so: the given cache holds all, and the text is right."""
    model = tiny_model(name, "eager", **LONGER[name])
    ids = torch.randint(3, 100, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    cache = DiffKVCache(model.config, LOSSLESS)
    text = model.generate(ids, **options, **passing(cache))
    # every step computes the whole text; some releases compute nonsense with a DynamicCache that grows past it
    assert torch.equal(text, model.generate(ids, **options, use_cache=False))
    if tokens > ORIGINAL_LENGTH:
        assert torch.equal(text, model.generate(ids, **options, **passing(DynamicCache(config=model.config))))
    assert cache.get_seq_length() == tokens + NEW_TOKENS - 1
    cache.check_integrity()
    for layer_idx in cache.compressed_layers():
        assert cache.dequantize(layer_idx)[2].all()


def test_no_other_model_drops_its_cache() -> None:
    """Finds the models whose code sets the cache to None before a step: they are tried above."""
    dropping = re.compile(r"^ +(cache|past_key_values) = None$", re.MULTILINE)
    preparing = re.compile(r"def prepare_inputs_for_generation\(.*?(?=\n    def |\nclass |\Z)", re.DOTALL)
    found = set()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if any(dropping.search(body) for body in preparing.findall(path.read_text())):
            found.add(path.parent.name)
    assert {"phi3", "phimoe", "phi4_multimodal"} <= found <= set(LONGER)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Refused before the model runs."""
    model = build(name)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    ids, mask = ragged_prompts(LENGTHS)
    with pytest.raises(UnsupportedModelError, match=FAMILIES[name].refused), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(ids, attention_mask=mask, max_new_tokens=1, cache_implementation="diffkv")
