"""Loss of heads, compared with a dense cache of the cache's own tokens, and how a run is kept and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.calibration import heads as heads_module
from hf_diffkv.calibration.documents import DOCUMENT_LENGTH, POSITIONS, documents_for, recalling
from hf_diffkv.calibration.gradients import Following
from hf_diffkv.calibration.heads import measure, measure_heads
from hf_diffkv.calibration.watched import in_float32
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.tasks import Document, get_task
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.heads.sensitivity import Sensitivity
from hf_diffkv.heads.weights import model_digest
from tests.tiny_models import tiny_model

TINY_LM = Path(__file__).parents[2] / "examples" / "models" / "tiny-lm"
PROMPT, TAIL = 120, 10
COUNTED = [2, 3, 5, 8, 9]
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss"]
SLIDING = ("gemma2", "gemma3_text", "gpt_oss")


def document(tokens: int = PROMPT + TAIL) -> Document:
    ids = torch.randint(3, 128, (tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    return Document("random", tuple(ids[:PROMPT]), continuation=tuple(ids[PROMPT:]), extra={POSITIONS: COUNTED})


def measured(model: PreTrainedModel, given: Document | None = None) -> Sensitivity:
    return measure(model, [given or document()], quiet=True).sensitivity


@torch.no_grad()
def held_by_a_cache(model: PreTrainedModel, precision: Precision) -> DiffKVCache:
    fields = {"window": 32, "adaptive_rounding": True, "metadata_bits": 16, "alpha_high": 0.0}
    cache = DiffKVCache(model.config, DiffKVConfig(high=precision, low=precision, **fields))
    before = model.config._attn_implementation
    model.set_attn_implementation("diffkv")
    model(torch.tensor([document().context]), **passing(cache))
    model.set_attn_implementation(before)
    return cache


class Noting(Following):
    """Notes the keys and values whose losses are asked for."""

    asked: list[tuple[Tensor, Tensor]] = []

    def losses(self, index: int, keys: Tensor, values: Tensor) -> tuple[list[float], list[float]]:
        assert index == len(self.asked)
        self.asked.append((keys, values))
        return super().losses(index, keys, values)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_tokens_that_caches_hold(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family in SLIDING else {}
    model = tiny_model(family, "eager", num_hidden_layers=4, **options)
    monkeypatch.setattr(Noting, "asked", [])
    monkeypatch.setattr(heads_module, "Following", Noting)
    found = measured(model)
    for part, precision in ((0, Precision(3, 16)), (1, Precision(16, 2))):
        cache = held_by_a_cache(model, precision)
        assert len(Noting.asked) == len(cache.compressed_layers()) == len(found.keys) == len(found.values)
        for index, layer in enumerate(cache.compressed_layers()):
            held = cache.dequantize(layer)[part][0]
            torch.testing.assert_close(Noting.asked[index][part], held, rtol=1e-4, atol=1e-4)
    assert all(loss > 0 for figures in (found.keys, found.values) for layer in figures for loss in layer)


def test_the_head_that_matters_is_found() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            # query heads 2 and 3 read KV head 1
            outputs = layer.self_attn.o_proj.weight.view(64, 4, 16)
            outputs[:, : 2 if index == 1 else 4] = 0
    found = measured(model)
    for part in ("keys", "values"):
        losses = torch.tensor(getattr(found, part))
        assert losses[1, 1] > 1e-6
        losses[1, 1] = 0
        assert losses.abs().max() == 0


def test_errors_fall_with_every_bit() -> None:
    found = measured(tiny_model("llama"))
    for curve in (found.key_errors, found.value_errors):
        errors = list(curve.values())
        assert list(curve) == [2, 3, 4, 5, 6, 8]
        assert all(0 < more < 0.5 * fewer for fewer, more in zip(errors, errors[1:]))


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured(model)
    assert model.config._attn_implementation == "sdpa"
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name])
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())


def test_half_precision_is_measured_in_float32() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    in_half = measured(model)
    exactly = measured(model.float())
    assert in_half.keys == exactly.keys and in_half.values == exactly.values


def test_the_digest_is_of_the_weights() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    digest = model_digest(model)
    with in_float32(model):
        assert model.lm_head.weight.dtype == torch.float32 and model_digest(model) == digest
    assert model_digest(tiny_model("llama", dtype=torch.bfloat16, seed=2)) != digest
    with torch.device("meta"), pytest.raises(ValueError, match="load the model without offloading"):
        model_digest(torch.nn.Linear(3, 3))


def test_documents_are_not_those_of_the_evaluation() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    documents = documents_for(tokenizer)
    assert len({found.digest for found in documents}) == 8
    assert [found.digest for found in documents_for(tokenizer)] == [found.digest for found in documents]
    for found in documents:
        assert 0.9 * DOCUMENT_LENGTH <= len(found.context) <= DOCUMENT_LENGTH + 2
        if found.name.startswith(("text", "copy")):
            assert len(found.continuation) == 32
        assert max(found.extra[POSITIONS]) == len(found.continuation) - 1
    texts = [tokenizer.decode(found.context) for found in documents]
    for name in ("text", "dictionary", "key-value", "passage"):
        task = get_task(name)
        for scored in task.documents(Source(tokenizer, task.count, 1600)):
            text = tokenizer.decode(scored.context)
            assert not any(text[start : start + 400] in mine for mine in texts for start in range(0, len(text), 200))


def test_answers_are_predicted_from_the_tokens_before_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    document = documents_for(tokenizer)[3]
    question = tokenizer.decode(document.continuation)
    start = document.extra[POSITIONS][0]
    assert document.name == "dictionary-0" and question.startswith("\n\nIn the old dialect,")
    assert tokenizer.decode(document.continuation[: start + 1]).endswith(" means")


@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        # the fourth question's answer is the last one that is predicted within 32 tokens
        (5, 3, [4, 5, 6, 12, 13, 14, 20, 21, 22, 28, 29, 30]),
        (20, 20, list(range(19, 32))),
        # questions without end: eight tokens of answers count all the same
        (40, 3, [39, 40, 41, 82, 83, 84, 125, 126]),
    ],
)
def test_answers_follow_for_32_tokens(question: int, answer: int, expected: list[int]) -> None:
    asked = (tuple(range(question)), tuple(range(100, 100 + answer)))
    found = recalling(Document("facts", (1, 2), questions=(asked,) * 12))
    assert found.extra[POSITIONS] == expected
    assert found.continuation == ((asked[0] + asked[1]) * 12)[: expected[-1] + 1]


def run(output: Path | None = None, length: int = 900) -> Sensitivity:
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32).eval()
    return measure_heads(model, AutoTokenizer.from_pretrained(TINY_LM), length=length, output=output, quiet=True)


@pytest.fixture(scope="module")
def measured_once() -> Sensitivity:
    return run()


@pytest.mark.slow
def test_documents_of_a_model(measured_once: Sensitivity, tmp_path: Path) -> None:
    whole = measured_once
    assert whole.shapes == ((2, 64, 64),) * 6 and whole.documents == 8
    path = tmp_path / "heads.json"
    whole.save(path)
    again = Sensitivity.load(path)
    assert again.to_dict() == whole.to_dict() and again.mark == whole.mark
    assert Sensitivity.from_dict(again.to_dict()) == replace(again, mark=None)
    assert again.keys[5][1] == pytest.approx(whole.keys[5][1], rel=1e-3)


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="lower length"):
        run(length=5000)
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    with pytest.raises(EvaluationError, match="the text has"):
        measure_heads(model, AutoTokenizer.from_pretrained(TINY_LM), "short", quiet=True)
    with pytest.raises(ValueError, match="pass the model itself"):
        measure_heads(model.config, None)
