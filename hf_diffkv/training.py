"""Evaluates a DiffKV cache during training. It is imported only on request, as it needs the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .cache.diffkv_cache import DiffKVCache
from .cache.switching import set_attention
from .compat import attention_of, passing
from .config import DiffKVConfig
from .evaluation.comparison import Agreement

EVALUATED_FIGURES = ("agreement", "until_difference", "bytes", "payload_bytes", "dense_bytes", "ratio", "payload_ratio")
# replaces options of a generation config that ask for another kind of decoding, output or cache
PLAIN_DECODING = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "return_dict_in_generate": False,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "stop_strings": None,
    "token_healing": False,
}


class DiffKVEvaluationCallback(TrainerCallback):
    """Trainer callback that generates with a dense cache and with DiffKV, and logs how well the texts agree.

    Decoding is greedy and ignores stop strings. The figures are logged with `trainer.log`, so they appear in
    `log_history` and reach every tracker:

    - `eval_diffkv_agreement`: share of positions with the same token.
    - `eval_diffkv_until_difference`: number of tokens before the first difference, averaged over the prompts.
    - `eval_diffkv_bytes`, `eval_diffkv_payload_bytes`, `eval_diffkv_dense_bytes`: bytes as in `MemoryReport` at the end
      of generation, summed over batches.
    - `eval_diffkv_ratio`, `eval_diffkv_payload_ratio`: the first two divided by the dense bytes.

    `metric_for_best_model` may name one of them. Callbacks that read it, such as `EarlyStoppingCallback`, must be added
    after this one. Training is otherwise unaffected: all modules' modes, the attention implementation, gradients and
    random state are restored. Every process generates. Models with sharded weights (FSDP, ZeRO-3) are untested.

    Args:
        trainer: trainer to add it to, with `trainer.add_callback(DiffKVEvaluationCallback(trainer, prompts))`.
        prompts: texts to continue.
        config: configuration of the cache; None uses `DiffKVConfig.for_model(model)`, including measured heads.
        max_new_tokens: maximum number of generated tokens per prompt.
        every_steps: number of optimizer steps between evaluations; None evaluates whenever the trainer does, but only
            once if it has a dict of data sets.

    Raises:
        ValueError: `trainer` is not a `Trainer` or has no tokenizer that can pad, there are no prompts or one is empty,
            a number is below 1, or `metric_for_best_model` names a figure and `every_steps` is given.
    """

    def __init__(
        self,
        trainer: Trainer,
        prompts: Sequence[str],
        config: DiffKVConfig | None = None,
        *,
        max_new_tokens: int = 32,
        every_steps: int | None = None,
    ) -> None:
        if isinstance(prompts, str) or not prompts or not all(prompts):
            raise ValueError("prompts must be a list of texts, at least one and none of them empty.")
        for name, number in (("max_new_tokens", max_new_tokens), ("every_steps", every_steps)):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} must be at least 1.")
        if not isinstance(trainer, Trainer):
            raise ValueError(f"trainer is a {type(trainer).__name__}; pass the Trainer that it is added to.")
        tokenizer = trainer.processing_class
        if getattr(tokenizer, "pad_token_id", None) is None:
            raise ValueError(
                "the prompts need a tokenizer with a pad token: pass processing_class=tokenizer to the Trainer, and "
                "set tokenizer.pad_token if it is missing."
            )
        if every_steps is not None and _wanted(trainer.args) is not None:
            raise ValueError(
                f"metric_for_best_model={trainer.args.metric_for_best_model!r} is needed at every evaluation of the "
                f"trainer; leave every_steps={every_steps} out."
            )
        self.trainer = trainer
        self.prompts = list(prompts)
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.every_steps = every_steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: PreTrainedModel, **_: Any
    ) -> None:
        if self.every_steps is not None and state.global_step % self.every_steps == 0:
            self._log(control, self.evaluate(model))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self.every_steps is not None or self._is_further(metrics or {}):
            return
        figures = self.evaluate(model)
        self._log(control, figures)
        wanted = _wanted(args)
        if wanted is not None and metrics is not None:
            # the trainer looks for the figure in this dict, its own; a hyperparameter search adds up everything in it
            metrics[wanted] = figures[wanted]

    def _is_further(self, metrics: dict[str, float]) -> bool:
        """Returns whether `metrics` belong to the second or a later data set of the same evaluation."""
        sets = self.trainer.eval_dataset
        names = list(sets)[1:] if isinstance(sets, dict) else []
        return any(f"eval_{name}_runtime" in metrics for name in names)

    def _log(self, control: TrainerControl, figures: dict[str, float]) -> None:
        due = control.should_log
        self.trainer.log(figures)
        # the trainer takes any log for its own and would not log this step's loss
        control.should_log = due

    def evaluate(self, model: PreTrainedModel) -> dict[str, float]:
        """Returns the figures by the names under which they are logged."""
        dense, compressed = [], []
        counted = {"bytes": 0, "payload_bytes": 0, "dense_bytes": 0}
        size = self.trainer.args.per_device_eval_batch_size
        with evaluation_mode(model):
            for start in range(0, len(self.prompts), size):
                batch = self.prompts[start : start + size]
                dense += self._generate(model, batch, {"cache_implementation": "dynamic"})
                cache = DiffKVCache(model, self.config)
                compressed += self._generate(model, batch, passing(cache))
                report = cache.memory()
                for name in counted:
                    counted[name] += getattr(report, name)
        total = Agreement.of(dense, compressed)
        alone = [Agreement.of([a], [b]).until_difference for a, b in zip(dense, compressed)]
        dense_bytes = max(1, counted["dense_bytes"])
        figures = (
            total.equal / max(1, total.tokens),
            sum(alone) / len(alone),
            *counted.values(),
            counted["bytes"] / dense_bytes,
            counted["payload_bytes"] / dense_bytes,
        )
        return {f"eval_diffkv_{name}": value for name, value in zip(EVALUATED_FIGURES, figures, strict=True)}

    def _generate(self, model: PreTrainedModel, prompts: list[str], cache: dict[str, Any]) -> list[list[int]]:
        """Returns the new token ids of each prompt, up to the one that ends the text."""
        tokenizer = self.trainer.processing_class
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=self.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            **{**PLAIN_DECODING, **cache},
        )
        ends = model.generation_config.eos_token_id
        ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        return [_until(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Puts `model` into evaluation mode within the block, and restores modes, attention and random state afterwards."""
    text_config = model.config.get_text_config(decoder=True)
    attention = attention_of(text_config)
    training = {module: module.training for module in model.modules()}
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        if attention is not None and attention_of(text_config) != attention:
            set_attention(model, attention)


def _wanted(args: TrainingArguments) -> str | None:
    """Returns the name of the figure by which the trainer chooses the best model, or None if it uses another metric."""
    name = args.metric_for_best_model or ""
    name = name if name.startswith("eval_") else f"eval_{name}"
    return name if name.removeprefix("eval_diffkv_") in EVALUATED_FIGURES else None


def _until(row: list[int], ends: set[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in ends:
            return row[: position + 1]
    return row
