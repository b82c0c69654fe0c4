"""Generates answers to a file of prompts on all available processes, each with a copy of the model and DiffKV caches.

    accelerate launch examples/distributed_generate.py --prompts prompts.txt --output answers.jsonl

`docs/distributed.md` has the commands for one process, several, and several machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_diffkv import DiffKVCache
from hf_diffkv.compat import passing

TINY_LM = Path(__file__).parent / "models" / "tiny-lm"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    state = PartialState(cpu=options.cpu)
    prompts = read_prompts(options.prompts)
    if state.is_main_process:
        check_output(options.output)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(state.device).eval()

    answers = []
    with state.split_between_processes(list(range(len(prompts)))) as mine:
        # a process past the last prompt is given the last prompt again
        mine = mine if state.process_index < len(prompts) else []
        batches = [mine[i : i + options.batch_size] for i in range(0, len(mine), options.batch_size)]
        title = f"process {state.process_index + 1} of {state.num_processes}"
        for batch in tqdm(batches, title, unit="batch", disable=not state.is_main_process):
            texts = [prompts[index] for index in batch]
            for index, answer in zip(batch, generate(model, tokenizer, texts, options)):
                answers.append({"index": index, "process": state.process_index, **answer})

    answers = sorted(gather_object(answers), key=lambda answer: answer["index"])
    if state.is_main_process:
        with options.output.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
        print(table(answers, state.num_processes))
        print(f"Wrote {len(answers)} answers to {options.output}.")
    state.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generates from many prompts on many processes.")
    add = parser.add_argument
    add("--model", default=str(TINY_LM), help="Hub id or folder (default: this repository's tiny-lm)")
    add("--prompts", type=Path, required=True, help='a prompt per line, or for .jsonl an object with "prompt" per line')
    add("--output", type=Path, required=True, help="JSON lines, in the order of the prompts")
    add("--max-new-tokens", type=positive, default=64)
    add("--batch-size", type=positive, default=4, help="prompts at once on each process (default: %(default)s)")
    add("--alpha-high", type=float, default=None)
    add("--alpha-low", type=float, default=None)
    add("--max-bytes", type=positive, default=None, help="budget of the cache on each device")
    add("--cpu", action="store_true", help="leave GPUs alone")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file without empty lines; exits with a message if there are none."""
    try:
        # split only at line feeds: `splitlines` also splits at characters that a text may contain, such as U+2028
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        prompts = [json.loads(line)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except OSError as error:
        sys.exit(f"cannot read --prompts {path}: {error.strerror}.")
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f'--prompts {path}: every line must be a JSON object with "prompt" ({error!r}).')
    wrong = [prompt for prompt in prompts if not isinstance(prompt, str) or not prompt]
    if wrong:
        sys.exit(f"--prompts {path} has {wrong[0]!r} as a prompt; each must be a text that is not empty.")
    if not prompts:
        sys.exit(f"--prompts {path} has no prompts.")
    return prompts


def check_output(path: Path) -> None:
    """Exits with a message if the answers cannot be written, before any are computed."""
    if path.is_dir():
        sys.exit(f"--output {path} is a folder; name a file.")
    if not path.parent.is_dir():
        sys.exit(f"--output {path}: there is no folder {path.parent}; make it first.")


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One answer per prompt: text, new tokens, and an equal share of the bytes of the batch's cache."""
    if len(prompts) > 1 and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1).to(model.device)
    fields = {name: getattr(options, name) for name in ("alpha_high", "alpha_low", "max_bytes")}
    cache = DiffKVCache(model, **{name: value for name, value in fields.items() if value is not None})
    output = model.generate(**inputs, **passing(cache), max_new_tokens=options.max_new_tokens, do_sample=False).cpu()
    new = output[:, inputs.input_ids.shape[1] :]
    memory = cache.memory()
    return [
        {
            "prompt": prompt,
            "text": tokenizer.decode(ids, skip_special_tokens=True),
            "tokens": length(ids, model.generation_config.eos_token_id),
            "cache_bytes": memory.bytes // len(prompts),
            "dense_bytes": memory.dense_bytes // len(prompts),
        }
        for prompt, ids in zip(prompts, new)
    ]


def length(ids: torch.Tensor, ends: int | list[int] | None) -> int:
    """Number of tokens up to the first end token; shorter answers in a batch are padded."""
    ended = torch.isin(ids, torch.tensor(ends if ends is not None else [], dtype=ids.dtype)).nonzero()
    return int(ended[0]) + 1 if len(ended) else len(ids)


def table(answers: list[dict[str, Any]], processes: int) -> str:
    """A table of prompts, new tokens and bytes, for every process and in total."""
    lines = [f"{'process':>8}{'prompts':>9}{'new tokens':>12}{'cache, MB':>11}{'dense, MB':>11}{'ratio':>8}"]
    for process in [*range(processes), None]:
        own = [answer for answer in answers if process in (None, answer["process"])]
        tokens, held, dense = (sum(a[name] for a in own) for name in ("tokens", "cache_bytes", "dense_bytes"))
        ratio = f"{held / dense:.1%}" if dense else "-"
        name = "all" if process is None else process
        lines.append(f"{name:>8}{len(own):>9}{tokens:>12}{held / 1e6:>11.2f}{dense / 1e6:>11.2f}{ratio:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
