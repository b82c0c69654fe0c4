"""Trains tiny-lm from scratch on a CPU, and shows how it recalls facts with a dense and with a compressed KV cache.

    python examples/train_tiny_lm.py --output tiny-lm --minutes 20 --max-length 320
    python examples/train_tiny_lm.py --output tiny-latent --architecture latent --steps 60 --tokens 512
    python examples/train_tiny_lm.py --eval-only examples/models/tiny-lm --characters 256

A model that cannot look back has nothing to lose from a compressed cache, so the curriculum teaches looking back:
copying alone until it is exact, then recall and chained sums on short rows, then longer rows, and library source last
(see tiny_lm_data.py). The latent model is built from tiny-lm's weights and only fine-tuned (see tiny_lm_latent.py).

Training time: with `--threads 1`, on a virtual machine with 2 cores of an Intel Xeon with AMX, the first command
reached tasks at 96 characters within 6 minutes. At 601 s (step 1,244, tasks and text at 320 characters), it recalled
0.97 of 32 fresh prompts of 256 characters exactly, with both DynamicCache and DiffKV.
"""

import argparse
import copy
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import tiny_lm_data as data
import torch
from tiny_lm_latent import Pupil
from tiny_lm_optimizer import MuonWithAdamW, has_bfloat16
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import hf_diffkv  # noqa: F401  registers cache_implementation="diffkv"

BUNDLED = Path(__file__).parent / "models" / "tiny-lm"
CACHES: dict[str, dict[str, Any]] = {
    "DynamicCache": {},
    "DiffKV": {"cache_implementation": "diffkv", "cache_config": {"alpha_high": 1.0, "alpha_low": 0.0}},
}


@dataclass(frozen=True)
class Stage:
    """Tasks with their shares, the row length, and the fraction of the run by which the stage must end."""

    name: str
    tasks: dict[data.Task, float]
    length: int
    deadline: float


def make_stages(max_length: int) -> list[Stage]:
    """Copying, then recall and chains at growing lengths, then the same with text."""
    tasks = {data.recall: 0.5, data.chain: 0.4, data.copying: 0.1}
    lengths = [*(n for n in (96, 160, 320, 640) if n < max_length), max_length]
    stages = [Stage("copying", {data.copying: 1.0}, min(64, max_length), deadline=0.4)]
    for i, length in enumerate(lengths, start=1):
        stages.append(Stage("tasks", tasks, length, deadline=0.4 + 0.4 * i / len(lengths)))
    text = {data.recall: 0.4, data.chain: 0.25, data.copying: 0.05, data.library: 0.3}
    return [*stages, Stage("tasks and text", text, max_length, deadline=1.0)]


