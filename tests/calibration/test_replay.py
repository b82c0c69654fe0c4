"""Logits of likely tokens alone, and attention of few queries, against those of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_diffkv.cache.attention import diffkv_attention
from hf_diffkv.calibration import heads as heads_module
from hf_diffkv.calibration import replay as replay_module
from hf_diffkv.calibration.documents import POSITIONS
from hf_diffkv.calibration.replay import Replay, likely_tokens, watched_attention, watching
from hf_diffkv.evaluation.tasks import Document
from tests.tiny_models import tiny_model

COUNTED = [2, 3, 5, 8, 9]


def document() -> Document:
    ids = torch.randint(3, 128, (130,), generator=torch.Generator().manual_seed(3)).tolist()
    return Document("random", tuple(ids[:120]), continuation=tuple(ids[120:]), extra={POSITIONS: COUNTED})


class Shifted(torch.nn.Module):
    """A model whose logits are changed behind the head, each token's by another number."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.get_output_embeddings()

    def forward(self, **given: Any) -> Any:
        output = self.model(**given)
        output.logits = output.logits + 0.01 * torch.arange(128)
        return output


def peaked() -> PreTrainedModel:
    model = tiny_model("llama", num_hidden_layers=3, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(60)
    return model


@torch.no_grad()
def losses(model: Any) -> tuple[Tensor | None, list[float]]:
    """The tokens that logits were computed of, and what the heads of the second layer lose."""
    inner = getattr(model, "model", None) if isinstance(model, Shifted) else model
    with watching(inner):
        replay = Replay(model, document().context, document().continuation, COUNTED, 4)
        figures = heads_module.layer_figures(replay, 1)
    return replay.likely, figures["keys"] + figures["values"]


def few_likely(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay_module, "MOST_LIKELY", 60)
    patch.setattr(replay_module, "LIKELY_MASS", 0.999)


def test_likely_tokens_tell_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = peaked()
    none, expected = losses(model)
    few_likely(monkeypatch)
    likely, found = losses(model)
    assert none is None and likely is not None and len(likely) <= 64
    assert found == pytest.approx(expected, rel=0.02)
    assert "forward" not in vars(model.get_output_embeddings())


def test_logits_that_are_changed_behind_the_head_are_all_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Shifted(peaked())
    _, expected = losses(model)
    few_likely(monkeypatch)
    likely, found = losses(model)
    assert likely is None and found == expected


def test_likely_tokens_have_almost_all_of_the_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    few_likely(monkeypatch)
    logits = 4 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    likely = likely_tokens(logits)
    assert likely is None
    logits = 3 * logits
    likely = likely_tokens(logits)
    assert likely is not None and likely.tolist() == sorted(set(likely.tolist()))
    probabilities = logits.double().softmax(-1)
    assert (probabilities[:, likely].sum(-1) >= 0.999).all()
    for row in probabilities:
        order = row.argsort(descending=True).tolist()
        needed = next(count for count in range(1000) if float(row[order[:count]].sum()) >= 0.999)
        assert set(order[:needed]) <= set(likely.tolist())


@pytest.mark.parametrize("masked", [False, True])
def test_few_queries_attend_as_ever(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, tokens, 16, generator=generator) for heads, tokens in ((6, 5), (2, 40), (2, 40))
    )
    mask = torch.rand(1, 1, 5, 40, generator=generator) < 0.5 if masked else None
    module = torch.nn.Module()
    found, _ = watched_attention(module, query, key, value, mask, scaling=0.3)
    expected, _ = diffkv_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
