"""The compiled forward that a captured step repeats, where the user asks for one with a `CompileConfig`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from transformers.generation.configuration_utils import CompileConfig

_logger = logging.getLogger("hf_diffkv")
_CUDAGRAPHS = "triton.cudagraphs"
# what could not be compiled is not tried again, which may take minutes
_failed: weakref.WeakKeyDictionary[Any, list[CompileConfig]] = weakref.WeakKeyDictionary()


def within_graph(asked: CompileConfig) -> CompileConfig:
    """`asked` for a forward that is captured as a whole: the compiler captures nothing itself, and shapes are fixed.

    Raises:
        ValueError: a mode or backend that is not known, or that only captures.
    """
    dynamic = False if asked.dynamic is None else asked.dynamic
    if asked.backend != "inductor":
        if asked.backend == "cudagraphs":
            raise ValueError(
                'compile_config.backend="cudagraphs" captures steps, which DiffKVCache does already; use "inductor".'
            )
        mode = None if asked.mode in _default_modes() else asked.mode
        return CompileConfig(asked.fullgraph, dynamic, asked.backend, mode, asked.options)
    # imported here, as loading it takes long
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if asked.mode is not None and asked.mode not in modes:
        raise ValueError(f"compile_config.mode={asked.mode!r} is not known; use one of {sorted(modes)} or None.")
    if asked.options and asked.mode not in _default_modes():
        raise ValueError("compile_config has a mode and options, which torch.compile does not take together; set one.")
    options = {**modes.get(asked.mode, {}), **(asked.options or {}), _CUDAGRAPHS: False}
    return CompileConfig(asked.fullgraph, dynamic, "inductor", None, options)


def _default_modes() -> tuple[str | None, ...]:
    """Modes that change nothing but whether the compiler captures graphs, the default of `CompileConfig` among them."""
    return None, "default", CompileConfig().mode


def compiled_forward(model: Any, asked: CompileConfig, get_compiled_call: Callable) -> Callable | None:
    """The forward of `model`, to be compiled when it is first called; None where that cannot be.

    Args:
        get_compiled_call: Transformers' method, which keeps one compiled forward per model.

    Raises:
        ValueError: see `within_graph`.
    """
    config = within_graph(asked)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        _logger.warning("compile_config is not used: %s cannot be compiled", type(quantizer).__name__)
        return None
    return None if config in _failed.get(model, ()) else get_compiled_call(model, config)


def not_compiled(model: Any, asked: CompileConfig, error: Exception) -> None:
    """Says once that compiling failed, and remembers it."""
    _failed.setdefault(model, []).append(within_graph(asked))
    # what a backend raised is wrapped, and messages are long
    cause = getattr(error, "inner_exception", error)
    reason = [type(cause).__name__, *str(cause).strip().splitlines()[:1]]
    _logger.warning(
        "the forward is not compiled as compile_config asks; decode steps are captured as they are: %s",
        ": ".join(reason),
    )
