"""The Transformers worker of `cpu_stack.py`: a model with DynamicCache or a DiffKV preset, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cpu_caches import about_machine, held_bytes, step
from stack_protocol import serve
from transformers import DynamicCache

from hf_diffkv import DiffKVCache
from hf_diffkv.evaluation.environment import installed
from hf_diffkv.running.models import load_model

DENSE = "DynamicCache"


class Transformers:
    """A model with one cache.

    Attributes:
        job: `model`, a name or folder; `weights` as for `load_model`; `cache`, `DENSE` or a preset with fields, as in
            "balanced" or "balanced head_precisions=null"; `threads`.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        self.model = load_model(job["model"], "bfloat16", "cpu", quiet=True, weights=job["weights"])
        preset, _, fields = job["cache"].partition(" ")
        if preset == DENSE:
            self.cache = DynamicCache(config=self.model.config)
        else:
            same = {"head_precisions": None} if fields == "head_precisions=null" else {}
            self.cache = DiffKVCache(self.model, preset, **same)
        # not counted in the prompt's time
        step(self.model, DynamicCache(config=self.model.config), torch.tensor([[1, 2, 3]]))

    def read(self, ids: Sequence[int]) -> int:
        return int(step(self.model, self.cache, torch.tensor([list(ids)])).argmax())

    def held(self) -> int:
        return held_bytes(self.cache)

    def about(self) -> dict[str, Any]:
        return {**about_machine(), **installed(("bitsandbytes",))}


if __name__ == "__main__":
    serve(Transformers)
