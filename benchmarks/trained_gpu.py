"""Loss of each preset with a trained model on a GPU, which must match the loss on the CPU.

The text is this checkout's documentation. Each cache reads a prompt, then more tokens at once, then some one by one;
its logits are compared with DynamicCache's. Run it with `--device cpu` as well; both write to one file.

    python benchmarks/trained_gpu.py --model build/models/smollm2 [--device cpu]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Session, parser
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.running.models import load_model

DOCS = Path(__file__).parents[1] / "docs"
LENGTH, MORE, STEPS = 3000, 256, 64
# by name, so that measured heads are found
PRESETS = {
    "lossless": DiffKVConfig.lossless(),
    **{name: name for name in ("quality", "balanced", "small")},
    "paper": DiffKVConfig.paper(),
}


def documents(tokenizer: Any, count: int, length: int) -> Tensor:
    """Returns token ids of the documentation, int64 [count, length]."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    return ids[: count * length].view(count, length)


@torch.no_grad()
def read(model: PreTrainedModel, cache: Cache, ids: Tensor, attention: str) -> tuple[Tensor, Tensor]:
    """Returns logits of `MORE` tokens read at once and of `STEPS` tokens read one by one, [tokens, vocabulary]."""
    model.set_attn_implementation(attention)
    prompt, more, steps = ids[None].split([LENGTH, MORE, STEPS], dim=1)
    model(prompt, **passing(cache), logits_to_keep=1)
    at_once = model(more, **passing(cache)).logits[0]
    singly = [model(token, **passing(cache)).logits[0] for token in steps.split(1, dim=1)]
    return at_once.float(), torch.cat(singly).float()


def mean_kl(exact: Tensor, logits: Tensor) -> float:
    """Returns the mean KL, in nats, from the predictions of `exact`, [positions, vocabulary], to those of `logits`."""
    theirs, mine = exact.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((theirs.exp() * (theirs - mine)).sum(-1).mean())


def measure(session: Session, model: PreTrainedModel, name: str, texts: Tensor) -> None:
    """Adds a row for each preset, and one for the dense cache with another attention, which shows rounding alone."""
    makers: dict[str, Callable[[], Cache]] = {
        "DynamicCache, eager": lambda: DynamicCache(config=model.config),
        **{f"DiffKV {preset}": lambda c=config: DiffKVCache(model, c) for preset, config in PRESETS.items()},
    }
    found: dict[str, list[tuple[float, float, float, float]]] = {cache: [] for cache in makers}
    for ids in texts:
        dense = read(model, DynamicCache(config=model.config), ids, "sdpa")
        for label, make in makers.items():
            cache = make()
            got = read(model, cache, ids, "diffkv" if label.startswith("DiffKV") else "eager")
            share, same = 1.0, torch.cat(got).argmax(-1) == torch.cat(dense).argmax(-1)
            if isinstance(cache, DiffKVCache):
                memory = cache.memory()
                share = memory.bytes / memory.dense_bytes
            pair = (mean_kl(theirs, mine) for mine, theirs in zip(got, dense))
            found[label].append((*pair, float(same.float().mean()), share))
    for label, values in found.items():
        at_once, singly, same, share = map(statistics.fmean, zip(*values))
        row = {"kind": "trained", "model": name, "documents": len(texts), "tokens": LENGTH, "cache": label}
        figures = {"kl_at_once": at_once, "kl_steps": singly, "same_first_choice": same, "share_of_bytes": share}
        session.add({**row, **{key: round(value, 6) for key, value in figures.items()}})
        print(label, *(f"{key} {value:.5f}" for key, value in figures.items()), flush=True)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, "trained_gpu")
    options.add_argument("--model", required=True, help="folder or name of a trained model")
    options.add_argument("--label", help="name of the model in the results (default: that of its folder)")
    options.add_argument("--documents", type=int, default=6)
    args = options.parse_args(arguments)
    session = Session(args)
    model = load_model(args.model, dtype="bfloat16").to(session.device)
    texts = documents(AutoTokenizer.from_pretrained(args.model), args.documents, LENGTH + MORE + STEPS)
    measure(session, model, args.label or Path(args.model).name, texts.to(session.device))


if __name__ == "__main__":
    main()
