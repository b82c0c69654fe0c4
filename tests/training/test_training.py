"""Training a model left on "diffkv", with LoRA and checkpointing, and `Seq2SeqTrainer` generating through DiffKV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import ragged_prompts, tiny_model
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples" / "models" / "tiny-lm")
STOCK = {"llama": "sdpa", "gpt_oss": "eager"}
FIELDS = {"alpha_high": 1.5, "alpha_low": 0.6, "window": 8}
NEW_TOKENS = 12


def with_lora(model: PreTrainedModel) -> PeftModel:
    """LoRA on queries and values, far from the zeros it starts with."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adapted


def loss_and_gradients(model: nn.Module, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids, mask = ragged_prompts((60, 31))
    # what a padding query sees is up to the implementation, so the first real token is not predicted from one
    predicted = mask.bool() & mask.roll(1, dims=1).bool()
    model.train()
    loss = model(input_ids=ids, attention_mask=mask, labels=torch.where(predicted, ids, -100), **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.oldest
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_loss_and_gradients(name: str, lora: bool, checkpointing: bool | None) -> None:
    found = []
    for attention in (STOCK[name], "diffkv"):
        model: Any = tiny_model(name, attention)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        found.append(loss_and_gradients(with_lora(model) if lora else model))
    (expected_loss, expected), (loss, gradients) = found
    torch.testing.assert_close(loss, expected_loss)
    assert expected and all(gradient is not None for gradient in gradients.values())
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "diffkv"])
def test_a_cache_given_to_checkpointed_training_stays_empty(attention: str) -> None:
    """Transformers drops it, as it drops its own caches."""
    expected_loss, expected = loss_and_gradients(tiny_model("llama"))
    model = tiny_model("llama", attention)
    model.gradient_checkpointing_enable()
    cache = DiffKVCache(model.config)
    loss, gradients = loss_and_gradients(model, **passing(cache), use_cache=True)
    assert cache.get_seq_length() == 0 and cache.memory().bytes == 0
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-5)


# generation with LoRA


def generated(model: Any, **options: Any) -> Tensor:
    ids, mask = ragged_prompts((60, 31))
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


@pytest.mark.oldest
def test_generation_with_lora() -> None:
    model = with_lora(tiny_model("llama"))
    exact = generated(model)
    with model.disable_adapter():
        assert not torch.equal(generated(model), exact)
    lossless = DiffKVConfig.lossless()
    assert torch.equal(generated(model, cache_implementation="diffkv", cache_config=lossless.to_dict()), exact)
    assert torch.equal(generated(model, **passing(DiffKVCache(model.config, lossless))), exact)
    by_name = generated(model, cache_implementation="diffkv", cache_config=FIELDS)
    assert not torch.equal(by_name, exact)
    cache = DiffKVCache(model.config, **FIELDS)
    assert torch.equal(generated(model, **passing(cache)), by_name)
    assert cache.memory().tokens["pruned"] > 0
    merged = model.merge_and_unload()
    assert torch.equal(generated(merged, **passing(DiffKVCache(merged.config, lossless))), exact)


# Seq2SeqTrainer


def trainer_for(model: PreTrainedModel, folder: Path, config: GenerationConfig | None) -> Seq2SeqTrainer:
    ids, mask = ragged_prompts((40, 40, 40, 40), seed=2)
    rows = [{"input_ids": row, "attention_mask": ones, "labels": row} for row, ones in zip(ids, mask)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        predict_with_generate=True,
        generation_config=config,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=TOKENIZER)


def chosen(fields: dict[str, Any] | None) -> GenerationConfig:
    cache = {} if fields is None else {"cache_implementation": "diffkv", "cache_config": fields}
    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **cache)


@pytest.mark.oldest
def test_predict_with_generate(tmp_path: Path) -> None:
    """Trained with evaluations in between; the predictions are those of `generate()`, and so is the loss."""
    results = {}
    choices = {"dense": None, "lossless": DiffKVConfig.lossless().to_dict(), "compressed": FIELDS}
    for name, fields in choices.items():
        model = tiny_model("llama")
        trainer = trainer_for(model, tmp_path, chosen(fields))
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2]
        results[name] = (trainer.predict(trainer.eval_dataset), model)
        assert model.config._attn_implementation == "sdpa"
    dense, model = results["dense"]
    assert np.array_equal(results["lossless"][0].predictions, dense.predictions)
    compressed, trained = results["compressed"]
    assert not np.array_equal(compressed.predictions, dense.predictions)
    ids, mask = ragged_prompts((40, 40, 40, 40), seed=2)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    for start in (0, 2):
        part = slice(start, start + 2)
        cache = DiffKVCache(trained.config, **FIELDS)
        tokens = trained.generate(ids[part], attention_mask=mask[part], **passing(cache), **options)
        assert np.array_equal(compressed.predictions[part, : tokens.shape[1]], tokens.numpy())
    for result, other in results.values():
        assert result.metrics["test_loss"] == pytest.approx(dense.metrics["test_loss"], rel=1e-4)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def test_predict_with_the_cache_named_at_the_call(tmp_path: Path) -> None:
    model = tiny_model("llama")
    trainer = trainer_for(model, tmp_path, chosen(None))
    exact = trainer.predict(trainer.eval_dataset).predictions
    lossless = {"cache_implementation": "diffkv", "cache_config": DiffKVConfig.lossless().to_dict()}
    assert np.array_equal(trainer.predict(trainer.eval_dataset, **lossless).predictions, exact)
    assert model.config._attn_implementation == "sdpa"
