"""The llama.cpp worker of `cpu_stack.py`, using llama-cpp-python: a GGUF file with a cache of one type, on a CPU.

It runs in the environment of `make llama-cpp`, which has no PyTorch.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from stack_protocol import serve

# values of general.file_type
FILE_TYPES = {"1": "F16", "2": "Q4_0", "7": "Q8_0", "14": "Q4_K_S", "15": "Q4_K_M", "17": "Q5_K_M", "18": "Q6_K"}
# bytes of BLOCK elements in a cache
BLOCK, BLOCK_BYTES = 32, {"f16": 64, "q8_0": 34, "q5_0": 22, "q4_0": 18}


class LlamaCpp:
    """A model with one cache.

    Attributes:
        job: `gguf`, path of the file; `cache`, type of keys and values by its name in ggml; `room`, context length;
            `threads`.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.kind = job["cache"]
        kind = getattr(llama_cpp, f"GGML_TYPE_{self.kind.upper()}")
        self.model = llama_cpp.Llama(
            job["gguf"],
            n_ctx=job["room"],
            n_threads=job["threads"],
            n_threads_batch=job["threads"],
            # without it, values keep 16 bits
            flash_attn=True,
            type_k=kind,
            type_v=kind,
            n_gpu_layers=0,
            verbose=False,
        )
        # not counted in the prompt's time
        self.model.eval([1, 2, 3])
        self.model.reset()

    def read(self, ids: Sequence[int]) -> int:
        self.model.eval(ids)
        logits = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax())

    def held(self) -> int:
        """Bytes of keys and values for the whole context, which llama.cpp reserves at start-up."""
        about, name = self.model.metadata, self.model.metadata["general.architecture"]
        layers, width, heads, pairs = (
            int(about[f"{name}.{key}"])
            for key in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv")
        )
        return 2 * layers * pairs * (width // heads) * self.model.n_ctx() * BLOCK_BYTES[self.kind] // BLOCK

    def about(self) -> dict[str, Any]:
        kind = self.model.metadata.get("general.file_type", "")
        about = {"llama_cpp": llama_cpp.__version__, "python": platform.python_version()}
        return {**about, "file_type": FILE_TYPES.get(kind, f"type {kind}")}


if __name__ == "__main__":
    serve(LlamaCpp)
