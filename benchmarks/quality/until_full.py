"""A context that grows past a fixed budget: bytes, loss, facts and step times at several lengths.

The budget is what the final preset holds at the last length, plus `--margin`. Four caches read the same text in turns:
until full (precise, then lowered), the preset from the start without a budget, tokens pruned for the same budget, and
lossless storage, whose KL is the dtype's floor. If heads were measured, the preset has a precision for each head. At
each length, copies of the caches read the next tokens, whose logits are compared with those of a dense cache that read
the same turns, and are asked for all facts stated so far. Steps of the first two are timed in turns.

    python benchmarks/quality/until_full.py --model smollm2 --lengths 256,512,1024 --output until_full.json
    python benchmarks/quality/until_full.py --plot until_full.png --output until_full.json  # plots the results

Without a model, it also prints a table.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.calibration.texts import read_pieces
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.comparison import compare_logits
from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.tasks.prompts import OBJECTS, distinct
from hf_diffkv.plot.figure import SMALL, Picture, new_figure, styled
from hf_diffkv.plot.palette import GROUPS
from hf_diffkv.running.models import load_config, load_model, resolve_model

NEXT = 64
# facts that the text states before each length
FACTS = 4
DENSE, FULL = "dense", "until full"


@dataclass(frozen=True)
class Method:
    """A cache's configuration and name; None is the dense cache."""

    name: str
    config: DiffKVConfig | None

    def cache(self, model: PreTrainedModel) -> Any:
        return DynamicCache(config=model.config) if self.config is None else DiffKVCache(model, self.config)


@dataclass(frozen=True)
class Document:
    """A text with facts.

    Attributes:
        ids: int64 [1, tokens].
        facts: question and answer of each fact, as ids, and the number of tokens after which it is stated.
    """

    ids: Tensor
    facts: list[tuple[list[int], list[int], int]]


@torch.no_grad()
def read(model: PreTrainedModel, cache: Any, ids: Tensor, turn: int = NEXT) -> Tensor:
    """Feeds ids [1, n] in turns of `turn` tokens; returns the last turn's logits, [tokens, vocabulary]."""
    model.set_attn_implementation("sdpa" if type(cache) is DynamicCache else "diffkv")
    for part in ids.split(turn, dim=1):
        logits = model(part, **passing(cache), use_cache=True).logits[0]
    return logits


def document_of(tokenizer: Any, text: Tensor, lengths: list[int], seed: int) -> Document:
    """Inserts `FACTS` facts into the tokens of a text, int64 [n], before each of the lengths."""
    rng = random.Random(f"until full/{seed}")
    words, meanings = distinct(rng, FACTS * len(lengths)), rng.sample(OBJECTS, min(len(OBJECTS), FACTS * len(lengths)))
    ids: list[int] = []
    facts, used, before = [], 0, 0
    for place, length in enumerate(lengths):
        for number in range(FACTS):
            word, meaning = words[place * FACTS + number], meanings[(place * FACTS + number) % len(meanings)]
            question = tokenizer(f"\n\nIn the old dialect, {word} means", add_special_tokens=False).input_ids
            answer = tokenizer(f" {meaning}.", add_special_tokens=False).input_ids
            end = before + (length - before) * (number + 1) // (FACTS + 1)
            more = max(0, end - len(ids) - len(question) - len(answer))
            ids += [*text[used : used + more].tolist(), *question, *answer]
            used += more
            facts.append((question, answer, len(ids)))
        more = length - len(ids)
        ids += text[used : used + more].tolist()
        used, before = used + more, length
    ids += text[used : used + NEXT].tolist()
    return Document(torch.tensor([ids], device=text.device), facts)


def answers(model: PreTrainedModel, cache: Any, document: Document, length: int) -> list[bool]:
    """Asks copies of the cache for the facts in its first `length` tokens, and returns which answers are right."""
    right = []
    for question, answer, stated in document.facts:
        if stated <= length:
            ids = torch.tensor([[*question, *answer[:-1]]], device=document.ids.device)
            found = read(model, copy.deepcopy(cache), ids)[-len(answer) :].argmax(-1).tolist()
            right.append(found == answer)
    return right


