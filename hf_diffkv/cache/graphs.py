"""Captured decode steps: the work of `generate()` for one token is recorded once and replayed (docs/graphs.md).

Only the device's work is captured: the model's forward and the compaction after it. The host's work, reading counts
every few steps and reserving memory, happens between two replays. A step is replayed only while every tensor it uses
has the address it had at capture; otherwise one step runs uncaptured and the next is captured again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.configuration_utils import CompileConfig

from ..compat import CACHE_NAMES, SLIDING_GRAPHS, passed
from ..ops.backend import KERNELS
from ..store import Changing, Store
from ..store.compaction import compact, settle
from ..store.step import count_step, look_together, refresh_if_due
from .captured_windows import Windows, is_sliding
from .cuda_graph import CudaGraph
from .diffkv_cache import DiffKVCache
from .errors import NotCapturableError
from .layer import DiffKVLayer

_logger = logging.getLogger("hf_diffkv")
# upper bound on the tokens for which tables and buffers are reserved ahead at once
MOST_TOKENS_AHEAD = 4096
# name of the buffer for the newest token's mask over the sliding windows
WINDOW_MASK = "window_mask"
_MASKS = {"attention_mask": torch.bool, WINDOW_MASK: torch.bool}
# recorder by device type; other devices run every step from Python
GRAPH_TYPES: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraph}
# models whose step could not be captured; capturing is not tried again
_given_up: weakref.WeakSet[Any] = weakref.WeakSet()
_CUDAGRAPHS = "triton.cudagraphs"
# configurations that failed to compile; they are not tried again, as that may take minutes
_failed: weakref.WeakKeyDictionary[Any, list[CompileConfig]] = weakref.WeakKeyDictionary()


class _Captured(NamedTuple):
    """A graph with its input buffers, output and all inputs, none of which may be freed before it."""

    graph: Any
    buffers: dict[str, Tensor]
    output: Any
    inputs: dict[str, Any]


class GraphRequest(CompileConfig):
    """Compile configuration that carries the captured step to `get_compiled_call`."""

    def __init__(self, step: DecodeStep) -> None:
        super().__init__()
        self.step = step


def wants_graphs(model: Any, cache: DiffKVCache) -> bool:
    """Returns whether `generate()` should replay captured steps."""
    return (
        cache.config.cuda_graphs
        and model.device.type in GRAPH_TYPES
        and model not in _given_up
        and cache.stores.tensor_parallel.size == 1
        and len(set(getattr(model, "hf_device_map", {}).values())) <= 1
        and all(isinstance(layer, DiffKVLayer) or is_sliding(layer) for layer in cache.layers)
        and (not any(map(is_sliding, cache.layers)) or SLIDING_GRAPHS.available())
        and not any(getattr(layer, "readers", 0) for layer in cache.layers)
        and not rotates_by_length(model)
    )


def rotates_by_length(model: Any) -> bool:
    """Returns whether rotary frequencies depend on the length, which such a model reads from the device each step."""
    types = [getattr(module, "rope_type", None) for module in model.modules()]
    types += [kind for found in types if isinstance(found, dict) for kind in found.values()]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in types)


class DecodeStep:
    """Stands in for `model.__call__` during one `generate()` call.

    Args:
        model: model that is called directly for everything but plain decode steps.
        cache: cache of the call.
        max_tokens: length at which generation stops, up to which memory is reserved ahead.
        compile_config: compile configuration of the captured forward; None does not compile it.
        get_compiled_call: Transformers' method of that name.

    Attributes:
        captures, replays: number of captures and of replays.
        compiled: whether the captured forward is compiled.

    Raises:
        ValueError: `compile_config` cannot be used here.
    """

    def __init__(
        self,
        model: Any,
        cache: DiffKVCache,
        max_tokens: int,
        compile_config: CompileConfig | None = None,
        get_compiled_call: Callable | None = None,
    ) -> None:
        self.model, self.cache, self.max_tokens = model, cache, max_tokens
        self._compile_config = compile_config
        forward = None if compile_config is None else compiled_forward(model, compile_config, get_compiled_call)
        self.compiled = forward is not None
        self._forward = model if forward is None else forward
        self.windows = Windows(cache.layers, model.config.get_text_config(decoder=True))
        self.captures = self.replays = 0
        self._failed = False
        # addresses after the last uncaptured step; capturing must not be the first use of a kernel
        self._warm: tuple | None = None
        # addresses at capture
        self._place: tuple | None = None
        self._captured: _Captured | None = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        with self.cache.stores.turns.step():
            return self._run(args, inputs)

    def _run(self, args: tuple, inputs: dict[str, Any]) -> Any:
        # Transformers passes the tokenizer for stop strings on to the model, which does not use it
        inputs.pop("tokenizer", None)
        stores = self._stores(args, inputs)
        if not stores:
            self._warm = None
            return self.model(*args, **inputs)
        for store in stores:
            store.check_positions(1)
            settle(store)
        look_together(self.cache.stores.all)
        for store in stores:
            self.cache.stores.share_budget(store)
            self._reserve(store)
            refresh_if_due(store)
        for store in stores:
            # another store may have lowered its rows in the meantime
            refresh_if_due(store)
        tensors, fixed = self._static_inputs(inputs)
        place = (fixed, self._addresses(stores))
        ready = all(store.scratch_fits() and not store.centers_soon for store in stores)
        # work done only once per row is not captured
        if not (ready and place == self._warm):
            output = self.model(**inputs)
            self._warm = (fixed, self._addresses(stores))
            if self._warm != self._place:
                self._captured, self._place = None, self._warm
            return output
        # the uncaptured step has compiled the kernels of the step and of its compaction, so they can run in a capture
        if self._captured is None and not self._capture(stores, inputs, tensors):
            return self.model(**inputs)
        captured = self._captured
        for name, value in tensors.items():
            captured.buffers[name].copy_(value)
        with Changing(*stores):
            self._count(stores, inputs.get("attention_mask"))
            captured.graph.replay()
            for store in stores:
                store.compaction_due = False
        self.replays += 1
        return _copied(captured.output)

    def _stores(self, args: tuple, inputs: dict[str, Any]) -> list[Store]:
        """Returns all stores if the step can be captured, otherwise an empty list: it must run from Python."""
        stores, ids, mask = self.cache.stores, inputs.get("input_ids"), inputs.get("attention_mask")
        if self._failed or args or not stores.all or stores.recording or stores.broken:
            return []
        first = stores.all[0]
        plain = (
            passed(inputs) is self.cache
            and isinstance(ids, Tensor)
            and ids.shape == (first.batch_size, 1)
            # without them, models count from the length of the cache, which a graph would freeze
            and isinstance(inputs.get("position_ids"), Tensor)
            and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2))
            and all(_is_plain(name, value) for name, value in inputs.items())
        )
        ready = (
            {*stores.seen, *(store.seen for store in stores.all)} == {first.seen}
            and first.seen > 0
            and self.windows.full
            and all(
                store.twins is None
                and store.pool.grows_in_place
                and store.ops.backend == KERNELS
                and store.device == first.device
                for store in stores.all
            )
        )
        # autocast chooses dtypes when a step runs, and a graph would not see it change
        mode = torch.is_grad_enabled() or torch.is_autocast_enabled(first.device.type)
        return list(stores.all) if plain and ready and not mode else []

    def _addresses(self, stores: list[Store]) -> tuple:
        return (*(store.addresses() for store in stores), self.windows.addresses())

    def _reserve(self, store: Store) -> None:
        if store.lowering.active:
            # pages change hands between stores, each of which might get all of them
            store.pool.free_list.reserve(int(store.config.max_bytes) // store.pool.page_bytes)
        elif store.config.max_bytes is not None:
            # reserves all the budget allows at once, as moving the pages invalidates every graph
            store.pool.free_list.reserve(store.pool.max_pages)
        elif store.room < store.seen + 1:
            store.room = min(self.max_tokens, store.seen + max(store.seen, MOST_TOKENS_AHEAD))
            # allocated now, as a later allocation would invalidate graphs captured before it
            store.forget_bounds()

    def _static_inputs(self, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], tuple]:
        """Returns the tensors for a graph's buffers, and the inputs that a graph freezes.

        A mask grows with every step, so the buffers hold only its part for the newest token and for the windows.
        """
        tensors: dict[str, Tensor] = {}
        fixed: list[tuple] = []
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                if name == "attention_mask":
                    if self.windows.layers:
                        tensors[WINDOW_MASK] = self.windows.shown(value)
                    value = value[:, -1, None, None, None]
                tensors[name] = value
                fixed.append((name, value.shape, value.dtype))
            elif name not in CACHE_NAMES:
                fixed.append((name, value))
        return tensors, tuple(fixed)

    def _capture(self, stores: list[Store], inputs: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        buffers = {name: value.to(_MASKS.get(name, value.dtype), copy=True) for name, value in tensors.items()}
        captured = {**inputs, **buffers}
        # masks are prepared here, as models would derive them from the length of the cache
        batch_size, device = stores[0].batch_size, stores[0].device
        everything = partial(torch.ones, dtype=torch.bool, device=device)
        mask = buffers.get("attention_mask")
        if mask is None:
            mask = everything(batch_size, 1, 1, 1)
        if self.windows.layers:
            shown = captured.pop(WINDOW_MASK, None)
            shown = everything(batch_size, 1, 1, self.windows.size) if shown is None else shown
            mask = {"full_attention": mask, "sliding_attention": shown}
        captured["attention_mask"] = mask

        def work() -> Any:
            with self.windows.in_place():
                output = self._forward(**captured)
            for store in stores:
                compact(store)
            return output

        graph = GRAPH_TYPES[device.type](device)
        self.cache.stores.capturing = True
        self.cache.stores.capturing_mask = "attention_mask" in buffers
        try:
            self._warm_up(captured)
            output = graph.capture(work)
        except Exception as error:  # models fail in many ways; nothing has run on the device, so the step can still run
            self._give_up(error)
            return False
        finally:
            self.cache.stores.capturing = False
            for store in stores:
                # nothing has run on the device
                store.unfinished = 0
        self._captured = _Captured(graph, buffers, output, captured)
        self.captures += 1
        return True

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        if not isinstance(error, torch.OutOfMemoryError):
            _given_up.add(self.model)
        reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
        _logger.warning("decode steps are not captured, which is slower: %s", ": ".join(reason))

    def _warm_up(self, inputs: dict[str, Any]) -> None:
        """Runs the forward with an attention that changes nothing, as compiling must not happen within a capture."""
        self.cache.stores.rehearsing = True
        try:
            with self.windows.kept(), self.windows.in_place():
                self._try(inputs)
        finally:
            self.cache.stores.rehearsing = False

    def _try(self, inputs: dict[str, Any]) -> None:
        try:
            self._forward(**inputs)
        except NotCapturableError:
            raise
        except Exception as error:  # compilers fail in many ways too
            if not self.compiled:
                raise
            not_compiled(self.model, self._compile_config, error)
            self._forward, self.compiled = self.model, False
            self._forward(**inputs)

    def _count(self, stores: list[Store], mask: Tensor | None) -> None:
        """Updates counts on the host, as the layers do in a step that runs from Python."""
        self.windows.count()
        for store in stores:
            count_step(store)
            store.seen += 1
            store.padding.append(1, None if mask is None else mask[:, -1:])
        every = self.cache.stores
        every.seen = [seen + 1 for seen in every.seen]


def _is_plain(name: str, value: Any) -> bool:
    return name in CACHE_NAMES or value is None or isinstance(value, (Tensor, bool, int, float, str))


def _copied(output: Any) -> Any:
    """Copies `output`, including tensors in tuples (such as hidden states), so that replays do not overwrite it."""
    return type(output)(**{name: _copied_value(value) for name, value in output.items()})


def _copied_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(map(_copied_value, value)) if type(value) in (tuple, list) else value


def within_graph(asked: CompileConfig) -> CompileConfig:
    """Adapts `asked` to a captured forward: the compiler captures nothing itself, and shapes are fixed.

    Raises:
        ValueError: an unknown mode or backend, or one that only captures.
    """
    dynamic = False if asked.dynamic is None else asked.dynamic
    if asked.backend != "inductor":
        if asked.backend == "cudagraphs":
            raise ValueError(
                'compile_config.backend="cudagraphs" captures steps, which DiffKVCache does already; use "inductor".'
            )
        mode = None if asked.mode in _default_modes() else asked.mode
        return CompileConfig(asked.fullgraph, dynamic, asked.backend, mode, asked.options)
    # imported here, as importing it is slow
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if asked.mode is not None and asked.mode not in modes:
        raise ValueError(f"compile_config.mode={asked.mode!r} is unknown; use one of {sorted(modes)} or None.")
    if asked.options and asked.mode not in _default_modes():
        raise ValueError(
            "compile_config sets both mode and options, which torch.compile does not accept together; set only one."
        )
    options = {**modes.get(asked.mode, {}), **(asked.options or {}), _CUDAGRAPHS: False}
    return CompileConfig(asked.fullgraph, dynamic, "inductor", None, options)


def _default_modes() -> tuple[str | None, ...]:
    """Returns the modes that at most make the compiler capture graphs, including `CompileConfig`'s default."""
    return None, "default", CompileConfig().mode


def compiled_forward(model: Any, asked: CompileConfig, get_compiled_call: Callable) -> Callable | None:
    """Returns the forward of `model`, which compiles on its first call, or None if it cannot be compiled.

    Args:
        asked: the user's compile configuration.
        get_compiled_call: Transformers' method, which keeps one compiled forward per model.

    Raises:
        ValueError: `asked` cannot be used (`within_graph`).
    """
    config = within_graph(asked)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        _logger.warning("compile_config is not used: %s cannot be compiled", type(quantizer).__name__)
        return None
    return None if config in _failed.get(model, ()) else get_compiled_call(model, config)


def not_compiled(model: Any, asked: CompileConfig, error: Exception) -> None:
    """Warns that compiling failed, and remembers it."""
    _failed.setdefault(model, []).append(within_graph(asked))
    # a backend's error is wrapped, and messages are long
    cause = getattr(error, "inner_exception", error)
    reason = [type(cause).__name__, *str(cause).strip().splitlines()[:1]]
    _logger.warning(
        "the forward is not compiled as compile_config requests; decode steps are captured uncompiled: %s",
        ": ".join(reason),
    )
