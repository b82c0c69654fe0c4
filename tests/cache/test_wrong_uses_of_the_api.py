"""Wrong uses of every public class: one message that names the argument and the remedy, and nothing changed.

Errors found by a forward are in test_bad_input.py, those of `generate()` in test_bad_calls.py, and those of the command
line in tests/commands/test_wrong_uses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bad_input import contents, generate, raises
from tiny_models import tiny_model
from transformers import BatchEncoding, GenerationConfig

from hf_diffkv import (
    DiffKVCache,
    DiffKVConfig,
    Precision,
    PrefixStore,
    keep_queries,
    measure_heads,
    measure_queries,
    plot,
    probe_keys,
    training,
)
from hf_diffkv.compat import passing

ROWS = torch.tensor([0, 5])


def batch(model: Any, *options: Any, **keywords: Any) -> Any:
    return model.generate_batch([[1, 2]], *options, max_new_tokens=2, **keywords)


# a call with a model, a cache that holds two sequences, a folder and a file; the words that the message must contain
CASES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "no model": (lambda to: DiffKVCache(None), ("model_config is a NoneType", "DiffKVCache(model)")),
    "a name as model": (lambda to: DiffKVCache("gpt2"), ("model_config is a str", "model.config")),
    "config of another type": (lambda to: DiffKVCache(to.config, 5), ("config=5", "DiffKVConfig, a dict")),
    "unknown config by name": (lambda to: DiffKVCache(to.config, "smal"), ("'smal'", "did you mean 'small'?")),
    "config by its folder": (
        lambda to: DiffKVCache(to.config, str(to.folder)),
        ("no preset", "DiffKVConfig.from_pretrained("),
    ),
    "unknown field": (lambda to: DiffKVCache(to.config, windw=5), ("windw", "did you mean 'window'?")),
    "unknown field in a dict": (lambda to: DiffKVCache(to.config, {"sink": 1}), ("sink", "did you mean 'sinks'?")),
    "unknown choice": (
        lambda to: DiffKVCache(to.config, target_rato=0.3),
        ("did you mean 'target_ratio'?", "'preset'"),
    ),
    "ratio of a config": (
        lambda to: DiffKVConfig(target_ratio=0.3),
        ("target_ratio is not a field", "DiffKVCache(model"),
    ),
    "ratio of a preset": (lambda to: DiffKVConfig.preset("small", target_ratio=0.3), ("not a field", "for_model")),
    "unknown field of lossless": (lambda to: DiffKVConfig.lossless(windw=3), ("windw", "did you mean 'window'?")),
    "unknown field of paper": (lambda to: DiffKVConfig.paper(alpha=3), ("alpha", "known keys")),
    "unknown field of a preset": (lambda to: DiffKVConfig.preset("small", rotat=1), ("rotat", "mean 'rotate'?")),
    "unknown preset": (lambda to: DiffKVConfig.preset("balancd"), ("no preset 'balancd'", "choose one of")),
    "unknown field of a config": (lambda to: DiffKVConfig(windo=3), ("windo", "did you mean 'window'?")),
    "size that is none": (lambda to: DiffKVCache(to.config, max_bytes="lots"), ("max_bytes='lots'", "write 24GB")),
    "size without a unit": (lambda to: DiffKVConfig(max_bytes="3"), ("max_bytes='3' is 3 bytes", "write 3GB")),
    "size of nothing": (
        lambda to: DiffKVConfig(max_bytes="0GB"),
        ("max_bytes='0GB' is less than a byte", "at least one"),
    ),
    "size in halves": (lambda to: DiffKVConfig(max_bytes=1.5), ("max_bytes=1.5", "an integer of at least 1")),
    "half a token": (lambda to: DiffKVCache(to.config, window=1.5), ("window=1.5", "an integer of at least 1")),
    "negative sinks": (lambda to: DiffKVCache(to.config, sinks=-1), ("sinks=-1", "at least 0")),
    "precision as a number": (lambda to: DiffKVCache(to.config, high=8), ("high=8", "'K8V4'")),
    "precision by a wrong name": (lambda to: DiffKVCache(to.config, low="4/2"), ("low='4/2'", "'K8V4'")),
    "bits that do not exist": (lambda to: Precision(9, 4), ("k_bits=9", "use one of (1, 2, 3")),
    "bits as text": (lambda to: Precision("8", 4), ("k_bits='8'", "use one of (1, 2, 3")),
    "no groups": (lambda to: Precision(8, 4, 0), ("k_groups=0", "at least 1")),
    "low above high": (lambda to: DiffKVConfig(high="K4V2", low="K8V4"), ("swap the two",)),
    "threshold that is no number": (lambda to: DiffKVConfig(alpha_high=float("nan")), ("alpha_high=nan", "at least 0")),
    "thresholds of other layers": (
        lambda to: DiffKVCache(to.config, alpha_high=(1.0,) * 5),
        ("alpha_high has 5", "2 layers"),
    ),
    "policy that does not exist": (lambda to: DiffKVConfig(policy="lenakv"), ("lenakv", "did you mean 'leankv'?")),
    "option of no policy": (
        lambda to: DiffKVConfig(policy="leankv", policy_options={"hihg_cut": 0.3}),
        ("policy_options", "did you mean 'high_cut'?"),
    ),
    "option beyond its range": (
        lambda to: DiffKVConfig(policy="leankv", policy_options={"high_cut": 3}),
        ("high_cut=3", "between 0 and 1"),
    ),
    "ratio that is none": (lambda to: DiffKVCache(to.config, target_ratio=0.0), ("target_ratio=0.0", "0.3")),
    "ratio in percent": (lambda to: DiffKVCache(to.config, target_ratio=30), ("target_ratio=30", "at most 1")),
    "ratio of a model in percent": (
        lambda to: DiffKVCache(to.model, target_ratio=30),
        ("target_ratio=30", "at most 1"),
    ),
    "ratio out of reach": (lambda to: DiffKVCache(to.config, target_ratio=0.01), ("target_ratio=0.01", "raise it")),
    "ratio beside a configuration": (
        lambda to: DiffKVCache(to.config, DiffKVConfig(), target_ratio=0.3),
        ("target_ratio chooses a configuration", "leave out either"),
    ),
    "pin": (lambda to: DiffKVConfig(pin=(0, 5)), ("pin was removed", "sinks=N")),
    "metadata of 8 bits": (lambda to: DiffKVConfig(metadata_bits=8), ("metadata_bits=8", "one of (16, 32)")),
    "flag as text": (lambda to: DiffKVConfig(rotate="yes"), ("rotate='yes'", "True or False")),
    "no queries observed": (lambda to: DiffKVConfig(observation_window=0), ("observation_window=0", "at least 1")),
    "broken JSON": (lambda to: DiffKVConfig.from_json("{"), ("text is not a JSON object", "line 1")),
    "JSON of a list": (lambda to: DiffKVConfig.from_json("[]"), ("JSON object of its fields", "not a list")),
    "list of fields": (lambda to: DiffKVConfig.from_dict([1]), ("values is a list", "dict of DiffKVConfig's fields")),
    "configuration that was not saved": (
        lambda to: DiffKVConfig.from_pretrained(to.folder),
        ("does not exist", "save_pretrained first"),
    ),
    "configuration into a file": (lambda to: DiffKVConfig().save_pretrained(to.file), ("is a file", "give a folder")),
    "configuration into nothing": (
        lambda to: DiffKVConfig().save_pretrained(None),
        ("save_directory=None", "a folder"),
    ),
    "configuration for nothing": (
        lambda to: DiffKVConfig.for_model(None),
        ("a NoneType is not a model", "pass the model"),
    ),
    "configuration for nonsense": (
        lambda to: DiffKVConfig.for_model("nonsense"),
        ("'nonsense' is not a model", "OWNER/NAME", "pass the model or model.config"),
    ),
    "configuration for a preset": (
        lambda to: DiffKVConfig.for_model("smal"),
        ("'smal' is not a model", "preset='small'"),
    ),
    "config without a model": (lambda to: DiffKVCache(config=DiffKVConfig()), ("model_config is a NoneType",)),
    "cache that was not saved": (
        lambda to: DiffKVCache.from_pretrained(to.folder, to.model),
        ("does not exist", "cache.save_pretrained first"),
    ),
    "cache loaded by a name": (
        lambda to: DiffKVCache.from_pretrained(to.folder, "gpt2"),
        ("model is a str", "the model itself"),
    ),
    "cache from nothing": (
        lambda to: DiffKVCache.from_pretrained(None, to.model),
        ("save_directory=None", "path of a folder"),
    ),
    "configuration from nothing": (lambda to: DiffKVConfig.from_pretrained(None), ("name=None", "path of a folder")),
    "JSON that is read": (lambda to: DiffKVConfig.from_json({"window": 5}), ("text is not a JSON object", "dict")),
    "several presets": (lambda to: DiffKVConfig.preset(["small"]), ("no preset ['small']", "choose one of")),
    "device beside a model": (
        lambda to: DiffKVCache.from_pretrained(to.folder, to.model, device="cpu"),
        ("device=cpu", "leave it"),
    ),
    "cache into a file": (lambda to: to.cache.save_pretrained(to.file), ("is a file", "give a folder")),
    "cache into nothing": (lambda to: to.cache.save_pretrained(None), ("save_directory=None", "a folder")),
    "layer by name": (lambda to: to.cache.levels("first"), ("layer_idx='first'", "integer")),
    "half a layer": (lambda to: to.cache.dequantize(0.5), ("layer_idx=0.5", "integer")),
    "layer that does not exist": (lambda to: to.cache.levels(9), ("layer_idx=9", "2 layers")),
    "significance that is not kept": (lambda to: to.cache.significance(0), ("no significance", "alpha_high above 0")),
    "levels of nothing": (lambda to: DiffKVCache(to.config).levels(0), ("holds nothing yet", "run the model")),
    "no forks": (lambda to: to.cache.fork(0), ("n=0", "at least 1")),
    "forks by name": (lambda to: to.cache.fork("two"), ("n='two'", "an integer")),
    "crop to a length": (lambda to: to.cache.crop(3), ("tokens_to_remove=3", "minus the number")),
    "crop of a text": (lambda to: to.cache.crop("all"), ("tokens_to_remove='all'", "a negative integer")),
    "crop of half a token": (
        lambda to: to.cache.crop(torch.tensor(-0.5)),
        ("tokens_to_remove=-0.5", "a negative integer"),
    ),
    "crop of each row": (
        lambda to: to.cache.crop(torch.tensor([-1, -2])),
        ("tokens_to_remove=tensor([-1, -2])", "a negative integer"),
    ),
    "crop of what is stored": (lambda to: to.cache.crop(-3), ("cannot remove 3", "activate_past_recording()")),
    "row that does not exist": (lambda to: to.cache.reorder_cache(ROWS), ("[0, 5]", "[0, 2)")),
    "choice of nothing": (
        lambda to: to.cache.batch_select_indices(torch.zeros(2, dtype=torch.bool)),
        ("indices []", "not empty"),
    ),
    "choice among three": (
        lambda to: to.cache.batch_select_indices(torch.ones(3, dtype=torch.bool)),
        ("indices=[True, True, True]", "holds 2 sequences"),
    ),
    "choice by nothing": (
        lambda to: to.cache.batch_select_indices(None),
        ("indices is a NoneType", "a list or a one-dimensional tensor"),
    ),
    "choice by name": (lambda to: to.cache.reorder_cache("last"), ("beam_idx is a str", "an integer for each")),
    "choice by a slice": (lambda to: to.cache.batch_select_indices(slice(1)), ("indices is a slice", "a list")),
    "order by a mask": (
        lambda to: to.cache.reorder_cache([True, False]),
        ("beam_idx=[True, False] is a mask", "batch_select_indices"),
    ),
    "repeat by a flag": (lambda to: to.cache.batch_repeat_interleave(True), ("repeats=True", "an integer")),
    "no repeats": (lambda to: to.cache.batch_repeat_interleave(0), ("repeats=0", "at least 1")),
    "half a repeat": (lambda to: to.cache.batch_repeat_interleave(1.5), ("repeats=1.5", "an integer")),
    "attached to a name": (lambda to: to.cache.attach("gpt2"), ("model is a str", "the model itself")),
    "cache_config of a list": (
        lambda to: generate(to.model, cache_implementation="diffkv", cache_config=[1]),
        ("cache_config=[1]", "a dict of DiffKVConfig fields"),
    ),
    "cache_config with a number as name": (
        lambda to: generate(to.model, cache_implementation="diffkv", cache_config={1: 2}),
        ("cache_config={1: 2}", "a dict of DiffKVConfig fields"),
    ),
    "cache_config of another cache": (
        lambda to: generate(to.model, cache_implementation="diffkv", cache_config={"nbits": 4}),
        ("nbits", "known keys"),
    ),
    "name as cache": (
        lambda to: generate(to.model, **passing("diffkv")),
        ("'diffkv', which is not a cache", "cache=DiffKVCache(model)", "cache_implementation='diffkv'"),
    ),
    "preset as cache": (lambda to: generate(to.model, **passing("small")), ("'small', which is not a cache",)),
    "config as cache": (lambda to: generate(to.model, **passing(DiffKVConfig())), ("DiffKVConfig(", "is not a cache")),
    "class as cache": (lambda to: generate(to.model, **passing(DiffKVCache)), ("the class DiffKVCache", "not a cache")),
    "prompt that is shorter": (
        lambda to: to.model.generate(to.ids[:, :5], **passing(to.cache)),
        ("holds 22 tokens", "the prompt has 5", "reset()"),
    ),
    "prompt that is another": (
        lambda to: to.model.generate(to.ids.flip(1).repeat(1, 3), **passing(to.cache)),
        ("differ from position 0", "reset()"),
    ),
    "name for a batch": (
        lambda to: batch(to.model, cache_implementation="diffkv", cache_config={"window": 8}),
        ("ignores cache_implementation and cache_config", "GenerationConfig(cache_implementation='diffkv'"),
    ),
    "fields beside a configuration of a batch": (
        lambda to: batch(to.model, GenerationConfig(cache_implementation="diffkv"), cache_config="small"),
        ("ignores cache_config as", "GenerationConfig("),
    ),
    "cache for a batch": (
        lambda to: batch(to.model, **passing(to.cache)),
        ("takes no cache", "GenerationConfig(cache_implementation='diffkv'"),
    ),
    "store of a name": (lambda to: PrefixStore("gpt2"), ("model is a str", "the model itself")),
    "store with an unknown preset": (lambda to: PrefixStore(to.model, "large"), ("'large'", "choose one of")),
    "store of negative size": (lambda to: PrefixStore(to.model, device_bytes=-1), ("device_bytes=-1", "0 or more")),
    "store with a size as text": (lambda to: PrefixStore(to.model, host_bytes="1GB"), ("host_bytes='1GB'", "number")),
    "limit without folder": (lambda to: PrefixStore(to.model, folder_bytes=5), ("folder_bytes", "give the folder")),
    "folder without a name": (lambda to: PrefixStore(to.model, folder=""), ("folder=''", "path of a folder")),
    "folder that is none": (lambda to: PrefixStore(to.model, folder=5), ("folder=5", "path of a folder")),
    "heads by a text": (lambda to: measure_heads(to.model, "Hello"), ("tokenizer is a str", "pass the tokenizer")),
    "queries by a text": (lambda to: measure_queries(to.model, "Hello"), ("tokenizer is a str", "pass the tokenizer")),
    "keys by a text": (lambda to: probe_keys(to.model, "Hello"), ("tokenizer is a str", "pass the tokenizer")),
    "callback of no trainer": (
        lambda to: training.DiffKVEvaluationCallback(to.model, ["Hello"]),
        ("trainer is a LlamaForCausalLM", "pass the Trainer"),
    ),
    "lookup of a text": (lambda to: PrefixStore(to.model).lookup("hello"), ("input_ids is a str", "tokenise")),
    "lookup of an encoding": (
        lambda to: PrefixStore(to.model).lookup(BatchEncoding({"input_ids": to.ids})),
        ("input_ids is a BatchEncoding", "pass its input_ids"),
    ),
    "lookup of a batch": (lambda to: PrefixStore(to.model).lookup(to.ids), ("input_ids has 2 rows", "each row")),
    "lookup of fractions": (lambda to: PrefixStore(to.model).lookup(torch.rand(1, 5)), ("torch.float32", "integers")),
    "insertion of nothing": (lambda to: PrefixStore(to.model).insert(to.ids[:1], None), ("cache is a NoneType",)),
    "queries of nothing": (lambda to: keep_queries(None), ("moments is a NoneType", "measure_queries")),
    "probe of no bits": (lambda to: probe_keys(to.model, bits=()), ("bits=()", "at least one")),
    "probe of a number": (lambda to: probe_keys(to.model, bits=4), ("bits=4", "a tuple")),
    "picture of nothing": (lambda to: plot.levels(None), ("cache is a NoneType", "a DiffKVCache")),
    "curve of a cache": (lambda to: plot.memory(to.cache), ("curves is a DiffKVCache", "by the name of a cache")),
    "picture of an empty cache": (lambda to: plot.levels(DiffKVCache(to.config)), ("holds nothing yet", "generate")),
}


@pytest.fixture(scope="module")
def to(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Objects used by the calls."""
    folder = tmp_path_factory.mktemp("empty")
    file = tmp_path_factory.mktemp("full") / "file.txt"
    file.write_text("text")
    model = tiny_model("llama")
    ids = torch.arange(1, 41).view(2, 20)
    cache = DiffKVCache(model.config)
    model.generate(ids, **passing(cache), max_new_tokens=3, do_sample=False)
    names = {"model": model, "config": model.config, "ids": ids, "cache": cache, "folder": folder, "file": file}
    return SimpleNamespace(**names, before=contents(cache))


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_use_says_what_to_do(case: str, to: SimpleNamespace) -> None:
    call, words = CASES[case]
    with raises((ValueError, FileNotFoundError), *words) as caught:
        call(to)
    assert str(caught.value).count("\n") == 0 and str(caught.value).endswith(".")
    assert contents(to.cache) == to.before
    assert not list(to.folder.iterdir()) and Path(to.file).read_text() == "text"
