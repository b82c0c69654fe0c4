"""`DiffKVEvaluationCallback`: right figures, in the trainer's log, and a training run that does not notice it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.training import DiffKVEvaluationCallback

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "examples" / "models" / "tiny-lm")
TEXT = " ".join(f"word {i * i % 89}," for i in range(20))
PROMPTS = [TEXT, TEXT[:60], TEXT[30:150]]
CONFIG = DiffKVConfig(alpha_high=1.5, alpha_low=0.6, window=8)
STEPS = 4


def rows(count: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 128, (count, 24), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def make_trainer(model: PreTrainedModel, folder: Path, eval_dataset: Any = None, **options: Any) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        **options,
    }
    return Trainer(
        model,
        TrainingArguments(**arguments),
        train_dataset=rows(),
        eval_dataset=eval_dataset or rows(2),
        processing_class=TOKENIZER,
    )


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "eval_diffkv_agreement" in entry]


def continuations(model: PreTrainedModel, prompts: list[str], cache: Any) -> list[list[int]]:
    inputs = TOKENIZER(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, **passing(cache), max_new_tokens=16, do_sample=False)
    return output[:, inputs.input_ids.shape[1] :].tolist()


@pytest.mark.oldest
def test_figures(tmp_path: Path) -> None:
    model = tiny_model("llama")
    trainer = make_trainer(model, tmp_path)
    callback = DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=16)
    figures = callback.evaluate(model)
    dense, compressed, held = [], [], []
    for batch in (PROMPTS[:2], PROMPTS[2:]):
        cache = DiffKVCache(model.config, CONFIG)
        dense += continuations(model, batch, DynamicCache(config=model.config))
        compressed += continuations(model, batch, cache)
        held.append(cache.memory())
    pairs = [list(zip(a, b)) for a, b in zip(dense, compressed)]
    equal = sum(a == b for row in pairs for a, b in row)
    firsts = [next((i for i, (a, b) in enumerate(row) if a != b), len(row)) for row in pairs]
    assert 0 < equal < 48, "the comparison below proves nothing"
    assert figures["eval_diffkv_agreement"] == equal / 48
    assert figures["eval_diffkv_until_difference"] == sum(firsts) / 3
    sums = {name: sum(getattr(report, name) for report in held) for name in ("bytes", "payload_bytes", "dense_bytes")}
    assert {name: figures[f"eval_diffkv_{name}"] for name in sums} == sums
    assert figures["eval_diffkv_ratio"] == sums["bytes"] / sums["dense_bytes"]
    assert figures["eval_diffkv_payload_ratio"] == sums["payload_bytes"] / sums["dense_bytes"]


def test_measured_heads_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, which tell whether heads were measured, reach the cache."""
    model, asked = tiny_model("llama"), []

    class Noted(DiffKVCache):
        def __init__(self, asked_model: Any, config: DiffKVConfig | None) -> None:
            asked.append((asked_model, config))
            super().__init__(asked_model, config)

    monkeypatch.setattr("hf_diffkv.training.DiffKVCache", Noted)
    DiffKVEvaluationCallback(make_trainer(model, tmp_path), PROMPTS, max_new_tokens=2).evaluate(model)
    assert asked == [(model, None)] * 2


def test_texts_end_where_the_model_ends_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    trainer = make_trainer(model, tmp_path)
    callback = DiffKVEvaluationCallback(trainer, PROMPTS[:2], DiffKVConfig.lossless(), max_new_tokens=16)
    first, second = continuations(model, PROMPTS[:2], DynamicCache(config=model.config))
    end = first[3]
    lengths = [row.index(end) + 1 if end in row else 16 for row in (first, second)]
    for ends in (end, [end, 127]):
        model.generation_config.eos_token_id = ends
        figures = callback.evaluate(model)
        assert figures["eval_diffkv_agreement"] == 1.0
        assert figures["eval_diffkv_until_difference"] == sum(lengths) / 2 < 16


def test_a_model_that_generates_with_diffkv_by_default(tmp_path: Path) -> None:
    """The dense run must not become one with DiffKV."""
    model = tiny_model("llama")
    callback = DiffKVEvaluationCallback(make_trainer(model, tmp_path), PROMPTS, CONFIG, max_new_tokens=16)
    expected = callback.evaluate(model)
    model.generation_config.update(
        cache_implementation="diffkv", cache_config=CONFIG.to_dict(), use_cache=False, num_beams=2, do_sample=True
    )
    before = model.generation_config.to_dict()
    assert callback.evaluate(model) == expected
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize(
    "defaults",
    [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"cache_implementation": "static"},
        {"stop_strings": ["a"]},
        {"token_healing": True},
    ],
    ids=lambda defaults: next(iter(defaults)),
)
def test_a_model_with_other_ways_to_generate_by_default(defaults: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    callback = DiffKVEvaluationCallback(make_trainer(model, tmp_path), PROMPTS, CONFIG, max_new_tokens=8)
    expected = callback.evaluate(model)
    model.generation_config.update(**defaults)
    assert callback.evaluate(model) == expected


# in a training run


@pytest.mark.oldest
def test_logged_at_every_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model("llama"), tmp_path, eval_strategy="steps", eval_steps=2)
    seen: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            seen.append(logs)

    trainer.add_callback(DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=4))
    trainer.add_callback(Tracker())
    trainer.train()
    entries = logged(trainer)
    assert [entry["step"] for entry in entries] == [2, 4]
    tracked = [logs for logs in seen if "eval_diffkv_agreement" in logs]
    assert [logs["eval_diffkv_bytes"] for logs in tracked] == [entry["eval_diffkv_bytes"] for entry in entries]
    trainer.evaluate()
    assert len(logged(trainer)) == 3


