"""The study of output heads: more exact logits lose less, and 16 bits lose least."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def test_losses(script: Callable[[str], ModuleType]) -> None:
    study = script("output_head")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16_384, **sizes)).eval()
    model.lm_head.weight.data.mul_(30)
    with torch.no_grad():
        found = list(study.measure(model, torch.randn(6, 64)))
    names = ["16 bits", *(f"4 bits, {count} exact" for count in ("0", "64", "256", "1,024", "4,096"))]
    assert [name for name, _, _ in found] == names
    kl = [loss["kl"] for _, loss, _ in found]
    assert kl[0] < 1e-5 and kl[1:] == sorted(kl[1:], reverse=True) and kl[1] > 2 * kl[-1] > 100 * kl[0]
    assert all(loss["same"] == 1 for _, loss, _ in found[3:])