def step_times(model: PreTrainedModel, caches: list[Any], ids: Tensor, steps: int) -> list[float]:
    """Runs steps of copies of the caches in turns; returns the median seconds of each."""
    caches, seconds = [copy.deepcopy(cache) for cache in caches], [[] for _ in caches]
    for token in ids[:, :steps].split(1, dim=1):
        for cache, taken in zip(caches, seconds):
            start = time.perf_counter()
            read(model, cache, token)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[len(taken) // 8 :]) for taken in seconds]


def report(cache: Any) -> dict[str, Any]:
    """Returns what a compressed cache reports about itself."""
    memory = cache.memory()
    names = [precision for layer in memory.layers for precision in layer.precisions]
    return {
        **{"bytes": memory.compressed_bytes, "dense_bytes": memory.compressed_dense_bytes},
        **{"lowered": memory.lowered, "room": memory.room, "tokens": memory.tokens, "stores": len(cache.stores.all)},
        "precisions": {each: names.count(each) for each in sorted(set(names))},
    }


def methods(model: PreTrainedModel, ids: Tensor, options: argparse.Namespace) -> list[Method]:
    """The four caches; the budget follows from what the preset holds at the end."""
    final = DiffKVConfig.for_model(model, preset=options.preset)
    cache = DiffKVCache(model, final)
    read(model, cache, ids, options.turn)
    limit = {"preset": options.preset, "max_bytes": int(cache.memory().compressed_bytes * options.margin)}
    return [
        Method(FULL, DiffKVConfig.for_model(model, **limit)),
        Method(f"{options.preset} from the start", final),
        Method("pruned", DiffKVConfig.for_model(model, **limit, until_full=None)),
        Method("lossless", DiffKVConfig.lossless()),
    ]


def measured(
    model: PreTrainedModel, document: Document, lengths: list[int], options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Grows all caches of a document together and measures them at each length."""
    found: dict[str, list[dict[str, Any]]] = {}
    every = [Method(DENSE, None), *methods(model, document.ids, options)]
    caches = {method.name: method.cache(model) for method in every}
    seen = 0
    for length in lengths:
        reference, known = torch.zeros(0), []
        for name, cache in caches.items():
            read(model, cache, document.ids[:, seen:length], options.turn)
            logits = read(model, copy.deepcopy(cache), document.ids[:, length : length + NEXT])
            right = answers(model, cache, document, length)
            if name == DENSE:
                reference, known = logits, right
                continue
            # the last of the next tokens has no successor
            following = document.ids[0, length + 1 : length + NEXT].tolist()
            compared = compare_logits(logits[:-1], reference[:-1], following)
            entry = {"length": length, **report(cache), **{key: total / n for key, (total, n) in compared.items()}}
            entry |= {"facts": sum(a and b for a, b in zip(known, right)), "known": sum(known)}
            found.setdefault(name, []).append(entry)
            print(
                f"{name:22} {length:6} tokens {entry['bytes'] / 1e6:8.2f} MB "
                f"({entry['bytes'] / entry['dense_bytes']:.1%})  KL {entry['kl']:.5f}  facts {entry['facts']} of "
                f"{entry['known']}  {entry['precisions']}",
                flush=True,
            )
        compressed = list(caches)[1:3]
        times = step_times(model, [caches[name] for name in compressed], document.ids[:, length:], options.steps)
        for name, seconds in zip(compressed, times):
            found[name][-1]["step_seconds"] = seconds
        print(
            f"steps: {' '.join(f'{name} {1e3 * taken:.1f} ms' for name, taken in zip(compressed, times))}", flush=True
        )
        seen = length
    return found


def plot(methods: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Draws bytes and KL over the context length, as means over documents."""
    figure = new_figure(9, 3.6)
    panels = (
        ("MB held", lambda entry: entry["bytes"] / 1e6),
        ("KL of the next 64 tokens, nats", lambda entry: entry["kl"]),
    )
    for number, (label, value) in enumerate(panels):
        axis = styled(figure.add_subplot(1, 2, number + 1), "", "tokens of the context", label)
        for group, (name, documents) in zip(GROUPS, methods.items()):
            columns = list(zip(*documents))
            means = [statistics.mean(value(entry) for entry in column) for column in columns]
            lengths = [column[0]["length"] for column in columns]
            axis.plot(lengths, means, color=group.colour, marker=group.mark, markersize=4, label=name)
        if number:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=SMALL)
    Picture(figure).save(path)


def table(methods: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Markdown table: MB held, KL, facts and step milliseconds at each length, as means and sums over documents."""
    names = list(methods)
    lines = [["tokens", *(f"{name}: {what}" for name in names for what in ("MB", "KL", "facts", "ms a step"))]]
    for columns in zip(*(zip(*methods[name]) for name in names)):
        line = [f"{columns[0][0]['length']:,}"]
        for entries in columns:
            means = {key: statistics.mean(entry[key] for entry in entries) for key in ("bytes", "kl")}
            seconds = [entry["step_seconds"] for entry in entries if "step_seconds" in entry]
            facts, known = (sum(entry[key] for entry in entries) for key in ("facts", "known"))
            line += [f"{means['bytes'] / 1e6:.2f}", f"{means['kl']:.4f}", f"{facts} of {known}"]
            line.append(f"{1e3 * statistics.mean(seconds):.0f}" if seconds else "-")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, name on the Hub, or short name; without it --output is only drawn")
    parser.add_argument("--lengths", default="256,1024,2048,4096,6144,8192", help="tokens at which KL is measured")
    parser.add_argument("--preset", default="small", help="preset whose precisions are the final ones")
    parser.add_argument("--text", default="offline", help="UTF-8 file; 'offline' is Python's language reference")
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--turn", type=int, default=256, help="tokens that are read at once")
    parser.add_argument("--margin", type=float, default=1.06, help="budget over the bytes of the preset at the end")
    parser.add_argument("--steps", type=int, default=16, help="steps that are timed at each length")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument("--plot", type=Path, help="picture of the results")
    options = parser.parse_args()
    if options.model is None:
        found = json.loads(options.output.read_text())["methods"]
        print(table(found))
        if options.plot is not None:
            plot(found, options.plot)
        return
    lengths = sorted(int(length) for length in options.lengths.split(","))

    name = resolve_model(options.model)
    model = load_model(name, options.dtype, options.device).eval()
    _, tokenizer = load_config(name)
    text = tokenizer("\n\n".join(read_pieces(options.text)), return_tensors="pt").input_ids[0].to(model.device)
    needed = lengths[-1] + NEXT
    if text.numel() < options.documents * needed:
        parser.error(f"the text has {text.numel()} tokens, {options.documents} documents need {needed} each: --text")
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for number in range(options.documents):
        print(f"document {number + 1}", flush=True)
        document = document_of(tokenizer, text[number * needed :], lengths, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for method, entries in measured(model, document, lengths, options).items():
                found.setdefault(method, []).append(entries)
        if options.output is not None:
            given = {key: str(value) for key, value in vars(options).items() if key not in ("output", "plot")}
            result = {"options": given, "environment": describe_environment(model.device), "methods": found}
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