@pytest.mark.oldest
def test_several_data_sets_are_one_evaluation(tmp_path: Path) -> None:
    sets = {"a": rows(2), "b": rows(2), "a_b": rows(2)}
    trainer = make_trainer(
        tiny_model("llama"),
        tmp_path,
        sets,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        metric_for_best_model="eval_diffkv_agreement",
        load_best_model_at_end=True,
    )
    trainer.add_callback(DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=4))
    trainer.train()
    entries = logged(trainer)
    assert [entry["step"] for entry in entries] == [2, 4]
    assert trainer.state.best_metric == max(entry["eval_diffkv_agreement"] for entry in entries)
    trainer.evaluate()
    trainer.evaluate(sets["b"])
    assert len(logged(trainer)) == 4


def test_logged_every_few_steps(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model("llama"), tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.add_callback(DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=2, every_steps=3))
    trainer.train()
    assert [entry["step"] for entry in logged(trainer)] == [3]


@pytest.mark.oldest
@pytest.mark.parametrize("metric", ["eval_diffkv_agreement", "diffkv_until_difference"])
def test_the_best_model_by_a_figure(metric: str, tmp_path: Path) -> None:
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(
        tiny_model("llama"), tmp_path, **steps, metric_for_best_model=metric, load_best_model_at_end=True
    )
    trainer.add_callback(DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=8))
    trainer.train()
    name = f"eval_{metric.removeprefix('eval_')}"
    found = [entry[name] for entry in logged(trainer)]
    assert len(found) == STEPS and len(set(found)) > 1
    assert trainer.state.best_metric == max(found)
    assert trainer.state.best_global_step == 1 + found.index(max(found))
    metrics = trainer.evaluate()
    assert [key for key in metrics if "diffkv" in key] == [name], "a search for hyperparameters adds up all metrics"
    with pytest.raises(ValueError, match="every_steps=2"):
        DiffKVEvaluationCallback(trainer, PROMPTS, every_steps=2)


@pytest.mark.oldest
@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["plain", "bf16"])
@pytest.mark.sampled(100)
def test_training_is_the_same_with_it(options: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, with dropout and shuffled data."""
    found = []
    for callback in (False, True):
        model = tiny_model("llama", attention_dropout=0.2)
        trainer = make_trainer(model, tmp_path, **options)
        if callback:
            trainer.add_callback(DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=4, every_steps=1))
            draw_when_generating(model)
        trainer.train()
        assert len(logged(trainer)) == STEPS * callback
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, model.state_dict()))
    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        assert torch.equal(weight, found[1][1][name]), name


def draw_when_generating(model: PreTrainedModel) -> None:
    """Makes every forward outside training use up random numbers."""

    def draw(module: PreTrainedModel, _: Any) -> None:
        if not module.training:
            torch.rand(3)

    model.register_forward_pre_hook(draw)


@pytest.mark.oldest
@pytest.mark.parametrize("attention", ["sdpa", "eager", "diffkv"])
def test_the_model_is_left_as_it_was(attention: str, tmp_path: Path) -> None:
    model = tiny_model("llama", attention).train()
    model.model.layers[1].eval()
    draw_when_generating(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    defaults = copy.deepcopy(model.generation_config)
    trainer = make_trainer(model, tmp_path)
    state = torch.get_rng_state()
    DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, max_new_tokens=4).evaluate(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == attention
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {True, False} == set(modes.values())
    assert model.generation_config == defaults
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


def test_the_model_is_left_as_it_was_after_an_error(tmp_path: Path) -> None:
    model = tiny_model("llama").train()
    trainer = make_trainer(model, tmp_path)
    callback = DiffKVEvaluationCallback(trainer, PROMPTS, DiffKVConfig(max_bytes=1))
    with pytest.raises(MemoryError):
        callback.evaluate(model)
    assert model.training and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "prompts"),
        (["a", ""], {}, "prompts"),
        ("text", {}, "prompts"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens=0"),
        (["a"], {"every_steps": 0}, "every_steps=0"),
    ],
)
def test_bad_arguments(prompts: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=message):
        DiffKVEvaluationCallback(trainer, prompts, **options)


def test_a_trainer_without_a_tokenizer(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_model("llama"), tmp_path)
    trainer.processing_class = None
    with pytest.raises(ValueError, match="processing_class"):
        DiffKVEvaluationCallback(trainer, PROMPTS)


@pytest.mark.oldest
def test_a_model_with_lora(tmp_path: Path) -> None:
    plain = tiny_model("llama")
    expected = DiffKVEvaluationCallback(make_trainer(plain, tmp_path), PROMPTS, CONFIG).evaluate(plain)
    # fresh LoRA adds nothing, so the figures must be those of the plain model
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = make_trainer(model, tmp_path)
    callback = DiffKVEvaluationCallback(trainer, PROMPTS, CONFIG, every_steps=STEPS)
    assert callback.evaluate(model.train()) == expected
    assert model.training and model.config._attn_implementation == "sdpa"
    trainer.add_callback(callback)
    trainer.train()
    assert len(logged(trainer)) == 1
