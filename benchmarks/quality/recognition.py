"""Distances of copies, relatives and other models from a model, by the marks used to find measured tables.

    python benchmarks/quality/recognition.py --models smollm2 gemma3-270m
    python benchmarks/quality/recognition.py --models smollm2 --tuned build/tuned --steps 300

The second command also fine-tunes the first model, all weights with AdamW on the source of Python's standard library,
and saves it in the folder; a model that already exists there is not trained again.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, QuantoConfig

from hf_diffkv.heads.mark import RELATIVE, SAME, Mark
from hf_diffkv.heads.recognition import mark_of
from hf_diffkv.heads.weights import norms_of
from hf_diffkv.planning import without_weights
from hf_diffkv.running.models import resolve_model

TRAINED_ON = ("argparse", "ast", "collections", "dataclasses", "difflib", "heapq", "shutil", "subprocess", "textwrap")
LENGTH, WARMUP = 64, 20
EVERY = 50
LAYER = re.compile(r"(\w+\.)(\d+)(\..+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", required=True, help="folders, ids or short names")
    parser.add_argument("--tuned", type=Path, help="folder for a fine-tune of the first model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=5e-5, help="of AdamW")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    marks = {name: _mark(without_weights(AutoConfig.from_pretrained(resolve_model(name)))) for name in options.models}
    print(f"up to {SAME}: the model; up to {RELATIVE}: a relative\n")
    if options.tuned is not None:
        first = options.models[0]
        for title, mark in _tuned(resolve_model(first), options.tuned, options.steps, options.rate):
            _show(first, title, marks[first].distance(mark))
    for name, mark in marks.items():
        for title, made in copies(resolve_model(name)):
            _show(name, title, mark.distance(made))
        for other, others in marks.items():
            if other != name:
                _show(name, other, mark.distance(others))


def copies(folder: str) -> Iterator[tuple[str, Mark]]:
    """Marks of the model in a folder at other precisions, with changed weights, and of other models of its shapes."""
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    loads: dict[str, dict[str, Any]] = {
        "float16": {"dtype": torch.float16},
        "float32": {"dtype": torch.float32},
        "bitsandbytes, 4 bits": {"quantization_config": four_bits, "dtype": torch.bfloat16},
        "bitsandbytes, 8 bits": {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.float16},
        "quanto, int8": {"quantization_config": QuantoConfig(weights="int8"), "dtype": torch.bfloat16},
    }
    for title, options in loads.items():
        yield title, _mark(AutoModelForCausalLM.from_pretrained(folder, **options))
    for title, change in CHANGES.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in norms_of(model).values() if title.startswith("norms") else model.parameters():
                weight.copy_(change(weight))
        yield title, _mark(model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    norms, layers = norms_of(model), model.config.num_hidden_layers
    values = {name: weight.detach().clone() for name, weight in norms.items()}
    with torch.no_grad():
        for name, weight in norms.items():
            layer = LAYER.match(name)
            if layer is not None:
                weight.copy_(values[f"{layer[1]}{(int(layer[2]) + 1) % layers}{layer[3]}"])
    yield "each layer's norms in the layer before", _mark(model)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "all weights off by 0.1 %": lambda weight: weight * (1 + 0.001 * torch.randn_like(weight)),
    "all weights off by 1 %": lambda weight: weight * (1 + 0.01 * torch.randn_like(weight)),
    "norms plus one, rounded to bfloat16": lambda weight: (weight + 1).bfloat16().float() - 1,
    "norms plus one, rounded to float16": lambda weight: (weight + 1).half().float() - 1,
    "norms off by half their spread": lambda weight: weight + 0.5 * weight.std() * torch.randn_like(weight),
    "norms drawn with their mean and spread": lambda weight: weight.mean() + weight.std() * torch.randn_like(weight),
    "norms in another order": lambda weight: weight[torch.randperm(weight.numel())],
}


def _tuned(source: str, folder: Path, steps: int, rate: float) -> Iterator[tuple[str, Mark]]:
    if not (folder / "config.json").is_file():
        yield from _tune(source, folder, steps, rate)
    yield "fine-tune, as saved", _mark(without_weights(AutoConfig.from_pretrained(folder)))


def _tune(source: str, folder: Path, steps: int, rate: float) -> Iterator[tuple[str, Mark]]:
    """Trains all weights, one sequence per step, and saves them in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    text = "\n\n".join(inspect.getsource(import_module(name)) for name in TRAINED_ON)
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    starts = torch.randint(len(ids) - LENGTH, (steps,), generator=torch.Generator().manual_seed(0)).tolist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step, start in enumerate(starts):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / WARMUP)
        batch = ids[None, start : start + LENGTH]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            yield f"fine-tune, {step + 1} steps at {rate:g}, loss {loss.item():.2f}", _mark(model)
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _mark(model: Any) -> Mark:
    mark = mark_of(model)
    if mark is None:
        raise SystemExit("the normalisation weights do not tell this model from others")
    return mark


def _show(name: str, title: str, distance: float) -> None:
    print(f"{name:20} {title:50} {distance:8.4f}", flush=True)


if __name__ == "__main__":
    main()
