"""The custom generation folder, loaded by Transformers' own code from local folders, against plain `generate()`."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, dynamic_module_utils, set_seed

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "custom_generate"
FIELDS = {"alpha_high": 1.5, "alpha_low": 0.25, "window": 32}
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.fixture(autouse=True)
def loading_stays_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of its own for loaded code, and no network."""

    def refuse(*args: Any) -> None:
        raise AssertionError("loading a local folder reached for the network")

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def model_folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    shutil.copytree(FOLDER / "custom_generate", folder / "custom_generate")
    return folder


def prompts() -> dict[str, torch.Tensor]:
    """Two prompts of 120 and 71 tokens, padded on the left."""
    ids = torch.randint(1, 128, (2, 120), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :49], mask[1, :49] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(function: Any, *args: Any, **options: Any) -> Any:
    set_seed(5)
    common = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    return function(*args, **{**common, "do_sample": False, **options})


def assert_same(given: Any, expected: Any) -> None:
    assert torch.equal(given.sequences, expected.sequences)
    assert torch.equal(torch.stack(given.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("mode", MODES)
def test_folder_generates_as_a_cache_given_by_hand(model: PreTrainedModel, mode: str) -> None:
    dense = generate(model.generate, **prompts(), **MODES[mode])
    cache = DiffKVCache(model.config, **FIELDS)
    expected = generate(model.generate, **prompts(), **MODES[mode], **passing(cache))
    options = {"custom_generate": str(FOLDER), "trust_remote_code": True, "cache_config": FIELDS}
    given = generate(model.generate, **prompts(), **MODES[mode], **options)
    assert_same(given, expected)
    assert given.past_key_values.config == DiffKVConfig(**FIELDS)
    assert given.past_key_values.memory() == cache.memory()
    assert not torch.equal(torch.stack(given.logits), torch.stack(dense.logits))


def test_lossless_generates_as_dynamic_cache(model: PreTrainedModel) -> None:
    expected = generate(model.generate, **prompts(), **passing(DynamicCache(config=model.config)))
    options = {"custom_generate": FOLDER.as_posix(), "trust_remote_code": True}
    given = generate(model.generate, **prompts(), **options, cache_config=DiffKVConfig.lossless())
    assert torch.equal(given.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(given.logits), torch.stack(expected.logits), rtol=0, atol=1e-4)


def test_next_turn_continues_the_cache(model: PreTrainedModel) -> None:
    options = {"custom_generate": str(FOLDER), "trust_remote_code": True}
    turn = prompts()["input_ids"][:1]
    by_hand = DiffKVCache(model.config, **FIELDS)
    expected = generate(model.generate, turn, **passing(by_hand))
    given = generate(model.generate, turn, cache_config=FIELDS, **options)
    cache = given.past_key_values
    longer = torch.cat([given.sequences, turn[:, :30]], dim=1)
    given = generate(model.generate, longer, **passing(cache), **options)
    assert given.past_key_values is cache
    assert_same(given, generate(model.generate, longer, **passing(by_hand)))
    assert expected.past_key_values.get_seq_length() == cache.get_seq_length()


def test_model_folder_brings_its_own_generate(model: PreTrainedModel, model_folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=True)
    expected = generate(model.generate, **prompts(), **passing(DiffKVCache(model.config, **FIELDS)))
    assert_same(generate(loaded.generate, **prompts(), cache_config=FIELDS), expected)
    inputs = prompts()
    positional = generate(
        loaded.generate, inputs["input_ids"], attention_mask=inputs["attention_mask"], cache_config=FIELDS
    )
    assert_same(positional, expected)
    dense = generate(model.generate, **prompts(), **passing(DynamicCache(config=model.config)))
    lossless = generate(loaded.generate, **prompts(), cache_config=DiffKVConfig.lossless().to_dict())
    assert torch.equal(lossless.sequences, dense.sequences)


def test_model_folder_generates_as_usual_without_trust(model: PreTrainedModel, model_folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model_folder)
    given = generate(loaded.generate, **prompts())
    assert type(given.past_key_values) is DynamicCache
    assert_same(given, generate(model.generate, **prompts()))


def test_untrusted_folder_is_not_run(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(model.generate, **prompts(), custom_generate=str(FOLDER), trust_remote_code=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda config: {"cache_implementation": "static"}, "cache_implementation='static' contradicts"),
        (lambda config: passing(DynamicCache(config=config)), "cache is a DynamicCache"),
        (lambda config: {**passing(DiffKVCache(config)), "cache_config": FIELDS}, "leave cache_config out"),
        (lambda config: {"cache_config": {"alpha": 1}}, "alpha"),
    ],
)
def test_contradictions_are_refused(model: PreTrainedModel, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(
            model.generate, **prompts(), custom_generate=str(FOLDER), trust_remote_code=True, **options(model.config)
        )
    assert model.config._attn_implementation != "diffkv"


def test_readme_example_recalls_the_fact(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["answer"] == "9082"
    assert "dense" in capsys.readouterr().out


def test_readme_carries_the_hub_metadata() -> None:
    yaml = pytest.importorskip("yaml")
    metadata = yaml.safe_load((FOLDER / "README.md").read_text().split("---\n")[1])
    assert metadata["library_name"] == "transformers" and "custom_generate" in metadata["tags"]
