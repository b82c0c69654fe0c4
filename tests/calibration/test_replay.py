"""Logits of likely tokens alone, and attention of few queries, against those of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv.cache.attention import diffkv_attention
from hf_diffkv.calibration import heads as heads_module
from hf_diffkv.calibration import replay as replay_module
from hf_diffkv.calibration.documents import POSITIONS
from hf_diffkv.calibration.heads import mean_kl
from hf_diffkv.calibration.replay import Damage, Replay, sampled_tokens
from hf_diffkv.calibration.watched import watched_attention, watching
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.tasks import Document
from tests.tiny_models import LATENT, tiny_model

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
        replay = Replay(model, document().context, document().continuation, COUNTED)
        ((figures,),) = (batch.values() for batch in heads_module.figures_of(replay, [1]))
    return replay.tokens, figures["keys"] + figures["values"]


def sampling(patch: pytest.MonkeyPatch) -> None:
    """Lowers the number of likely tokens, so that a small vocabulary is sampled."""
    patch.setattr(replay_module, "MOST_LIKELY", 4)
    patch.setattr(replay_module, "OTHERS_STEP", 3)


@torch.no_grad()
def test_sampled_tokens_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model("llama", num_hidden_layers=3), document()
    with watching(model):
        whole = Replay(model, given.context, given.continuation, COUNTED)
        sampling(monkeypatch)
        few = Replay(model, given.context, given.continuation, COUNTED)
        keys, values = (0.9 * tensor.repeat(4, 1, 1, 1) for tensor in (whole.layers[1].keys, whole.layers[1].values))
        damages = [Damage(1, keys, values)]
        expected, found = whole.damaged(damages), few.damaged(damages)
    assert whole.tokens is None and few.tokens is not None and len(few.tokens) <= 64
    torch.testing.assert_close(found, expected[..., few.tokens])
    torch.testing.assert_close(few.logits, whole.logits[:, few.tokens])
    head = model.get_output_embeddings()
    assert "forward" not in vars(head) and head.weight.shape[0] == 128


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_rows_of_several_layers_run_together(family: str) -> None:
    """Each row's logits are those of a dense cache with that row's keys and values."""
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2} if family in ("gemma3_text", "gpt_oss") else {}
    latent = family == "deepseek_v3"
    options = {**kinds, **(LATENT if latent else {}), "num_hidden_layers": 4}
    model, given = tiny_model(family, "eager", **options), document()
    with watching(model):
        replay = Replay(model, given.context, given.continuation, COUNTED)
        damages = [
            Damage(index, *(torch.cat([tensor * 0.5, tensor.roll(1, 2)]) for tensor in (layer.keys, layer.values)))
            for index, layer in enumerate(replay.layers)
        ]
        found = replay.damaged(damages)
    assert replay.joins and len(found) == 2 * len(replay.layers)
    rows = iter(found)
    indices = [index for index in range(4) if not kinds or index % 2 == 0]
    for damage in damages:
        for keys, values in zip(damage.keys, damage.values):
            cache = DynamicCache(config=model.config)
            model(torch.tensor([given.context]), **passing(cache))
            layer = cache.layers[indices[damage.layer]]
            # Transformers has latents where others have keys
            layer.keys, layer.values = (values[None], keys[None]) if latent else (keys[None], values[None])
            expected = model(torch.tensor([given.continuation]), **passing(cache)).logits[0, COUNTED]
            torch.testing.assert_close(next(rows), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_models_whose_blocks_cannot_be_joined_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model("llama", num_hidden_layers=3), document()
    block = model.model.layers[1]
    plain = block.forward
    with watching(model):
        expected = Replay(model, given.context, given.continuation, COUNTED)
        # adds the mean over all rows, so that rows are not independent
        monkeypatch.setattr(
            block, "forward", lambda hidden, **kwargs: plain(hidden, **kwargs) + 0 * hidden[5:6].sum() + hidden.mean(0)
        )
        found = Replay(model, given.context, given.continuation, COUNTED)
    assert expected.joins and not found.joins


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
