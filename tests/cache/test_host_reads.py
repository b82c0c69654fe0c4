"""Between two refreshes, a compiled or captured step reads nothing from the device; a refresh reads once.

For steps from Python, see `test_fault_9_no_host_reads_between_two_refreshes`.
"""

from __future__ import annotations

import interpreted  # noqa: F401
import pytest
import torch
from captured_steps import FIELDS, build
from launches import FIRST_READS, Launches

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.cache import graphs, layer
from hf_diffkv.compat import passing
from hf_diffkv.store import Store


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("way", ["compiled", "captured"])
@pytest.mark.parametrize("batch, padding", [(1, False), (3, True)])
@pytest.mark.slow
def test_no_reads_between_two_refreshes(monkeypatch: pytest.MonkeyPatch, way: str, batch: int, padding: bool) -> None:
    monkeypatch.setattr(layer, "reads_are_free", lambda device: False)
    torch._dynamo.reset()
    model = build(1)
    model.set_attn_implementation("diffkv")
    cache = DiffKVCache(model.config, DiffKVConfig(**FIELDS))
    mask = torch.ones(batch, 10, dtype=torch.int64)
    mask[-1, : 4 * padding] = 0
    step = {
        "compiled": lambda: torch.compile(model, backend="eager", fullgraph=True),
        "captured": lambda: graphs.DecodeStep(model, cache, 64),
    }[way]()
    reads = Launches(monkeypatch)
    found = []
    with torch.no_grad():
        with reads:
            model(torch.randint(96, (batch, 10)), attention_mask=mask, **passing(cache))
        assert reads.found, "the counter sees nothing, not even the prompt's reads"
        for _ in range(2 * Store.refresh_steps + 1):
            mask = torch.cat([mask, torch.ones(batch, 1, dtype=torch.int64)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            reads.found.clear()
            with reads:
                inputs = {"input_ids": torch.randint(96, (batch, 1)), "attention_mask": mask}
                step(**inputs, position_ids=positions, **passing(cache))
            found.append(list(reads.found))
    if way == "captured":
        assert step.captures == 1 and step.replays == len(found) - 1
    for index, reads_of_step in enumerate(found):
        if index % Store.refresh_steps:
            assert reads_of_step == [], f"step {index}"
        else:
            # the free list is also read when the pool grows
            assert reads_of_step[:2] == FIRST_READS and len(reads_of_step) <= 4, f"step {index}"
            assert all("FreeList" in read for read in reads_of_step[2:])
    cache.check_integrity()
