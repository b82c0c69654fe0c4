"""Methods for llama.cpp's caches: `llama-cpp:q8_0`, or `llama-cpp:q8_0/q4_0` with separate types of keys and values.

They run in llama.cpp, on a GGUF file of the same weights, and are compared with its own f16 cache, `llama-cpp:f16`
(`llama_worker.py`). `make llama-cpp` builds their environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isolated import Isolated
from llama_context import FAMILY, CacheTypes, parse_types

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import Method, method
from hf_diffkv.evaluation.tasks import Document, Task
from hf_diffkv.running import models

WORKER = Path(__file__).parents[1] / "llama_worker.py"


def find_gguf(model: str) -> Path:
    """Returns the GGUF file of a model, which has the same name as the model's folder and is next to it.

    Raises:
        EvaluationError: there is no such file.
    """
    short = next((name for name, hub_id in models.HUB_IDS.items() if model in (name, hub_id)), None)
    folder = models.MODELS_FOLDER / short if short else Path(models.resolve_model(model))
    path = folder.with_name(f"{folder.name}.gguf")
    if not path.is_file():
        remedy = f": make models MODELS={short} GGUF=1" if short else ", a GGUF file of the same weights."
        raise EvaluationError(f"llama.cpp needs {path}{remedy}")
    return path


class LlamaCppEnvironment(Isolated):
    """The environment of `make llama-cpp`."""

    def further(self, model: str, tasks: Sequence[tuple[Task, list[Document]]]) -> dict[str, Any]:
        return {
            "gguf": str(find_gguf(model)),
            "in_turn": [task.name for task, _ in tasks if getattr(task, "in_turn", False)],
        }


class LlamaCppMethod(Method):
    """Method with a llama.cpp cache.

    Args:
        types: types of keys and values.
    """

    environment = LlamaCppEnvironment(FAMILY, WORKER)
    packages = ("llama-cpp-python",)

    def __init__(self, types: CacheTypes) -> None:
        self.types = types

    def new_cache(self, model: Any) -> Any:
        raise NotImplementedError("llama.cpp has caches for its own models only, in an environment of its own.")


@method(FAMILY)
def llama_cpp(options: list[str]) -> Method:
    return LlamaCppMethod(parse_types(options))
