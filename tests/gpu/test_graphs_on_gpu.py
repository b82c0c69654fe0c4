"""Captured steps on a GPU give the logits of steps from Python, without a new capture as the cache grows."""

from __future__ import annotations

import pytest
import torch
from test_models_on_gpu import build

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.integration import graphs


@pytest.mark.parametrize("padded", [False, True])
def test_replays_give_the_logits_of_eager_steps(device, monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    made: list[graphs.DecodeStep] = []
    init = graphs.DecodeStep.__init__

    def note(self: graphs.DecodeStep, *args: object) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(graphs.DecodeStep, "__init__", note)
    model = build(torch.bfloat16).to(device)
    tokens = torch.randint(0, 256, (2, 600), device=device)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :300] = 0
    found = {}
    for captured in (False, True):
        config = DiffKVConfig(alpha_high=1.0, alpha_low=0.2, window=16, cuda_graphs=captured)
        cache = DiffKVCache(model.config, config)
        output = model.generate(
            tokens,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=300,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        cache.check_integrity()
        found[captured] = (output.sequences, torch.stack(output.logits), cache.levels(2))
    (step,) = made
    assert step.captures == 1 and step.replays == 298
    assert torch.equal(found[True][0], found[False][0])
    torch.testing.assert_close(found[True][1], found[False][1])
    assert torch.equal(found[True][2], found[False][2])
