"""A name that a release of Transformers lacks disables only the feature that needs it; a message names both."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from hf_diffkv_serving import compat as serving
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

import hf_diffkv
from hf_diffkv import DiffKVCache, DiffKVConfig, compat
from hf_diffkv.compat import Feature, PrivateName, passing

NAMED = {**vars(compat), **vars(serving)}
FEATURES = {name: feature for name, feature in NAMED.items() if isinstance(feature, Feature)}
# asked for by whoever imports these; all others are asked for by what uses them
REQUIRED = {"BATCHING": "hf_diffkv_serving.batching.engine_names", "SERVER": "hf_diffkv_serving.server.parts"}
CASES = [(label, name) for label, feature in FEATURES.items() if label not in REQUIRED for name in feature.names]
PARTS = [(label, name) for label in REQUIRED for name in FEATURES[label].names]
IDS = torch.arange(40)[None] % 64
WRAPPED = {
    "GENERATE": (GenerationMixin, "_prepare_cache_for_generation"),
    "SETTING_BACK": (GenerationMixin, "generate"),
    "PROMPTS": (GenerationMixin, "_prefill"),
    "GRAPHS": (PreTrainedModel, "get_compiled_call"),
    "BATCHING_BY_NAME": (GenerationMixin, "init_continuous_batching"),
}


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Repeats every message, and restores the registrations afterwards."""
    monkeypatch.setattr(compat, "_said", set())
    yield
    monkeypatch.undo()
    hf_diffkv.unregister()
    hf_diffkv.register()


def hide(monkeypatch: pytest.MonkeyPatch, hidden: PrivateName) -> None:
    """Hides a name from the package. Transformers, which needs it as well, still has it."""
    found = PrivateName.found
    monkeypatch.setattr(PrivateName, "found", lambda name: name != hidden and found(name))


def model_of() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=64, eos_token_id=None, attn_implementation="sdpa")
    return LlamaForCausalLM(config).eval()


def use(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the feature."""
    hf_diffkv.unregister()
    hf_diffkv.register()
    model = model_of()
    if label == "SLIDING_GRAPHS":
        from hf_diffkv.cache import graphs

        monkeypatch.setitem(graphs.GRAPH_TYPES, "cpu", object)
        layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
        assert not graphs.wants_graphs(model, DiffKVCache(LlamaConfig(**layers, num_hidden_layers=2)))
        assert graphs.wants_graphs(model, DiffKVCache(model.config))
        monkeypatch.delitem(graphs.GRAPH_TYPES, "cpu")
    elif label == "STATEFUL":
        from hf_diffkv.evaluation.methods.base import attends_fully

        assert not attends_fully(model)
    elif label == "SWITCHING":
        assert DiffKVCache(model).compressed_layers() == [0, 1]
    elif label == "ATTENTION":
        assert compat.attention_of(model.config) is None
    elif label == "OWN_CACHE":
        model.generate(IDS, max_new_tokens=1, cache_implementation="diffkv")


@pytest.mark.parametrize(("label", "name"), CASES, ids=[f"{label}-{name}" for label, name in CASES])
def test_one_name_less_loses_one_feature(monkeypatch: pytest.MonkeyPatch, label: str, name: PrivateName) -> None:
    hide(monkeypatch, name)
    with pytest.warns(UserWarning) as said:
        use(label, monkeypatch)
    about = [str(warning.message) for warning in said if "changed" in str(warning.message)]
    assert len(about) == 1 and f" changed {name}, so {FEATURES[label].lost}" in about[0]
    for feature, (owner, method) in WRAPPED.items():
        wrapped = hasattr(getattr(owner, method), "_diffkv")
        # without the first the integration is a cache alone
        assert wrapped == (feature != label and (label != "GENERATE" or feature == "BATCHING_BY_NAME")), feature
    model = model_of()
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False, **passing(DynamicCache()))
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig.lossless())
    given = model.generate(IDS, max_new_tokens=4, do_sample=False, **passing(cache))
    assert torch.equal(given, expected) and cache.memory().bytes > 0


@pytest.mark.parametrize(("label", "name"), PARTS, ids=[f"{label}-{name}" for label, name in PARTS])
def test_one_name_less_refuses_what_imports_it(monkeypatch: pytest.MonkeyPatch, label: str, name: PrivateName) -> None:
    if label == "SERVER":
        pytest.importorskip(REQUIRED[label], exc_type=ImportError)
    hide(monkeypatch, name)
    monkeypatch.delitem(sys.modules, REQUIRED[label], raising=False)
    with pytest.raises(ImportError, match=re.escape(f" changed {name}, so {FEATURES[label].lost}")):
        importlib.import_module(REQUIRED[label])


def test_an_unregistered_release_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, FEATURES["GENERATE"].names[0])
    with pytest.warns(UserWarning, match="_prepare_cache_for_generation"):
        use("GENERATE", monkeypatch)
    with pytest.raises(ValueError, match="cache_implementation"):
        GenerationConfig(cache_implementation="diffkv")


@pytest.mark.oldest
@pytest.mark.parametrize("label", FEATURES)
def test_this_release_has_them_all(label: str) -> None:
    assert FEATURES[label].missing() == []


class Owner:
    def __init__(self) -> None:
        self.kept = 1

    def method(self, first: int, second: int) -> int:
        return getattr(self, "mentioned", first + second)


def test_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("invented_module")
    module.Owner = Owner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    owner = "invented_module:Owner"
    there = [("kept", None), ("method", None), ("method", "first second"), ("method", "first ..."), ("method", "...")]
    other = [("lost", None), ("method", "first"), ("method", "second ..."), ("lost", "..."), ("mentioned", None)]
    assert [PrivateName(owner, *case).found() for case in there] == [True] * len(there)
    assert [PrivateName(owner, *case).found() for case in other] == [False] * len(other)
    assert PrivateName(f"{owner}.method", "mentioned").found() and not PrivateName(f"{owner}.method", "kept").found()
    assert not PrivateName("no.such_module:Owner", "kept").found()
    assert str(PrivateName(owner, "kept")) == "Owner.kept"
