"""Memory and time of GRPO rollouts in TRL, with Transformers' pages and with a compressed cache.

    python benchmarks/grpo.py [--model smollm2] [--steps 2]

With both, all rollouts of a step run at once. Transformers' page pool is just large enough for that; for the compressed
cache, all bytes are counted, including windows, tables and scratch. Without --model, the random Llama of `serving.py`
is used, whose rewards are meaningless.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from serving import RANDOM, model_of
from serving_engines import PAGE_TOKENS, dense_bytes, held_bytes
from transformers import AutoTokenizer
from transformers.generation.continuous_batching import ContinuousBatchingManager
from trl import GRPOConfig, GRPOTrainer

from hf_diffkv.running.models import load_model, resolve_model

FACTS = (
    "The door code is {}. ",
    "The sea was calm and the gulls were loud. ",
    "What is the door code? The door code is ",
)
NAMES = ("Transformers, paged", "DiffKV, balanced", "DiffKV, small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hub id, folder or short name")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--filler", type=int, default=60, help="sentences of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of a rollout")
    options = parser.parse_args()
    print("| rollouts on | at once | MB of cache | of Transformers' | seconds a rollout phase | mean reward |")
    print("|---|---|---|---|---|---|")
    first = 0
    for name in NAMES:
        found = train(name, options)
        first = first or found["bytes"]
        share, seconds = found["bytes"] / first, found["seconds"]
        print(
            f"| {name} | {found['most']} | {found['bytes'] / 1e6:.1f} | {share:.3f} | {seconds:.1f} | "
            f"{found['reward']:.2f} |",
            flush=True,
        )


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains some steps; returns the most rollouts at once, most bytes, mean seconds of generation, and mean reward."""
    model = model_of(RANDOM, torch.bfloat16) if options.model is None else load_model(options.model, "bfloat16", "cpu")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(options.model or "tiny-lm"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.eos_token or tokenizer.decode(0)
    fact, filler, question = FACTS
    prompts = [fact.format(5000 + 7 * i) + filler * options.filler + question for i in range(options.steps)]
    longest = max(len(tokenizer(prompt).input_ids) for prompt in prompts) + options.new
    rewards, phases, most, size = [], [], 0, 0

    def right(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        given = [float(prompt[17:21] in text) for prompt, text in zip(prompts, completions)]
        rewards.extend(given)
        return given

    step, stop = ContinuousBatchingManager._generation_step, ContinuousBatchingManager.stop

    def counted(self: Any) -> None:
        nonlocal most
        step(self)
        most = max(most, len(self.batch_processor.scheduler.active_requests))

    def measured(self: Any, *arguments: Any, **others: Any) -> None:
        nonlocal size
        size = max(size, held_bytes(self))
        stop(self, *arguments, **others)

    batching: dict[str, Any] = {"max_batch_tokens": 8192, "max_requests_per_batch": options.rollouts, "seed": 0}
    pages = options.rollouts * -(-longest // PAGE_TOKENS)
    generation: dict[str, Any] = {}
    if name == NAMES[0]:
        # two of its blocks are never handed out
        batching |= {"page_size": PAGE_TOKENS, "num_blocks": pages + 2}
    else:
        fields = {"preset": name.split(", ")[1], "max_bytes": pages * PAGE_TOKENS * dense_bytes(model)}
        generation = {"cache_implementation": "diffkv", "cache_config": fields}
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.rollouts,
            num_generations=options.rollouts,
            max_completion_length=options.new,
            max_steps=options.steps,
            learning_rate=1e-6,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config=batching,
            generation_kwargs=generation,
            bf16=True,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
        trainer = GRPOTrainer(model, right, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        generate = model.generate_batch

        def timed(*given: Any, **others: Any) -> Any:
            began = time.perf_counter()
            outputs = generate(*given, **others)
            phases.append(time.perf_counter() - began)
            return outputs

        model.generate_batch = timed
        ContinuousBatchingManager._generation_step, ContinuousBatchingManager.stop = counted, measured
        try:
            trainer.train()
        finally:
            ContinuousBatchingManager._generation_step, ContinuousBatchingManager.stop = step, stop
    mean = sum(rewards) / len(rewards)
    return {"most": most, "bytes": size, "seconds": sum(phases) / len(phases), "reward": mean}


if __name__ == "__main__":
    main()
