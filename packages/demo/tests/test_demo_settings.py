"""The settings that the demo offers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_diffkv_demo.documents import QUESTIONS, chats, free_prompts
from hf_diffkv_demo.generation import Generator, InputError
from hf_diffkv_demo.page import FREE_PROMPT, entered
from hf_diffkv_demo.settings import DEFAULT, OWN, setting_of, settings_for
from measured_heads import measured
from transformers import AutoConfig, AutoModelForCausalLM

from hf_diffkv import DiffKVConfig
from hf_diffkv.heads import lookup
from hf_diffkv.running.models import TINY_LM


def test_the_demo_begins_with_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the settings of a model whose heads were measured, and of one without measurements."""
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    lookup.keep(measured(model))
    measured_ones, others = settings_for(model), settings_for(AutoConfig.from_pretrained(TINY_LM))
    for settings in (measured_ones, others):
        assert [*settings][:3] == ["quality", "balanced", "small"] and setting_of(None, settings) == "balanced"
        assert all(setting_of(name, settings) == name for name in ("quality", "balanced", "small"))
    assert measured_ones["small"].config == DiffKVConfig.for_model(model, preset="small")
    assert "measured" in measured_ones["balanced"].explanation
    assert "keys in 5 bits and values in 4" in others["balanced"].explanation
    published = AutoConfig.from_pretrained(TINY_LM)
    published._name_or_path = "Qwen/QwQ-32B"
    settings = settings_for(published)
    assert setting_of(None, settings) == DEFAULT and settings[DEFAULT].config.selects
    assert settings[setting_of("balanced", settings)].config == DiffKVConfig.preset("balanced")


def test_the_documents_ask_what_they_tell() -> None:
    talks = chats()
    assert [talk.question for talk in talks] == [*QUESTIONS]
    assert all(talk.question not in talk.document and len(talk.document) > 5000 for talk in talks)
    for facts in free_prompts(chats=False):
        key = facts.name.strip("?=")
        assert facts.document.endswith(facts.name) and f"@{key}=" in facts.document


def test_a_ratio_becomes_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(lookup.FOLDER_VARIABLE, str(tmp_path))
    generator = Generator(str(TINY_LM))
    name = generator.offer_ratio(0.3)
    assert [*generator.settings][0] == name == "ratio 0.3"
    assert generator.settings[name].config == DiffKVConfig.for_model(generator.model, target_ratio=0.3)
    with pytest.raises(InputError, match="is below what"):
        generator.offer_ratio(0.1)


def test_a_precision_that_the_page_does_not_have_is_refused() -> None:
    """A script may send what the page does not offer."""
    with pytest.raises(InputError, match="^None is not in the list of precisions"):
        entered({}, FREE_PROMPT, "", "", "", "text", 8, OWN, 1.0, 0.0, None, "K4V2", 64)
