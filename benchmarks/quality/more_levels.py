"""Simulates whether more than two levels would pay: KL with several precisions by rank for each head's tokens.

The dense cache runs a prompt. Its keys and values, except for the first 4 and the last 32 tokens, are then replaced by
quantised and decoded ones, centred and rotated, and the documents of the dictionary and text tasks continue from there.
A head's tokens are ranked by significance: the mean attention from later queries, maximised over the query heads of its
group. The library's storage is not used; `bytes` is what its pages would need per token and head.

    python benchmarks/quality/more_levels.py --model smollm2 --output benchmarks/results/quality/smollm2/more_levels
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_diffkv.compat import passing
from hf_diffkv.evaluation.comparison import compare_logits
from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.tasks import get_task
from hf_diffkv.evaluation.tasks.base import Document, Source
from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.pages.layout import UNIFORM_NUMBERS, PageLayout
from hf_diffkv.precision import Precision
from hf_diffkv.running.models import load_config, load_model

SINKS, WINDOW = 4, 32
TASKS = ("dictionary", "text")


@dataclass(frozen=True)
class Levels:
    """Shares of a head's tokens, most significant first, and their precisions."""

    name: str
    shares: tuple[tuple[float, str], ...]
    by: str = "significance"

    def token_bytes(self, head_dim: int) -> float:
        """Returns the bytes of a token on narrow pages, including its sum and position if tokens are ranked."""
        numbers = {"metadata_bits": 16} if len(self.shares) > 1 else UNIFORM_NUMBERS
        found = 0.0
        for share, name in self.shares:
            precision = Precision.parse(name)
            found += share * PageLayout.build(precision, precision, head_dim, head_dim, 2, **numbers).high.token_bytes
        return found


CONFIGURATIONS = (
    Levels("one: K5V4", ((1.0, "K5V4"),)),
    Levels("one: K4V3, two key groups", ((1.0, "K4V3g2/1"),)),
    Levels("one: K4V3", ((1.0, "K4V3"),)),
    Levels("two: 20 % K5V4, K4V2", ((0.2, "K5V4"), (0.8, "K4V2"))),
    Levels("two: 10 % K8V4, K4V2", ((0.1, "K8V4"), (0.9, "K4V2"))),
    *(
        Levels(f"three: 15 % K6V4, 50 % K4V3, K3V2, by {by}", ((0.15, "K6V4"), (0.5, "K4V3"), (0.35, "K3V2")), by)
        for by in ("significance", "contribution")
    ),
    Levels("three: 10 % K6V4, 70 % K4V3, K3V2", ((0.1, "K6V4"), (0.7, "K4V3"), (0.2, "K3V2"))),
    Levels("three: 20 % K6V4, 50 % K4V2, K2V2", ((0.2, "K6V4"), (0.5, "K4V2"), (0.3, "K2V2"))),
)


def quantized(x: Tensor, bits: int, groups: int) -> Tensor:
    """Quantises between each token's and group's extremes and decodes: [..., dim]."""
    parts = x.unflatten(-1, (groups, -1))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    return (((parts - low) / scale).round() * scale + low).flatten(-2)


