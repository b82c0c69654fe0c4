"""Measures, on a model, what the paper's differentiated compression is based on (DiffKV, figures 2, 4 and 5).

Results, per layer and KV head, are the spread of significance over the tokens, the spread of value norms, and the share
of tokens that hold most of the significance. Significance is the mean attention that a token receives from later
queries, maximised over the query heads of the group.

    python benchmarks/quality/attention.py --model smollm2 --output benchmarks/results/quality/attention
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv.compat import passing
from hf_diffkv.evaluation.environment import describe_environment
from hf_diffkv.evaluation.tasks import get_task
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.plot.figure import SMALL, Picture, new_figure, styled
from hf_diffkv.plot.palette import GROUPS
from hf_diffkv.running.models import resolve_model

TASKS = ("text", "dictionary", "key-value", "passage")
# share of a head's significance that its critical tokens hold together
COVERED = 0.95
# newest tokens, which few queries have attended to
UNJUDGED = 64
# size of a figure, in inches
WIDTH, HEIGHT = 7.5, 3.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    path = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="eager").eval()
    options.output.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in tqdm(TASKS, unit="prompt"):
        document = get_task(name).documents(Source(tokenizer, 1, options.tokens))[0]
        lines += [{"task": name, **head} for head in measure(model, document.context)]
    settings = {"model": options.model, "tokens": options.tokens, **describe_environment(model.device)}
    results = options.output / "heads.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in [settings, *lines]))
    plot_spread(lines, options.output / "spread.png")
    plot_critical(lines, options.output / "critical.png")
    print(f"Wrote {results}, spread.png and critical.png.")


@torch.no_grad()
def measure(model: Any, ids: tuple[int, ...]) -> list[dict[str, Any]]:
    """One dictionary per layer and KV head."""
    cache = DynamicCache(config=model.config)
    output = model(torch.tensor([ids]), **passing(cache), output_attentions=True, logits_to_keep=1)
    heads = []
    for layer_idx, (attention, layer) in enumerate(zip(output.attentions, cache.layers)):
        significance = mean_received(attention[0].float(), layer.keys.shape[1])[:, :-UNJUDGED]
        norms = layer.values[0].float().norm(dim=-1)[:, :-UNJUDGED]
        for head, (received, norm) in enumerate(zip(significance.numpy(), norms.numpy())):
            heads.append(
                {
                    "layer": layer_idx,
                    "head": head,
                    "significance": np.percentile(received, [5, 25, 50, 75, 95, 100]).tolist(),
                    "value_norm": np.percentile(norm, [5, 25, 50, 75, 95, 100]).tolist(),
                    "critical": critical_share(received),
                }
            )
    return heads


def mean_received(attention: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Mean received attention float32 [num_heads, tokens] from probabilities [query_heads, tokens, tokens]."""
    tokens = attention.shape[-1]
    later = attention.tril(-1).sum(1) / (tokens - 1 - torch.arange(tokens)).clamp(min=1)
    return later.unflatten(0, (num_heads, -1)).amax(1)


def critical_share(received: np.ndarray) -> float:
    """Smallest share of the tokens that together hold `COVERED` of the attention received."""
    ordered = np.sort(received)[::-1].cumsum()
    return float((np.searchsorted(ordered, COVERED * ordered[-1]) + 1) / len(received))


def by_layer(groups: Mapping[str, Sequence[tuple[int, float]]], ylabel: str, logarithmic: bool = False) -> Picture:
    """Plots one value per head against its layer.

    Args:
        groups: (layer, value) of each head, by the name of the measured quantity.
        ylabel: label of the vertical axis.
        logarithmic: whether the vertical axis is logarithmic.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no groups, or more than there are colours.
    """
    if not 0 < len(groups) <= len(GROUPS):
        raise ValueError(f"groups has {len(groups)} entries; give 1 to {len(GROUPS)}.")
    figure = new_figure(WIDTH, HEIGHT)
    axis = styled(figure.add_subplot(), "", "layer", ylabel)
    for (name, points), style in zip(groups.items(), GROUPS):
        layers, values = zip(*points)
        axis.scatter(layers, values, s=14, alpha=0.7, linewidth=0, color=style.colour, marker=style.mark, label=name)
    axis.set(yscale="log") if logarithmic else axis.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncol=len(groups), frameon=False, fontsize=SMALL)
    return Picture(figure)


def plot_spread(lines: list[dict[str, Any]], path: Path) -> None:
    """Ratio of the 95th to the 5th percentile within each head, by layer: significance compared with value norms."""
    groups = {
        title: [(line["layer"], line[name][4] / max(line[name][0], 1e-12)) for line in lines]
        for name, title in (("significance", "significance"), ("value_norm", "value norm"))
    }
    by_layer(groups, "95th / 5th percentile of a head's tokens", logarithmic=True).save(path)


def plot_critical(lines: list[dict[str, Any]], path: Path) -> None:
    """Share of critical tokens in every head by layer, with one colour per prompt."""
    groups = {
        task: [(line["layer"], 100 * line["critical"]) for line in lines if line["task"] == task]
        for task in dict.fromkeys(line["task"] for line in lines)
    }
    by_layer(groups, f"tokens that hold {COVERED:.0%} of a head's significance, %").save(path)


if __name__ == "__main__":
    main()
