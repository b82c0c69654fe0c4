"""A context that grows through a fixed budget: bytes, and KL of the next 64 tokens to the dense cache, at some lengths.

The budget is what the final preset holds at the last length, and `--margin` more. Four caches read the same text in
turns: until full (precise, then lowered), the preset from the start without a budget, tokens pruned for the same
budget, and lossless storage, whose KL is the floor of the dtype. At each length a copy of the cache reads the next
tokens, whose logits are compared with those of a dense cache that read the same turns.

    python benchmarks/quality/until_full.py --model smollm2 --lengths 256,512,1024 --output until_full.json
"""

from __future__ import annotations

import argparse
import copy
import json
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
from hf_diffkv.running.models import load_config, load_model, resolve_model

NEXT = 64


@dataclass(frozen=True)
class Method:
    """A cache's configuration by name; None is the dense cache."""

    name: str
    config: DiffKVConfig | None

    def cache(self, model: PreTrainedModel) -> Any:
        return DynamicCache(config=model.config) if self.config is None else DiffKVCache(model, self.config)


@torch.no_grad()
def read(model: PreTrainedModel, cache: Any, ids: Tensor, turn: int) -> Tensor:
    """Feeds ids [1, n] in turns of `turn` tokens; the last turn's logits, [tokens, vocabulary]."""
    for part in ids.split(turn, dim=1):
        logits = model(part, **passing(cache), use_cache=True).logits[0]
    return logits


def grown(model: PreTrainedModel, method: Method, ids: Tensor, lengths: list[int], turn: int) -> list[dict[str, Any]]:
    """Reads ids [1, tokens] up to each length; logits of the next tokens, and what the cache reports."""
    name = "sdpa" if method.config is None else "diffkv"
    model.set_attn_implementation(name)
    cache, seen, found = method.cache(model), 0, []
    for length in lengths:
        read(model, cache, ids[:, seen:length], turn)
        seen = length
        entry: dict[str, Any] = {
            "length": length,
            "logits": read(model, copy.deepcopy(cache), ids[:, length : length + NEXT], NEXT),
        }
        if method.config is not None:
            memory = cache.memory()
            entry |= {"bytes": memory.compressed_bytes, "dense_bytes": memory.compressed_dense_bytes}
            entry |= {"lowered": memory.lowered, "room": memory.room, "tokens": memory.tokens}
            names = [precision for layer in memory.layers for precision in layer.precisions]
            entry["precisions"] = {each: names.count(each) for each in sorted(set(names))}
        found.append(entry)
    return found


def methods(model: PreTrainedModel, ids: Tensor, options: argparse.Namespace, lengths: list[int]) -> list[Method]:
    """The four caches; measures what the preset holds at the end for the budget."""
    # levels are given by the preset alone: measured heads would have several final precisions
    final = DiffKVConfig.preset(options.preset)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model, final)
    read(model, cache, ids[:, : lengths[-1] + NEXT], options.turn)
    limit = int(cache.memory().compressed_bytes * options.margin)
    return [
        Method("until full", DiffKVConfig.preset(options.preset, max_bytes=limit)),
        Method(f"{options.preset} from the start", final),
        Method("pruned", DiffKVConfig.preset(options.preset, max_bytes=limit, until_full=None)),
        Method("lossless", DiffKVConfig.lossless()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, name on the Hub, or short name")
    parser.add_argument("--lengths", default="256,1024,2048,4096,6144,8192", help="tokens at which KL is measured")
    parser.add_argument("--preset", default="small", help="preset whose precision is the final one")
    parser.add_argument("--text", default="offline", help="UTF-8 file; 'offline' is Python's language reference")
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--turn", type=int, default=256, help="tokens that are read at once")
    parser.add_argument("--margin", type=float, default=1.06, help="budget over the bytes of the preset at the end")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lengths = sorted(int(length) for length in options.lengths.split(","))

    name = resolve_model(options.model)
    model = load_model(name, options.dtype, options.device).eval()
    _, tokenizer = load_config(name)
    ids = tokenizer("\n\n".join(read_pieces(options.text)), return_tensors="pt").input_ids.to(model.device)
    needed = lengths[-1] + NEXT
    if ids.shape[1] < options.documents * needed:
        parser.error(f"the text has {ids.shape[1]} tokens, {options.documents} documents need {needed} each: --text")
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for number in range(options.documents):
        document = ids[:, number * needed : (number + 1) * needed]
        dense = grown(model, Method("dense", None), document, lengths, options.turn)
        for method in methods(model, document, options, lengths):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                entries = grown(model, method, document, lengths, options.turn)
            for entry, reference in zip(entries, dense):
                # the last of the next tokens has no successor
                following = document[0, entry["length"] + 1 : entry["length"] + NEXT].tolist()
                compared = compare_logits(entry.pop("logits")[:-1], reference["logits"][:-1], following)
                entry |= {metric: total / count for metric, (total, count) in compared.items()}
                print(
                    f"document {number + 1}  {method.name:22} {entry['length']:6} tokens {entry['bytes'] / 1e6:8.2f} MB"
                    f" ({entry['bytes'] / entry['dense_bytes']:.1%})  KL {entry['kl']:.5f}  {entry['precisions']}",
                    flush=True,
                )
            found.setdefault(method.name, []).append(entries)
    if options.output is not None:
        given = {key: str(value) for key, value in vars(options).items()}
        result = {"options": given, "environment": describe_environment(model.device), "methods": found}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