def significance(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Mean attention from later queries, [batch, heads, tokens]; query [batch, query_heads, tokens, dim]."""
    heads, count = key.shape[1], key.shape[2]
    grouped = query.unflatten(1, (heads, -1)).float()
    received = torch.zeros(*key.shape[:3])
    for start in range(0, count, 256):
        part = grouped[:, :, :, start : start + 256]
        logits = part @ key.float()[:, :, None].mT * scaling
        later = torch.arange(count) > torch.arange(start, start + part.shape[3])[:, None]
        received += logits.masked_fill(later, -torch.inf).softmax(-1).sum(3).amax(2)
    return received / torch.arange(count, 0, -1)


def with_levels(key: Tensor, value: Tensor, found: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Keys and values, [batch, heads, tokens, dim], as read from a cache with such levels."""
    count = key.shape[2] - WINDOW
    matrices = [rotation_matrix(part.shape[3], torch.float32, part.device) for part in (key, value)]
    offset = key.float().mean(2, keepdim=True)
    turned = [(key.float() - offset) @ matrices[0].T, value.float() @ matrices[1].T]
    if levels.by == "contribution":
        found = found * value.float().norm(dim=-1)
    rank = found[:, :, :count].argsort(-1, descending=True).argsort(-1)[..., None]
    held = [part[:, :, :count].clone() for part in turned]
    above = 0.0
    for share, name in levels.shares:
        precision = Precision.parse(name)
        chosen = rank >= int(above * count)
        for index, bits, groups in (
            (0, precision.k_bits, precision.k_groups),
            (1, precision.v_bits, precision.v_groups),
        ):
            held[index] = torch.where(chosen, quantized(turned[index][:, :, :count], bits, groups), held[index])
        above += share
    back = [held[0] @ matrices[0] + offset, held[1] @ matrices[1]]
    out = []
    for exact, decoded in zip((key, value), back):
        new = exact.clone()
        new[:, :, SINKS:count] = decoded[:, :, SINKS:].to(exact.dtype)
        out.append(new)
    return out[0], out[1]


class Simulation:
    """A model whose attention records every layer's significance while a prompt runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.found = model, {}
        AttentionInterface.register("noted", self._attend)
        AttentionMaskInterface.register("noted", sdpa_mask)
        model.set_attn_implementation("noted")

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if query.shape[2] == key.shape[2]:
            self.found[module.layer_idx] = significance(query, key, options["scaling"])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    @torch.no_grad()
    def prompt(self, document: Document) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([document.context]), **passing(cache), logits_to_keep=1)
        return cache

    @torch.no_grad()
    def logits(self, document: Document, cache: DynamicCache) -> tuple[Tensor, list[int]]:
        """Logits [positions, vocabulary] of all answers or of the continuation, and the tokens at those positions."""
        asked = [(*question, *answer) for question, answer in document.questions] or [document.continuation]
        sizes = [len(answer) for _, answer in document.questions] or [len(document.continuation) - 1]
        logits, tokens = [], []
        for text, size in zip(asked, sizes):
            output = self.model(torch.tensor([text[:-1]]), **passing(copy.deepcopy(cache)), logits_to_keep=size)
            logits.append(output.logits[0].float())
            tokens += text[-size:]
        return torch.cat(logits), tokens

    def compressed(self, cache: DynamicCache, levels: Levels) -> DynamicCache:
        other = copy.deepcopy(cache)
        for index, layer in enumerate(other.layers):
            layer.keys, layer.values = with_levels(layer.keys, layer.values, self.found[index], levels)
        return other


def write(
    options: argparse.Namespace,
    simulation_class: type[Simulation],
    configurations: Sequence[Any],
    about: Callable[[Any, int], dict[str, Any]],
) -> None:
    """Measures configurations on documents of all tasks, writes a record of each, and prints a table.

    Args:
        about: function of a configuration and head_dim that returns the first columns of its row, by title.
    """
    _, tokenizer = load_config(options.model)
    model = load_model(options.model, device="cpu")
    simulation = simulation_class(model)
    sums = {(each, name): [0.0, 0.0] for each in range(len(configurations)) for name in TASKS}
    for name in TASKS:
        task = get_task(name)
        for document in tqdm(task.documents(Source(tokenizer, options.documents, task.length)), desc=name):
            cache = simulation.prompt(document)
            dense, tokens = simulation.logits(document, cache)
            for each, configuration in enumerate(configurations):
                logits, _ = simulation.logits(document, simulation.compressed(cache, configuration))
                for index, value in enumerate(compare_logits(logits, dense, tokens)["kl"]):
                    sums[each, name][index] += value
    rows = []
    for each, configuration in enumerate(configurations):
        kl = {f"{name}_kl": sums[each, name][0] / sums[each, name][1] for name in TASKS}
        rows.append({**about(configuration, model.config.head_dim), **kl})
    settings = {"model": options.model, "documents": options.documents, **describe_environment(model.device)}
    options.output.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in [settings, *rows])
    (options.output / "records.jsonl").write_text(text)
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    names = [name.replace("_kl", ": KL") for name in rows[0]]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for row in rows:
        cells = [
            f"{x:.4f}" if name.endswith("_kl") else f"{x:.1f}" if name == "bytes" else x for name, x in row.items()
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=2, help="of each task (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    write(
        options,
        Simulation,
        CONFIGURATIONS,
        lambda levels, head_dim: {"levels": levels.name, "bytes": levels.token_bytes(head_dim)},
    )


if __name__ == "__main__":
    main()
