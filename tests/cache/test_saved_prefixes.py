"""A saved cache continues as if nothing had happened, or is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CONFIG, assert_equal_contents, model_of, started, tokens
from safetensors.torch import load_file
from tiny_models import ragged_prompts
from transformers import PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.io import JSON_NAME, TENSORS_NAME, CacheFileError, _checksum
from hf_diffkv.compat import passing

LENGTHS = (90, 33, 1, 64)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of()


@pytest.fixture(scope="module")
def saved_once(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run = started(model, LENGTHS)
    run.steps(tokens(4, 10))
    run.cache.save_pretrained(folder, model)
    DiffKVCache.from_pretrained(folder, model).check_integrity()
    return folder


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A saved cache that the test may damage."""
    return shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.sampled(6)
def test_a_loaded_cache_continues_identically(name: str, tmp_path: Path) -> None:
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.5, window=16)
    model = model_of(name)
    run = started(model, LENGTHS, config)
    run.steps(tokens(4, 22))
    run.feed(*ragged_prompts((3, 0, 8, 5), seed=5))
    run.steps(tokens(4, 1))
    run.cache.save_pretrained(tmp_path / "cache", model)
    loaded = run.on(DiffKVCache.from_pretrained(tmp_path / "cache", model))
    assert loaded.cache.config == run.cache.config
    assert_equal_contents(loaded.cache, run.cache)
    for seed in range(2):
        assert torch.equal(loaded.steps(tokens(4, 20, seed)), run.steps(tokens(4, 20, seed)))
        more = ragged_prompts((3, 0, 8, 5), seed)
        assert torch.equal(loaded.feed(*more), run.feed(*more))
        assert_equal_contents(loaded.cache, run.cache)
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "attention_mask": torch.cat([run.mask, torch.ones(4, 1).long()], 1),
    }
    ids = torch.cat([run.ids, tokens(4, 1, 6)], 1)
    assert torch.equal(
        model.generate(ids, **passing(loaded.cache), **options),
        model.generate(ids, **passing(run.cache), **options),
    )
    assert_equal_contents(loaded.cache, run.cache)


def test_a_fork_is_saved_by_itself(model: PreTrainedModel, tmp_path: Path) -> None:
    run = started(model, LENGTHS)
    forks = run.cache.fork(2)
    run.on(forks[0]).steps(tokens(4, 5))
    for number, cache in enumerate((run.cache, *forks)):
        cache.save_pretrained(tmp_path / str(number))
        assert_equal_contents(DiffKVCache.from_pretrained(tmp_path / str(number), model), cache)


def test_only_settled_caches_are_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    run = started(model, LENGTHS)
    run.cache.activate_past_recording()
    run.feed(tokens(4, 2))
    with pytest.raises(ValueError, match=r"crop\(0\)"):
        run.cache.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    run.crop(1)
    run.cache.save_pretrained(tmp_path)
    assert_equal_contents(DiffKVCache.from_pretrained(tmp_path, model), run.cache)


