"""Models are recognised by their normalisation weights: copies, relatives, and what must not be taken for one."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy
import peft
import pytest
import torch
from measured_heads import measured
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    QuantoConfig,
)

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.calibration.queries import keep_queries, moments_on
from hf_diffkv.evaluation.tasks import Document
from hf_diffkv.heads import lookup, recognition
from hf_diffkv.heads.mark import RELATIVE, SAME, Mark
from hf_diffkv.heads.recognition import identity_of, mark_of, marks_in
from hf_diffkv.heads.sensitivity import Sensitivity
from hf_diffkv.heads.weights import model_digest, norm_name, norms_of
from hf_diffkv.planning import without_weights
from hf_diffkv.running.models import resolve_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(lookup, "_told", set())
    return tmp_path / "kept"


def trained(name: str = "llama", seed: int = 0, **options: Any) -> PreTrainedModel:
    """A tiny model whose normalisation weights vary as those of trained models do."""
    model = tiny_model(name, head_dim=64, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in norms_of(model).values():
            weight.copy_((1 + 0.3 * torch.randn(weight.shape, generator=generator)).bfloat16())
    return model


def kept(model: PreTrainedModel) -> Sensitivity:
    """Measurements of a model in the user's folder, as they are read back."""
    return Sensitivity.load(lookup.keep(measured(model)))


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def changed(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(change(weight))
    return model


def with_adapter(folder: Path, **options: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(loaded(folder), config)


FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True)
COPIES: dict[str, Callable[[Path], Any]] = {
    "float16": lambda folder: loaded(folder).half(),
    "bitsandbytes, 4 bits": lambda folder: loaded(folder, quantization_config=FOUR_BITS),
    "bitsandbytes, 8 bits": lambda folder: loaded(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True)),
    "quanto, int8": lambda folder: loaded(folder, quantization_config=QuantoConfig(weights="int8")),
    "adapter": with_adapter,
    "adapter, and norms that are trained": lambda folder: with_adapter(folder, modules_to_save=["norm"]),
    "adapter on 4 bits": lambda folder: peft.get_peft_model(
        loaded(folder, quantization_config=FOUR_BITS), peft.LoraConfig(target_modules=["q_proj"])
    ),
    "merged adapter": lambda folder: with_adapter(folder).merge_and_unload(),
    "compiled": lambda folder: torch.compile(changed(loaded(folder), lambda weight: weight * 1.0001)),
    "off by a tenth of a percent": lambda folder: changed(
        loaded(folder), lambda weight: weight * (1 + 0.001 * torch.randn_like(weight))
    ),
    "offloaded": lambda folder: accelerate.cpu_offload(loaded(folder), torch.device("cpu")),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_get_the_table(copy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = trained()
    table = kept(model)
    model.save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        copied = COPIES[copy](tmp_path / "model")
        assert lookup.measured_of(copied) == table
        assert DiffKVConfig.for_model(copied) == DiffKVConfig.for_model(model)
    assert not [record for record in caplog.records if record.name == lookup.HINTS]


@pytest.mark.parametrize("assign", [False, True], ids=["in place", "other tensors"])
def test_weights_that_come_after_the_first_cache(assign: bool) -> None:
    model = trained()
    table, small = kept(model), DiffKVCache(model, "small").config
    late = AutoModelForCausalLM.from_config(model.config)
    assert DiffKVCache(late, "small").config != small
    late.load_state_dict(model.state_dict(), assign=assign)
    assert lookup.measured_of(late) == table and DiffKVCache(late, "small").config == small


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference tensors"])
def test_weights_that_are_replaced_are_no_longer_known(inference: bool) -> None:
    with torch.inference_mode(inference):
        model = trained()
    kept(model)
    assert lookup.measured_of(model) is not None and identity_of(model) is identity_of(model)
    with torch.inference_mode(inference):
        for weight in model.parameters():
            weight.data = torch.randn_like(weight)
    assert lookup.measured_of(model) is None
    if not inference:
        kept(changed(model, torch.randn_like))
        assert lookup.measured_of(model) is not None
        changed(model, torch.randn_like)
        assert lookup.measured_of(model) is None


def test_a_gguf_files_gemma_is_rounded() -> None:
    """Such a file has one added to the weights; a reader takes it off again."""
    model = trained("gemma3_text")
    table = kept(model)
    with torch.no_grad():
        for weight in norms_of(model).values():
            weight.copy_((weight.half() + 1).float() - 1)
    assert model_digest(model) != model_digest(trained("gemma3_text"))
    assert lookup.measured_of(model) == table


def rewritten(folder: Path, name: Callable[[str], str]) -> None:
    """The files of a model with other names of tensors."""
    for path in folder.glob("*.safetensors"):
        save_file({name(key): tensor for key, tensor in load_file(path).items()}, path, {"format": "pt"})


def packed(key: str) -> str:
    """What GPTQ and AWQ call a matrix."""
    return key.replace("proj.weight", "proj.qweight")


@pytest.mark.parametrize("shards", ["50GB", "50KB"])
@pytest.mark.parametrize(
    "name",
    [
        packed,
        lambda key: key.removeprefix("model."),
        lambda key: f"language_model.{key}",
        lambda key: key.replace("model.", "model.language_model.", 1),
    ],
    ids=["packed", "no prefix", "in front", "within"],
)
def test_files_are_enough(name: Callable[[str], str], shards: str, tmp_path: Path) -> None:
    model = trained()
    lookup.keep(measured(model))
    model.save_pretrained(tmp_path / "model", max_shard_size=shards)
    rewritten(tmp_path / "model", name)
    read = without_weights(AutoConfig.from_pretrained(tmp_path / "model"))
    assert identity_of(read).digest is None and lookup.weights_known(read)
    assert DiffKVConfig.for_model(read) == DiffKVConfig.for_model(model) != DiffKVConfig.preset("balanced")


def test_files_are_read_as_from_pretrained_reads_them(tmp_path: Path) -> None:
    """A folder may have files of other models or formats beside those of the index."""
    model, other = trained(), trained(seed=1)
    lookup.keep(measured(model))
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model" / "z.safetensors")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert identity_of(without_weights(config)).mark == mark_of(model)
    # a shard that is not there, as in the Hub's cache while it is filled
    sorted((tmp_path / "model").glob("model-*.safetensors"))[0].unlink()
    assert not lookup.weights_known(without_weights(config))


def test_weights_on_disk_are_not_loaded(tmp_path: Path) -> None:
    model = trained()
    table = kept(model)
    model.save_pretrained(tmp_path / "model")
    on_disk = accelerate.disk_offload(loaded(tmp_path / "model"), tmp_path / "off", torch.device("cpu"))
    assert next(iter(norms_of(on_disk).values())).is_meta
    assert lookup.measured_of(on_disk) == table


def test_a_relative_is_used_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = trained()
    path = lookup.keep(measured(model))
    table = Sensitivity.load(path)
    keep_queries(moments_on(model, [document()]))
    torch.manual_seed(0)
    tuned = changed(trained(), lambda weight: weight + 0.05 * weight.std() * torch.randn_like(weight))
    tuned.save_pretrained(tmp_path / "tuned")
    tuned = loaded(tmp_path / "tuned")
    assert SAME < mark_of(tuned).distance(mark_of(model)) < RELATIVE
    with caplog.at_level(logging.WARNING, "hf_diffkv"):
        for preset in (None, "small"):
            assert DiffKVCache(tuned, preset).config == DiffKVConfig.for_model(model, preset=preset)
        assert DiffKVCache(loaded(tmp_path / "tuned")).stores.moments.model_digest == model_digest(model)
    (record,) = caplog.records
    assert str(path) in record.getMessage() and str(tmp_path / "tuned") in record.getMessage()
    assert record.name == lookup.HINTS
    # what is measured of itself comes first
    lookup.keep(dataclasses.replace(measured(tuned), documents=3))
    assert lookup.measured_of(tuned).documents == 3 and lookup.measured_of(model) == table


def document() -> Document:
    ids = torch.randint(3, 128, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    return Document("made", tuple(ids))


STRANGERS: dict[str, Callable[[], PreTrainedModel]] = {
    "trained apart": lambda: trained(seed=1),
    "random": lambda: tiny_model("llama", head_dim=64),
    "channels in another order": lambda: changed(trained(), lambda weight: weight.flip(-1)),
    "strongly changed": lambda: changed(trained(), lambda weight: weight + weight.std() * torch.randn_like(weight)),
    "heads of another size": lambda: trained(num_attention_heads=2, num_key_value_heads=1),
    "another type": lambda: changed(trained("mistral"), lambda weight: weight * 1.001),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_other_models_are_not_taken_for_it(stranger: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = trained()
    lookup.keep(measured(model))
    keep_queries(moments_on(model, [document()]))
    other = STRANGERS[stranger]()
    assert {name: weight.shape for name, weight in norms_of(other).items()} == {
        name: weight.shape for name, weight in norms_of(model).items()
    }
    assert lookup.measured_of(other) is None and lookup.queries_of(other) is None
    assert DiffKVCache(other).config == DiffKVConfig.preset("balanced")
    assert not caplog.records


def test_one_layer_of_many_tells_them_apart() -> None:
    model = trained(num_hidden_layers=8)
    lookup.keep(measured(model))
    with torch.no_grad():
        for name, weight in norms_of(model).items():
            if name.startswith(("layers.5", "layers.2")):
                weight.copy_(weight.flip(0))
    assert lookup.measured_of(model) is None


def test_constant_weights_identify_nothing() -> None:
    """All are 1, or 0, in a model that nobody trained."""
    for name in ("llama", "gemma3_text", "qwen3", "bloom"):
        assert mark_of(tiny_model(name, "eager")) is None
    model = tiny_model("llama", head_dim=64)
    table = kept(model)
    assert table.mark is None and lookup.measured_of(tiny_model("llama", head_dim=64)) == table
    assert lookup.measured_of(tiny_model("llama", head_dim=64, seed=2)) is None


def test_files_without_a_mark_are_found_by_the_digest(folder: Path) -> None:
    model = trained()
    path = lookup.keep(dataclasses.replace(measured(model), mark=None))
    table = Sensitivity.load(path)
    assert "mark" not in json.loads(path.read_text())
    moments = dataclasses.replace(moments_on(model, [document()]), mark=None)
    queries = keep_queries(moments)
    assert lookup.measured_of(model) == table and lookup.queries_of(model) == queries
    assert marks_in(folder, ".json") == marks_in(folder, ".safetensors") == []
    moved = changed(trained(), lambda weight: weight * 1.001)
    assert lookup.measured_of(moved) is None and lookup.queries_of(moved) is None


def test_moments_alone_are_found_by_the_mark() -> None:
    model = trained()
    path = keep_queries(moments_on(model, [document()]))
    assert lookup.queries_of(changed(trained(), lambda weight: weight * 1.001)) == path


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found there, and nothing can be written."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (lookup.FOLDER_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    model = trained()
    assert DiffKVCache(model).config.head_precisions is None
    with pytest.raises(OSError, match="hf_diffkv"):
        kept(model)


def test_a_folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be entered has nothing."""
    model = trained()
    kept(model)
    assert DiffKVCache(model).config.head_precisions is not None
    stat = os.stat

    def refused(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(folder) in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert DiffKVCache(model).config.head_precisions is None


def test_each_file_is_read_once(folder: Path) -> None:
    table = measured(trained())
    folder.mkdir()
    for number in range(100):
        dataclasses.replace(table, model_digest=f"{number:016x}", documents=number + 1).save(folder / f"{number}.json")
        os.utime(folder / f"{number}.json", (number, number))
    (folder / "damaged.json").write_text("{")
    (folder / "foreign.json").write_text('{"mark": {"kind": 3}}')
    (folder / "other.txt").write_text("")
    copied = changed(trained(), lambda weight: weight * 1.001)
    assert lookup.measured_of(copied).documents == 100
    misses = recognition._mark_in.cache_info().misses
    assert lookup.measured_of(copied).documents == 100
    assert recognition._mark_in.cache_info().misses == misses
    dataclasses.replace(measured(trained(seed=1)), documents=7).save(folder / "99.json")
    assert lookup.measured_of(copied).documents == 99
    assert lookup.measured_of(changed(trained(seed=1), lambda weight: weight * 1.001)).documents == 7


def test_the_distance() -> None:
    """Compares with NumPy on whole weights that have no more elements than are sampled."""
    config = tiny_model("llama").config
    rows = numpy.random.default_rng(0).normal(1, 0.3, (2, 5, 32)).astype("float32")
    marks = [Mark.of(config, {str(i): torch.tensor(row) for i, row in enumerate(each)}) for each in rows]
    rounded = torch.tensor(rows).bfloat16().double().numpy()
    spread = numpy.sqrt(((rounded - rounded.mean(2, keepdims=True)) ** 2).sum(2)).max(0)
    expected = numpy.sqrt(((((rounded[0] - rounded[1]) ** 2).sum(1)) / spread**2).mean())
    assert marks[0].distance(marks[1]) == pytest.approx(expected, rel=1e-5) and expected > 1
    assert marks[0].distance(marks[0]) == 0 and marks[0].distance(marks[1]) == marks[1].distance(marks[0])
    assert Mark.from_dict(json.loads(json.dumps(marks[0].to_dict()))) == marks[0]
    for text in ({}, {"kind": "0"}, {"kind": "0", "samples": "A"}, {"kind": "0", "samples": "AAAA"}, None):
        with pytest.raises(ValueError, match="mark"):
            Mark.from_dict(text)


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("model.layers.3.input_layernorm.weight", "layers.3.input_layernorm"),
        ("layers.3.self_attn.q_norm.weight", "layers.3.self_attn.q_norm"),
        ("base_model.model.model.norm.original_module.weight", "norm"),
        ("base_model.model.model.norm.modules_to_save.default.weight", None),
        ("_orig_mod.transformer.h.0.ln_1.weight", "h.0.ln_1"),
        ("transformer.ln_f.weight", "ln_f"),
        ("transformer.h.0.ln_1.bias", None),
        ("model.layers.3.self_attn.q_proj.weight", None),
        ("model.vision_tower.layers.3.layer_norm1.weight", None),
        ("model.language_model.norm.weight", "norm"),
        ("weight", None),
    ],
)
def test_names(parameter: str, expected: str | None) -> None:
    assert norm_name(parameter) == expected


@pytest.mark.slow
def test_smollm2(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = Sensitivity.load(lookup.SHIPPED / "smollm2-135m-instruct.json")
    config = AutoConfig.from_pretrained(smollm2)
    torch.manual_seed(0)
    same = {
        "folder": without_weights(config),
        "four bits": loaded(smollm2, quantization_config=FOUR_BITS, dtype=torch.bfloat16),
        "off": changed(loaded(smollm2), lambda weight: weight * (1 + 0.001 * torch.randn_like(weight))),
    }
    for name, model in same.items():
        assert lookup.measured_of(model) == table, name
        assert lookup.queries_of(model) == lookup.SHIPPED / "smollm2-135m-instruct.safetensors", name
        # weights that are off may count as a relative's
        assert not caplog.records or name == "off"
    assert [name for name, model in same.items() if identity_of(model).digest == table.model_digest] == ["folder"]
    random = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert lookup.measured_of(random) is None and lookup.queries_of(random) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_qwen(name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(resolve_model(name))
    if not folder.is_dir():
        pytest.skip("run `make models MODELS=...`")
    shipped = lookup.SHIPPED / f"{name}-instruct.json"
    model = without_weights(AutoConfig.from_pretrained(folder))
    assert lookup.measured_of(model) == Sensitivity.load(shipped)
    assert lookup.queries_of(model) == shipped.with_suffix(".safetensors")
    assert identity_of(model).digest == Sensitivity.load(shipped).model_digest and not caplog.records
    # the other size is no relative
    sizes = {path: Sensitivity.load(path).mark for path in lookup.SHIPPED.glob("*.json")}
    mark = identity_of(model).mark
    assert [path for path, other in sizes.items() if mark.distance(other) <= RELATIVE] == [shipped]
