"""An engine for many requests, built from plain values that can be sent to other machines."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from typing import Any

from hf_diffkv.running.models import load_config, load_model


@dataclass(frozen=True)
class EngineOptions:
    """Model and engine options of a worker.

    Attributes:
        model: Hub id, short name, or a folder that every machine has.
        config: fields of `DiffKVConfig`, or the name of a preset; `max_bytes` is the budget of one worker.
        dtype: "auto", or the name of a PyTorch dtype.
        device: name of a device; None uses a GPU if the worker has one.
        generation: fields of `GenerationConfig` for all requests, such as `do_sample` and `temperature`.
        batching: fields of `ContinuousBatchingConfig`, such as `max_requests_per_batch` and `seed`.
        max_length: maximum tokens per request, prompt and answer together; None for the model's number of positions.
        prefixes: arguments of `PrefixStore` after model and configuration, such as {"device_bytes": 1 << 30}; None
            keeps no prefixes.
    """

    model: str
    config: dict[str, Any] | str | None = None
    dtype: str = "auto"
    device: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    prefixes: dict[str, Any] | None = None


@dataclass(frozen=True)
class LoadedEngine:
    """A model, its tokenizer, and a `DiffKVBatchingManager` that has not been started."""

    model: Any
    tokenizer: Any
    manager: Any

    def start(self) -> None:
        """Starts the manager and stops it with the process, since its thread would keep an ended worker alive."""
        self.manager.start()

        def end() -> None:
            threading.main_thread().join()
            if self.manager.is_running():
                self.manager.stop(hard_stop=True)

        threading.Thread(target=end, daemon=True).start()


def load_engine(options: EngineOptions) -> LoadedEngine:
    """Loads a model and makes the engine for all its requests.

    Raises:
        EvaluationError: the model cannot be loaded.
        ValueError, MemoryError, UnsupportedModelError: raised by `DiffKVBatchingManager`.
    """
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    from hf_diffkv.prefixes import PrefixStore

    from ..batching.until_full import config_of_slots, rung_config

    _, tokenizer = load_config(options.model)
    model = load_model(options.model, options.dtype, options.device, quiet=True)
    config = config_of_slots(model, options.config, {})
    generation = copy.deepcopy(model.generation_config)
    generation.cache_implementation = "diffkv"
    generation.cache_config = config.to_dict()
    generation.update(**options.generation)
    hints = None
    if options.max_length is not None:
        hints = WorkloadHints(max_prompt_length=options.max_length - 1, max_generated_length=1)
    manager = model.init_continuous_batching(generation, ContinuousBatchingConfig(**options.batching), hints)
    if options.prefixes is not None:
        manager.use_prefixes(PrefixStore(model, rung_config(config), **options.prefixes))
    return LoadedEngine(model, tokenizer, manager)
