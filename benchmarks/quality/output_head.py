"""What a 4-bit output head loses, and how much of it exact weights for the largest logits recover.

Hidden states of a dense cache go through the unchanged head, through 4-bit weights, and through `FourBitHead` with
various numbers of exact logits. Logits are compared with those in float32. Times are for one state's product.

    OMP_NUM_THREADS=1 python benchmarks/quality/output_head.py [--models smollm2,qwen2.5-coder-0.5b] [--tokens 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from long_text import TEXTS, compared, document_of
from torch import Tensor
from torch.nn.functional import linear

from hf_diffkv.running import output_head
from hf_diffkv.running.models import load_config, load_model
from hf_diffkv.running.output_head import CANDIDATES, FourBitHead

EXACT = (0, 64, 256, CANDIDATES, 4096)
MODELS = "smollm2,gemma3-270m,qwen2.5-coder-0.5b,qwen2.5-coder-1.5b"


def timed(head: Callable[[Tensor], Tensor], states: Tensor) -> tuple[Tensor, float]:
    """Returns the logits of all states, computed one after the other, and the median milliseconds."""
    logits, seconds = [], []
    for state in states.split(1):
        started = time.thread_time()
        logits.append(head(state))
        seconds.append(time.thread_time() - started)
    return torch.cat(logits), 1e3 * statistics.median(seconds)


def measure(model: Any, states: Tensor) -> Iterator[tuple[str, dict[str, float], float]]:
    """Yields the name, the loss and the milliseconds of each head; `states` are [tokens, hidden_size]."""
    plain = model.get_output_embeddings()
    exact = states.float() @ plain.weight.float().T
    logits, milliseconds = timed(lambda state: linear(state, plain.weight), states)
    yield "16 bits", compared(logits, exact), milliseconds
    head = FourBitHead(plain)
    for count in EXACT:
        with patch.object(output_head, "CANDIDATES", count):
            logits, milliseconds = timed(head, states)
        yield f"4 bits, {count:,} exact", compared(logits, exact), milliseconds


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--text", choices=TEXTS, default="code")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    print("| model | head | KL | tail | the same first choice | ms |\n" + "|---" * 6 + "|")
    for name in options.models.split(","):
        _, tokenizer = load_config(name)
        model = load_model(name, dtype="bfloat16", quiet=True)
        ids = document_of(options.text, tokenizer, 0, options.tokens, 1).context
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
        for head, loss, milliseconds in measure(model, states):
            cells = (f"{loss['kl']:.4f}", f"{loss['kl_99.9%']:.3f}", f"{loss['same']:.1%}", f"{milliseconds:.1f}")
            print(f"| {name} | {head} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