@dataclass
class Curriculum:
    """Progress of the run: its stage, its clock, tokens per step, and accuracy on predictable characters."""

    stages: list[Stage]
    seconds: float
    tokens: int = 2048
    index: int = 0
    started: float = field(default_factory=time.monotonic)
    accuracies: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]

    @property
    def progress(self) -> float:
        """Fraction of the time budget spent."""
        return min(1.0, (time.monotonic() - self.started) / self.seconds)

    @property
    def accuracy(self) -> float:
        """Mean over recent steps; every batch is fresh, so no separate validation set is needed."""
        return sum(self.accuracies) / max(1, len(self.accuracies))

    def advance(self) -> bool:
        """Moves to the next stage if this one is learnt or out of time."""
        learnt = len(self.accuracies) == self.accuracies.maxlen and self.accuracy > 0.95
        if self.index + 1 == len(self.stages) or not (learnt or self.progress > self.stage.deadline):
            return False
        self.index += 1
        self.accuracies.clear()
        return True

    def batches(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yields endless batches of the current stage, each with about the same number of tokens."""
        rng = random.Random(seed)
        while True:
            length = self.stage.length
            rows = [
                data.row(rng, self.stage.tasks, length) for _ in range(max(self.tokens // 170, self.tokens // length))
            ]
            yield {"input_ids": [ids for ids, _ in rows], "weights": [weights for _, weights in rows]}


def make_dataset(curriculum: Curriculum, seed: int) -> datasets.IterableDataset:
    """A stream whose examples are whole batches, because the number of rows depends on the stage."""
    return datasets.IterableDataset.from_generator(curriculum.batches, gen_kwargs={"seed": seed})


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Weighted mean cross-entropy of the next characters, and the accuracy on predictable ones."""
    logits, targets, weights = logits[:, :-1].float(), ids[:, 1:], weights[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    correct = (logits.argmax(-1) == targets)[weights == data.PREDICTABLE]
    return (losses * weights).sum() / weights.sum(), correct.float().mean().item()


class TinyTrainer(Trainer):
    """Trainer whose loss uses the weight of each character."""

    def __init__(self, *args: Any, curriculum: Curriculum, pupil: Pupil | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.curriculum = curriculum
        self.pupil = pupil

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], use_cache=False)
        loss, accuracy = weighted_loss(outputs.logits, inputs["input_ids"], inputs["weights"])
        self.curriculum.accuracies.append(accuracy)
        if self.pupil is not None:
            loss = self.pupil.loss(outputs.logits, inputs["input_ids"], inputs["weights"])
        return (loss, outputs) if return_outputs else loss


def exact_recall(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: str, prompts: int, characters: int, seed: int
) -> float:
    """Share of fresh prompts for which `model.generate` returns exactly the four-digit answer."""
    rng = random.Random(seed)
    questions, answers = zip(*(data.recall_prompt(rng, characters) for _ in range(prompts)), strict=True)
    right = 0
    for start in range(0, prompts, 16):
        inputs = tokenizer(list(questions[start : start + 16]), return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False, **CACHES[cache])
        generated = tokenizer.batch_decode(output[:, characters:])
        right += sum(text == answer for text, answer in zip(generated, answers[start : start + 16], strict=True))
    return right / prompts


def inference_copy(model: torch.nn.Module) -> PreTrainedModel:
    """The model as it is saved: in bfloat16, without the training wrappers."""
    # A separate config, because generating through DiffKV changes the attention that the config names.
    config = copy.deepcopy(model.config)
    # Trainer turns off the cache.
    config.use_cache = True
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


class Teacher(TrainerCallback):
    """Advances the curriculum, shows progress in time rather than steps, and reports recall during generation."""

    def __init__(
        self, curriculum: Curriculum, tokenizer: PreTrainedTokenizerBase, characters: int, reports: int, output: Path
    ) -> None:
        self.curriculum = curriculum
        self.tokenizer = tokenizer
        self.characters = characters
        self.reports = reports
        self.output = output
        self.reported = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.curriculum.started = time.monotonic()
        self.bar = tqdm(total=round(self.curriculum.seconds), unit="s", mininterval=1.0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: PreTrainedModel, **_: Any
    ) -> None:
        progress, stage = self.curriculum.progress, self.curriculum.stage
        place = f"step {state.global_step}, {stage.name} at {stage.length}: predicted {self.curriculum.accuracy:.3f}"
        self.bar.set_postfix_str(place, refresh=False)
        self.bar.update(round(progress * self.bar.total) - self.bar.n)
        if self.curriculum.advance() or progress * self.reports >= self.reported + 1:
            self.reported = int(progress * self.reports)
            recall = self.recall(model)
            seconds = progress * self.curriculum.seconds
            self.bar.write(f"{seconds:.0f} s, {place}; recall at {self.characters} characters: {recall}")
        control.should_training_stop = control.should_training_stop or progress >= 1.0

    def recall(self, model: PreTrainedModel) -> str:
        twin = inference_copy(model)
        twin.save_pretrained(self.output)
        self.tokenizer.save_pretrained(self.output)
        if not has_bfloat16():
            twin.float()
        scores = {name: exact_recall(twin, self.tokenizer, name, 32, self.characters, seed=0) for name in CACHES}
        return ", ".join(f"{name} {score:.2f}" for name, score in scores.items())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bar.close()


def train(
    output: Path,
    minutes: float,
    max_length: int = 320,
    seed: int = 0,
    max_steps: int = 10**6,
    architecture: str = "llama",
    tokens: int = 2048,
) -> None:
    """Trains for `minutes` (or `max_steps`) and saves model and tokenizer in `output`, also at every report."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    # At these lengths, eager attention's backward pass is faster on a CPU than the fused kernel's.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    pupil = None
    if architecture == "latent":
        curriculum = Curriculum(make_stages(max_length)[-1:], seconds=60 * minutes, tokens=tokens)
        text = torch.tensor(next(curriculum.batches(seed + 1))["input_ids"])
        pupil = Pupil(AutoModelForCausalLM.from_pretrained(BUNDLED, **options), text)
        model = pupil.model
    else:
        curriculum = Curriculum(make_stages(max_length), seconds=60 * minutes, tokens=tokens)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BUNDLED), **options)
    optimizer = MuonWithAdamW(model)

    def rate(step: int) -> float:
        if pupil is not None:
            return 0.3 * min(1.0, (step + 1) / 10) * (1.0 - max(curriculum.progress, step / max_steps))
        return min(1.0, (step + 1) / 50) * (0.05 + 0.95 * min(1.0, 2.2 * (1.0 - curriculum.progress)))

    trainer = TinyTrainer(
        model,
        TrainingArguments(
            output_dir=str(output),
            max_steps=max_steps,
            per_device_train_batch_size=1,
            bf16=has_bfloat16(),
            use_cpu=True,
            seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            accelerator_config={"dispatch_batches": False},
        ),
        data_collator=lambda examples: {name: torch.tensor(value) for name, value in examples[0].items()},
        train_dataset=make_dataset(curriculum, seed),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)),
        callbacks=[Teacher(curriculum, tokenizer, max(64, int(0.8 * max_length)), reports=20, output=output)],
        curriculum=curriculum,
        pupil=pupil,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    inference_copy(model).save_pretrained(output)
    tokenizer.save_pretrained(output)


def evaluate(folder: Path, prompts: int, characters: int, seed: int) -> None:
    """Prints the exact-match recall of a saved model with each cache."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    print(f"{'cache':<14}{'characters':>12}{'prompts':>9}{'exact match':>13}")
    for cache in CACHES:
        recall = exact_recall(model, tokenizer, cache, prompts, characters, seed)
        print(f"{cache:<14}{characters:>12}{prompts:>9}{recall:>13.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--output", type=Path, help="folder to save the trained model in")
    mode.add_argument("--eval-only", type=Path, metavar="MODEL", help="folder of a saved model to evaluate")
    parser.add_argument("--architecture", choices=["llama", "latent"], default="llama", help="of the trained model")
    parser.add_argument("--minutes", type=float, default=20, help="time to train for; the schedule follows it")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    parser.add_argument("--max-length", type=int, default=320, help="longest training row in characters")
    parser.add_argument("--steps", type=int, default=10**6, help="most steps to train for")
    parser.add_argument("--tokens", type=int, default=2048, help="about as many in each training step")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of an evaluation")
    parser.add_argument("--characters", type=int, default=256, help="length of an evaluation prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.output:
        train(args.output, args.minutes, args.max_length, args.seed, args.steps, args.architecture, args.tokens)
    evaluate(args.eval_only or args.output, args.prompts, args.characters, args.seed + 1)


if __name__ == "__main__":
    main()
