"""A custom policy: StreamingLLM's rule (ICLR 2024), which keeps a request's first tokens and the window.

    python examples/own_policy.py --model smollm2

A policy is a frozen dataclass that extends `Policy`. `levels` decides after a prompt, `thresholds` decides for each
generated token that leaves the window, and `register_policy` gives the class its name.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_diffkv
from hf_diffkv.compat import passing
from hf_diffkv.pages import HIGH_LEVEL, PRUNED_LEVEL
from hf_diffkv.policy import ForwardRows, Levels, Policy, StepRows, Tokens, register_policy
from hf_diffkv.policy.base import option
from hf_diffkv.running.models import resolve_model


@dataclass(frozen=True)
class FirstTokens(Policy):
    """Keeps a request's first tokens at the high precision and prunes every other token that leaves the window.

    Args:
        first: number of first tokens to keep.
    """

    first: int = option(4, least=0)

    def levels(self, tokens: Tokens, rows: ForwardRows) -> Levels:
        return Levels(torch.where(tokens.position < self.first, HIGH_LEVEL, PRUNED_LEVEL).to(torch.int8))

    def thresholds(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        threshold = torch.where(rows.candidate < self.first, 0.0, torch.inf)
        return threshold, threshold


register_policy("first_tokens", FirstTokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="Hub id, folder or short name")
    name = resolve_model(parser.parse_args().model)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name, dtype="auto"), AutoTokenizer.from_pretrained(name)
    inputs = tokenizer("The sea was calm and the gulls were loud. " * 30, return_tensors="pt")
    cache = hf_diffkv.DiffKVCache(
        model.config, policy="first_tokens", policy_options={"first": 8}, sinks=0, high="K8V8", low="K8V8"
    )
    output = model.generate(**inputs, **passing(cache), max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]), cache.memory(), sep="\n")


if __name__ == "__main__":
    main()
