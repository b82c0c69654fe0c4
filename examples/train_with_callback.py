"""Trains tiny-lm further, and logs how a DiffKV cache performs with it.

    python examples/train_with_callback.py --output tiny-lm-further --steps 40

Every ten steps, the callback continues the same prompts with a dense cache and with DiffKV, and logs how many tokens
agree and how many bytes were held. A tracker named in `report_to` gets the same figures.
"""

import argparse
import random
from pathlib import Path

import datasets
import tiny_lm_data as data
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from hf_diffkv import DiffKVConfig
from hf_diffkv.training import DiffKVEvaluationCallback

BUNDLED = Path(__file__).parent / "models" / "tiny-lm"


def make_rows(count: int, length: int, seed: int) -> datasets.Dataset:
    rng = random.Random(seed)
    return datasets.Dataset.from_dict(
        {"input_ids": [data.row(rng, {data.recall: 1.0}, length)[0] for _ in range(count)]}
    )


def train(
    output: Path, steps: int, length: int = 256, prompts: int = 8, every_steps: int = 10
) -> list[dict[str, float]]:
    """Trains and saves; returns what the callback logged, one entry per evaluation."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-4,
            logging_steps=every_steps,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=make_rows(8 * steps, length, seed=0),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    rng = random.Random(1)
    questions = [data.recall_prompt(rng, length)[0] for _ in range(prompts)]
    config = DiffKVConfig(alpha_high=1.0, alpha_low=0.02)
    trainer.add_callback(
        DiffKVEvaluationCallback(trainer, questions, config, max_new_tokens=4, every_steps=every_steps)
    )
    trainer.train()
    trainer.save_model(output)
    return [entry for entry in trainer.state.log_history if "eval_diffkv_agreement" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to save the model in")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    train(args.output, args.steps)


if __name__ == "__main__":
    main()
