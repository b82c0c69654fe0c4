"""TRL's GRPO with rollouts on a compressed cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_diffkv.running.models import TINY_LM

pytestmark = pytest.mark.slow
BUDGET, ROLLOUTS, NEW = 4 << 20, 4, 6


def test_rollouts_of_grpo_run_on_a_compressed_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset
    from hf_diffkv_serving.batching.manager import DiffKVBatchingManager

    held = []
    stop = DiffKVBatchingManager.stop

    def note(self: DiffKVBatchingManager, *args: Any, **options: Any) -> None:
        held.append((self.memory(), self.statistics().generated_tokens))
        stop(self, *args, **options)

    monkeypatch.setattr(DiffKVBatchingManager, "stop", note)
    model = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    attention = model.config._attn_implementation
    tokenizer = AutoTokenizer.from_pretrained(TINY_LM)
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.decode(0)
    prompts = [f"@oak={5000 + 7 * i} @elm=1177 ?oak=" for i in range(4)]
    seen: list[list[int]] = []

    def digits(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(completion_ids)
        return [float(sum(text.isdigit() for text in tokenizer.decode(ids))) for ids in completion_ids]

    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=NEW,
        max_steps=2,
        learning_rate=1e-3,
        use_transformers_continuous_batching=True,
        generation_kwargs={"cache_implementation": "diffkv", "cache_config": {"max_bytes": BUDGET}},
        bf16=False,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = trl.GRPOTrainer(model, digits, args=arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    assert len(held) == 2 and len(seen) == 2 * ROLLOUTS
    assert all(0 < memory.peak_bytes <= memory.max_bytes == BUDGET for memory, _ in held)
    assert sum(tokens for _, tokens in held) == sum(map(len, seen))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(torch.isfinite(torch.tensor(losses)))
    assert any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    # the loss is computed with the model's own attention
    assert model.config._attn_implementation == attention