def test_nothing_is_pickled(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickled")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    run = started(model_of("gemma2"), LENGTHS)
    run.cache.save_pretrained(tmp_path, run.model)
    assert_equal_contents(DiffKVCache.from_pretrained(tmp_path, run.model), run.cache)
    assert {path.name for path in tmp_path.iterdir()} == {JSON_NAME, TENSORS_NAME}
    json.loads((tmp_path / JSON_NAME).read_text())
    load_file(tmp_path / TENSORS_NAME)


@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_a_missing_file(model: PreTrainedModel, saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        DiffKVCache.from_pretrained(saved, model)
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        DiffKVCache.from_pretrained(saved / "elsewhere", model)


def test_other_models_are_refused(model: PreTrainedModel, saved: Path) -> None:
    for other in (model_of("qwen3"), model_of("gemma2"), model_of(num_hidden_layers=3), model_of(rope_theta=5e5)):
        with pytest.raises(CacheFileError, match="model configuration"):
            DiffKVCache.from_pretrained(saved, other)
    other = model_of()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(CacheFileError, match="weights"):
        DiffKVCache.from_pretrained(saved, other)


HARMLESS = {
    **{"pad_token_id": 5, "eos_token_id": [1, 2], "bos_token_id": 7, "id2label": {0: "good", 1: "bad", 2: "so"}},
    **{"problem_type": "regression", "output_hidden_states": True, "return_dict": False, "initializer_range": 0.5},
    **{"attention_dropout": 0.1, "tie_word_embeddings": True},
}


def test_fields_that_do_not_matter(model: PreTrainedModel, saved: Path, tmp_path: Path) -> None:
    other = model_of()
    for name, value in HARMLESS.items():
        assert getattr(other.config, name) != value
        setattr(other.config, name, value)
    loaded = DiffKVCache.from_pretrained(saved, other)
    loaded.save_pretrained(tmp_path / "again", model)
    assert_equal_contents(DiffKVCache.from_pretrained(tmp_path / "again", model), loaded)


def test_the_fingerprint_of_0_1_0(model: PreTrainedModel, saved: Path) -> None:
    values = model.config.to_dict()
    for name in ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"):
        values.pop(name, None)
    content = json.loads((saved / JSON_NAME).read_text())
    content["model"] = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    del content["checksum"]
    (saved / JSON_NAME).write_text(json.dumps({**content, "checksum": _checksum(content)}))
    DiffKVCache.from_pretrained(saved, model).check_integrity()
    with pytest.raises(CacheFileError, match="another model configuration"):
        DiffKVCache.from_pretrained(saved, model_of(rope_theta=5e5))


def test_another_model_is_refused_whatever_the_thresholds(model: PreTrainedModel, tmp_path: Path) -> None:
    """One threshold per layer does not fit a model with another number of layers."""
    run = started(model, LENGTHS, DiffKVConfig(alpha_high=(1.0, 2.0), alpha_low=(0.5, 0.0)))
    run.cache.save_pretrained(tmp_path)
    with pytest.raises(CacheFileError):
        DiffKVCache.from_pretrained(tmp_path, model_of(num_hidden_layers=3))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_truncated_files(model: PreTrainedModel, saved: Path, name: str, share: float) -> None:
    path = saved / name
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(CacheFileError):
        DiffKVCache.from_pretrained(saved, model)


@pytest.mark.parametrize("version, words", [(5, "upgrade"), (1000, "upgrade"), (0, "again"), ("x", ""), (None, "")])
def test_other_versions(model: PreTrainedModel, saved: Path, version: Any, words: str) -> None:
    content = json.loads((saved / JSON_NAME).read_text())
    content["format_version"] = version
    (saved / JSON_NAME).write_text(json.dumps(content))
    with pytest.raises(CacheFileError, match=words):
        DiffKVCache.from_pretrained(saved, model)


def flip(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_flipped_bit_in_the_tensors(model: PreTrainedModel, saved: Path, part: float) -> None:
    path = saved / TENSORS_NAME
    place = int(part * (path.stat().st_size - 1))
    for bit in (0, 7):
        flip(path, place, bit)
        with pytest.raises(CacheFileError):
            DiffKVCache.from_pretrained(saved, model)
        flip(path, place, bit)
    DiffKVCache.from_pretrained(saved, model)


def test_flipped_bits_in_the_description(model: PreTrainedModel, saved: Path) -> None:
    """The bit may be anywhere in the JSON: it is refused, or the bit was in white space and the cache is the same."""
    path = saved / JSON_NAME
    reference = DiffKVCache.from_pretrained(saved, model)
    size = path.stat().st_size
    generator = torch.Generator().manual_seed(0)
    wrong = []
    for place in torch.randperm(size, generator=generator)[:400].tolist():
        before = path.read_bytes()
        flip(path, place, place % 7)
        try:
            loaded = DiffKVCache.from_pretrained(saved, model)
        except CacheFileError:
            pass
        except Exception as error:
            wrong.append((place, before[max(0, place - 20) : place + 10], repr(error)))
        else:
            same = loaded.config == reference.config
            try:
                assert_equal_contents(loaded, reference)
            except Exception:
                same = False
            if not same:
                wrong.append((place, before[max(0, place - 20) : place + 10], "another cache"))
        path.write_bytes(before)
    assert not wrong, wrong[:10]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_configuration_is_enough(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    run = started(model, LENGTHS)
    run.cache.save_pretrained(tmp_path, model)
    loaded = DiffKVCache.from_pretrained(tmp_path, model.config)
    assert_equal_contents(loaded, run.cache)
    assert_equal_contents(DiffKVCache.from_pretrained(tmp_path, model.config, device="cpu"), run.cache)
    # it continues like the cache that was never saved
    again = run.on(loaded)
    step = tokens(4, 3)
    torch.testing.assert_close(again.steps(step), run.steps(step), rtol=0, atol=0)
    assert_equal_contents(again.cache, run.cache)


def test_a_configuration_of_another_model_is_refused(model: PreTrainedModel, saved: Path) -> None:
    with pytest.raises(CacheFileError, match="another model configuration"):
        DiffKVCache.from_pretrained(saved, model_of(num_hidden_layers=3).config)
    for other in (None, "llama", DiffKVConfig()):
        with pytest.raises(
            ValueError, match=f"model is a {type(other).__name__}; pass the model itself, or its configuration"
        ):
            DiffKVCache.from_pretrained(saved, other)
    with pytest.raises(ValueError, match="device=cpu cannot be combined with a model"):
        DiffKVCache.from_pretrained(saved, model, device="cpu")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"format_version": 1}', "\x00\x01", "[" * 10**5], ids=lambda text: text[:9]
)
def test_files_that_are_something_else(model: PreTrainedModel, saved: Path, content: str) -> None:
    (saved / JSON_NAME).write_text(content)
    with pytest.raises(CacheFileError):
        DiffKVCache.from_pretrained(saved, model)


def test_an_older_cache_in_the_folder_is_replaced(model: PreTrainedModel, saved: Path) -> None:
    run = started(model, (20, 50), CONFIG)
    run.cache.save_pretrained(saved)
    assert_equal_contents(DiffKVCache.from_pretrained(saved, model), run.cache)
