"""`docs/models.md` is current, and no text family is missing from it."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from families import FAMILIES, OTHER, WRAPPERS
from packaging.version import Version
from report import DOCUMENT, FAMOUS, document, features
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    DistilBertConfig,
    GPTNeoXConfig,
    T5Config,
    XmodConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache.errors import UnsupportedModelError


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text() == document(), "run `python tests/families/report.py`"


def test_other_pages_count_the_families_alike() -> None:
    text = " ".join((DOCUMENT.parent / "features.md").read_text().split())
    for sentence in features():
        assert sentence in text, f"docs/features.md must say: {sentence}"
    said = " ".join(features())
    pages = [DOCUMENT.parents[1] / "README.md", *DOCUMENT.parent.glob("*.md")]
    for page in pages:
        for count, words in re.findall(r"(\d+) ((?:\S+ )?families)", " ".join(page.read_text().split())):
            assert page == DOCUMENT or f"{count} {words}" in said, f"{page.name}: {count} {words}"


def test_no_page_calls_a_family_refused_that_is_not() -> None:
    """Where a list in brackets has names of `FAMOUS` only; those that only newer releases run are not among them."""
    outcomes = {name: families for names, families in FAMOUS.items() for name in names.split(", ")}
    lists = 0
    for page in (DOCUMENT.parents[1] / "README.md", *DOCUMENT.parent.glob("*.md")):
        text = " ".join(page.read_text().split())
        for said in re.findall(r"attention (?:interface|code|code of its own) \(([^()]*)\)", text):
            names = re.split(r", |; ", said.partition("; before")[0])
            lists += 1
            for name in names:
                assert all(FAMILIES[family].refused for family in outcomes[name]), f"{page.name}: {name}"
    assert lists >= 2


def test_no_family_is_missing() -> None:
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if Version(transformers.__version__).release[:2] > (5, 24):
        pytest.skip("this release is newer than the list")
    assert names - set(FAMILIES) - OTHER - WRAPPERS == set()
    assert not set(FAMILIES) & (OTHER | WRAPPERS)


@pytest.mark.parametrize("config", [T5Config(), BartConfig()])
def test_encoder_decoder_models_are_refused(config: transformers.PretrainedConfig) -> None:
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        DiffKVCache(config)


@pytest.mark.parametrize("config", [BertConfig(), DistilBertConfig(), XmodConfig()])
def test_encoders_are_refused(config: transformers.PretrainedConfig) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{config.model_type} is an encoder here"):
        DiffKVCache(config)


@pytest.mark.parametrize("config", [BertConfig(is_decoder=True), GPTNeoXConfig()])
def test_decoders_are_no_encoders(config: transformers.PretrainedConfig) -> None:
    assert DiffKVCache(config).config == DiffKVConfig()


def test_encoder_decoder_generation_is_refused_before_it_runs() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation="diffkv")
