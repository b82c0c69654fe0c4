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
from hf_diffkv.calibration.heads import mean_kl
from hf_diffkv.calibration.replay import Replay, sampled_tokens, watched_attention, watching
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


@torch.no_grad()
def losses(model: Any) -> tuple[Tensor | None, list[float]]:
    """The tokens that logits were computed of, and what the heads of the second layer lose."""
    inner = getattr(model, "model", None) if isinstance(model, Shifted) else model
    with watching(inner):
        replay = Replay(model, document().context, document().continuation, COUNTED, 4)
        figures = heads_module.layer_figures(replay, 1)
    return replay.tokens, figures["keys"] + figures["values"]


def sampling(patch: pytest.MonkeyPatch) -> None:
    """Lowers the number of likely tokens, so that a small vocabulary is sampled."""
    patch.setattr(replay_module, "MOST_LIKELY", 4)
    patch.setattr(replay_module, "OTHERS_STEP", 3)


@torch.no_grad()
def test_sampled_tokens_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model("llama", num_hidden_layers=3), document()
    with watching(model):
        whole = Replay(model, given.context, given.continuation, COUNTED, 4)
        sampling(monkeypatch)
        few = Replay(model, given.context, given.continuation, COUNTED, 4)
        keys, values = (0.9 * tensor.repeat(4, 1, 1, 1) for tensor in (whole.layers[1].keys, whole.layers[1].values))
        expected, found = whole.damaged(1, keys, values), few.damaged(1, keys, values)
    assert whole.tokens is None and few.tokens is not None and len(few.tokens) <= 64
    torch.testing.assert_close(found, expected[..., few.tokens])
    torch.testing.assert_close(few.logits, whole.logits[:, few.tokens])
    head = model.get_output_embeddings()
    assert "forward" not in vars(head) and head.weight.shape[0] == 128


def test_logits_that_the_model_changes_by_token_are_all_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Shifted(tiny_model("llama", num_hidden_layers=3))
    _, expected = losses(model)
    sampling(monkeypatch)
    tokens, found = losses(model)
    assert tokens is None and found == expected


@pytest.mark.parametrize("size", [0.01, 0.1, 0.5])
def test_sampled_tokens_tell_what_all_do(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(32, 60_000, generator=generator)
    # unlikely tokens gain, as where a damaged head makes other tokens likely
    other = logits + size * (torch.randn(32, 60_000, generator=generator) - 0.2 * logits)
    sampled = sampled_tokens(logits.softmax(-1))
    assert sampled is not None
    tokens, counts = sampled
    assert len(tokens.unique()) == len(tokens) < 30_000 and float(counts.sum()) == pytest.approx(60_000)
    found = mean_kl(logits[:, tokens], (logits[:, tokens] + counts.log()).softmax(-1), other[:, tokens])
    p, q = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    assert found == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02)


def test_likely_tokens_are_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "MOST_LIKELY", 400)
    probabilities = (8 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))).softmax(-1)
    sampled = sampled_tokens(probabilities)
    assert sampled is not None
    assert (probabilities[:, sampled[0][sampled[1] == 1]].sum(-1) >= 0.999).all()


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
