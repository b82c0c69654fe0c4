"""Names that are private to Transformers, by what needs them. They were read in release 5.24.

What a release lacks, or has with other parameters, disables what needs it: a warning, or an error where it is asked
for, says both. No other module relies on such a name without asking here.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

Wrap = Callable[[Callable], Callable]
# features whose loss was said
_said: set[Feature] = set()


@dataclass(frozen=True)
class PrivateName:
    """A function, or an attribute of what has it.

    Attributes:
        owner: a module, or a class in it or a function that mentions the name: "module", "module:Class.function".
        name: what it is called there.
        parameters: of a function, without self, "..." for any that follow; None for an attribute: it is there, or set
            by the class's `__init__`.
    """

    owner: str
    name: str
    parameters: str | None = None

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2].rpartition('.')[2]}.{self.name}"

    def found(self) -> bool:
        """Whether the installed release has it so."""
        owner = _resolved(self.owner)
        if self.parameters is None:
            return hasattr(owner, self.name) or _mentions(owner, self.name)
        given, wanted = parameters_of(getattr(owner, self.name, None)), self.parameters.split()
        if wanted[-1:] == ["..."]:
            return given is not None and given[: len(wanted) - 1] == wanted[:-1]
        return given == wanted


@dataclass(frozen=True)
class Feature:
    """What needs private names.

    Attributes:
        lost: what is not there without them, and what to do.
        names: all of which it needs.
        since: release from which on Transformers has them.
    """

    lost: str
    names: tuple[PrivateName, ...]
    since: tuple[int, int] = (0, 0)

    def missing(self) -> list[str]:
        """What the installed release does not have as it is relied on, as "Owner.name"; an older one need not."""
        if self._is_older():
            return []
        return [str(name) for name in self.names if not name.found()]

    def available(self) -> bool:
        """Whether all names are there; where not, warns, once."""
        missing = self.missing()
        if missing and self not in _said:
            _said.add(self)
            warnings.warn(self._complaint(missing), stacklevel=3)
        return not missing

    def require(self) -> None:
        """Raises `ImportError` where a name is missing, or the release is older than the feature."""
        if self._is_older():
            needed = ".".join(map(str, self.since))
            raise ImportError(
                f"this needs transformers>={needed}, and this is {_version()}, so {self.lost}, or upgrade transformers."
            )
        missing = self.missing()
        if missing:
            raise ImportError(self._complaint(missing))

    def _is_older(self) -> bool:
        return tuple(int(part) for part in _version().split(".")[:2]) < self.since

    def _complaint(self, missing: list[str]) -> str:
        return (
            f"transformers {_version()} changed {', '.join(missing)}, so {self.lost}; please report it with the "
            "release's number."
        )


def _version() -> str:
    import transformers

    return transformers.__version__


def _resolved(owner: str) -> Any:
    """None where it is not there."""
    module, _, path = owner.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    return found


def _mentions(owner: Any, name: str) -> bool:
    """Whether the code of a function, or of a class's `__init__`, has `name` as an attribute or a string."""
    function = owner.__init__ if isinstance(owner, type) else owner
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code is not None and name in (*code.co_names, *code.co_consts)


def parameters_of(function: Any) -> list[str] | None:
    """Names of a function's parameters but `self`; None where there is no such function."""
    if function is None:
        return None
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _names(owner: str, *attributes: str, **functions: str) -> tuple[PrivateName, ...]:
    """Attributes of `owner`, and its functions with their parameters."""
    of_functions = (PrivateName(owner, name, parameters) for name, parameters in functions.items())
    return (*(PrivateName(owner, name) for name in attributes), *of_functions)


# what a cache is called as an argument: before release 5.24, and since
CACHE_NAMES = ("past_key_values", "cache")
_GENERATION_MIXIN = "transformers.generation.utils:GenerationMixin"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_SLIDING = "transformers.cache_utils:DynamicSlidingWindowLayer"
_CB = "transformers.generation.continuous_batching"
_API, _ALLOCATORS = f"{_CB}.continuous_api", f"{_CB}.cache_allocators"
_ALLOCATOR = f"{_ALLOCATORS}:SlidingAttentionCacheAllocator"
_PROCESSORS = f"{_CB}.cb_logits_processors"
_SERVING = "transformers.cli.serving"

GENERATE = Feature(
    'generate() does not take cache_implementation="diffkv"; pass a DiffKVCache(model.config) and call '
    "model.set_attn_implementation('diffkv')",
    _names(_GENERATION_MIXIN, _prepare_cache_for_generation="generation_config model_kwargs ..."),
)
OWN_CACHE = Feature(
    "generate() takes a cache that it made itself for one of the user's, and looks for the end of a text more often",
    _names(f"{_GENERATION_MIXIN}._prepare_cache_for_generation", "_is_user_defined"),
)
PROMPTS = Feature(
    "generate() does not compare a prompt with the tokens that a cache holds; pass prompts that continue them",
    _names(
        _GENERATION_MIXIN,
        _prefill="input_ids generation_config model_kwargs ...",
        prepare_inputs_for_generation="input_ids next_sequence_length ...",
    ),
)
MASK_LENGTH = Feature(
    "generate() does not compare prompts without padding with the length of a cache; pass prompts that continue it",
    _names(f"{_GENERATION_MIXIN}.generate", "_mask_length"),
    since=(5, 23),
)
GRAPHS = Feature(
    "decode steps on a CUDA device are not captured, which is slower",
    (
        *_names(_GENERATION_MIXIN, _valid_auto_compile_criteria="model_kwargs generation_config"),
        *_names(_MODEL, get_compiled_call="compile_config"),
    ),
)
SLIDING_GRAPHS = Feature(
    "decode steps of models with sliding windows are not captured, which is slower",
    _names(
        _SLIDING,
        "cumulative_length",
        "record_past",
        update="key_states value_states ...",
        get_seq_length="",
        get_mask_sizes="query_length",
    ),
)
ATTENTION = Feature(
    "the attention that a model has is not known, and not set back after it was switched to 'diffkv'; call "
    "model.set_attn_implementation",
    _names("transformers.configuration_utils:PreTrainedConfig", "_attn_implementation"),
)
SWITCHING = Feature(
    "models whose attention cannot be switched are not refused when a cache is made for them",
    _names(_MODEL, "_can_set_attn_implementation"),
)
UNREGISTERING = Feature(
    "hf_diffkv.unregister() leaves its attention functions registered",
    (
        *_names("transformers:AttentionInterface", "_global_mapping"),
        *_names("transformers:AttentionMaskInterface", "_global_mapping"),
    ),
)
STATEFUL = Feature(
    "several questions about one text are asked one after another, which is slower",
    _names(_MODEL, "_is_stateful"),
)
BATCHING_BY_NAME = Feature(
    'continuous batching does not take cache_implementation="diffkv"; leave it out',
    _names(_GENERATION_MIXIN, init_continuous_batching="generation_config ..."),
)
BATCHING = Feature(
    'continuous batching does not go with cache_implementation="diffkv"; leave it out, or use generate()',
    (
        *_names(f"{_GENERATION_MIXIN}.init_continuous_batching", "_cached_continuous_batching_manager"),
        *_names(
            f"{_API}:ContinuousBatchingManager",
            __init__="model generation_config continuous_batching_config workload_hints",
            switch_to_cb_friendly_attn="model auto_switch_to_flash",
            _create_batch_processor="",
            _run_generation_loop="...",
            _handle_critical_error="error batch_processor",
            warmup="",
            start="",
            add_request="input_ids request_id max_new_tokens streaming record_timestamps eos_token_id ...",
        ),
        *_names(f"{_API}:OutputRouter", "result_handlers", deliver="output"),
        *_names(f"{_API}:BackgroundThreadStatus", "fatal_error", record_fatal_error="error"),
        *_names(
            f"{_API}:ContinuousBatchProcessor",
            __init__="cache config generation_config continuous_batching_config logit_processor input_queue "
            "cancel_queue output_router background_thread_status model_device model_dtype scheduler distributed_helper",
            _handle_request_error="error state",
            _generation_step="model",
            update_batch="",
            reset="",
        ),
        *_names(
            f"{_PROCESSORS}:ContinuousBatchingLogitsProcessor",
            fill_defaults="int32_tensor",
            prepare_tensor_args="requests_with_new_token",
            __call__="scores tensor_arg",
        ),
        *_names(
            f"{_PROCESSORS}:ContinuousBatchingLogitsProcessorList",
            *("logits_processor", "tensors_required", "do_processing"),
        ),
        *_names(f"{_PROCESSORS}:ContinuousBatchingLogitsProcessorList._retrieve_processors_kwargs", "supported_keys"),
        *_names(f"{_CB}.scheduler", "SCHEDULER_MAPPING"),
        *_names(
            f"{_CB}.scheduler:Scheduler",
            __init__="cache safety_margin max_requests_per_batch",
            add_waiting_request="state",
            schedule_batch="token_budget cache_budget",
            finish_request="request_id",
            clear_cancelled_requests="",
            reset="",
            _get_waiting_candidates="",
            _schedule_request="state request_tokens token_budget request_ids_to_remove_from_waiting",
            _infer_request_tokens="state request_ids_to_remove_from_waiting",
        ),
        *_names(
            f"{_ALLOCATORS}:CachePool",
            __init__="num_sectors num_allocators num_reserved_sectors",
            free_blocks="index block_ids",
        ),
        *_names(
            _ALLOCATOR,
            __init__="index config num_key_value_heads cache_dtype page_size layer_indices allow_block_sharing",
            register_cache_tensor="bytes_per_sector non_trash_bytes cache_tensor pool",
            allocate_cache_to_request="request_id past_length query_length",
            get_read_indices="request_id past_length query_length",
            get_write_indices="request_id past_length query_length",
            get_seqlen_k="past_length query_length",
            free_blocks="request_id no_cache",
            fork_blocks="source_request_id dest_request_id past_length",
            copy_blocks="source_block_ids dest_block_ids",
            update="key_states value_states layer_idx read_index write_index",
        ),
        *_names(f"{_CB}.initialization", update_cb_config_after_cache_creation="cb_config num_blocks max_batch_tokens"),
        *_names(f"{_CB}.initialization", "ATTN_TYPE_TO_ALLOCATOR", group_layers_by_attn_type="config"),
        *_names(f"{_CB}.cache", "PagedAttentionCache"),
        *_names(f"{_CB}.distributed:DistributedHelper", "tp_size", "cpu_comm_group"),
        *_names(f"{_CB}.requests", "RequestStatus"),
        *_names(
            f"{_CB}.requests:RequestState",
            *("request_id", "initial_tokens", "max_new_tokens", "num_children", "_new_tokens_limit", "_status"),
            *("generated_tokens", "position_offset", "_eos_token_ids"),
            *("logit_processor_kwargs", "logprobs", "_true_initial_tokens"),
            to_generation_output="",
            create_equivalent_initial_request="",
        ),
    ),
    since=(5, 23),
)
SERVER = Feature(
    "hf-diffkv serve does not work; use generate_batch",
    _names(
        f"{_SERVING}.utils",
        *("ReasoningText", "ToolCall"),
        build_response_parser="processor model input_ids tools",
        response_events_to_chunks="events",
    ),
    since=(5, 23),
)


class Wrapped:
    """Methods of Transformers' classes that are wrapped, and what they were."""

    def __init__(self) -> None:
        self.originals: dict[tuple[type, str], Callable] = {}

    def wrap(self, owner: type, name: str, wrap: Wrap) -> None:
        """Puts `wrap(method)` in the place of a method of `owner` or its base class."""
        owner = next(base for base in owner.__mro__ if name in vars(base))
        method = self.originals[owner, name] = getattr(owner, name)
        wrapper: Any = wraps(method)(wrap(method))
        wrapper._diffkv = True
        setattr(owner, name, wrapper)

    def undo(self) -> None:
        """Puts all back, but where another library wrapped a method since: our part of the chain passes calls on."""
        for (owner, name), method in self.originals.items():
            if getattr(getattr(owner, name), "_diffkv", False):
                setattr(owner, name, method)
        self.originals.clear()


@cache
def cache_argument() -> str:
    """What this release calls a cache that is given to a model or to `generate()`; the other name may go as well."""
    from transformers.generation.utils import GenerationMixin

    taken = parameters_of(inspect.unwrap(GenerationMixin.prepare_inputs_for_generation)) or []
    return next((name for name in reversed(CACHE_NAMES) if name in taken), CACHE_NAMES[0])


def passing(given: Any) -> dict[str, Any]:
    """A cache as the argument of a model or of `generate()`."""
    return {cache_argument(): given}


def passed(arguments: Mapping[str, Any]) -> Any:
    """The cache among arguments, which older code of a model may call by its former name; None where there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def attention_of(model_config: Any) -> str | None:
    """The attention implementation that a configuration says; None where that is not known."""
    return model_config._attn_implementation if ATTENTION.available() else None


def can_switch(model: Any) -> bool:
    """Whether the attention of `model` goes through Transformers' interface; True where that is not known."""
    # a configuration says nothing of it
    if not hasattr(model, "set_attn_implementation"):
        return True
    return not SWITCHING.available() or model._can_set_attn_implementation()


def is_stateful(model: Any) -> bool:
    """Whether a model holds a state beside keys and values, or that is not known."""
    return not STATEFUL.available() or getattr(model, "_is_stateful", False)


def forget_attention(*names: str) -> None:
    """Undoes the registration of attention and mask functions."""
    if UNREGISTERING.available():
        from transformers import AttentionInterface, AttentionMaskInterface

        for interface in (AttentionInterface, AttentionMaskInterface):
            for name in names:
                interface._global_mapping.pop(name, None)


def disown(cache: Any) -> None:
    """Has `generate()` treat a cache that was handed to it as one that it made itself."""
    if OWN_CACHE.available():
        cache._is_user_defined = False


def text_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Tokens of the whole text, those in the cache included, by its mask; None where there is none."""
    mask = model_kwargs.get("attention_mask")
    # newer releases drop a mask without padding before they come here, and note its length
    return getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]


def kept_manager(model: Any) -> Any:
    """The manager of continuous batching that a model keeps for its next call; None where there is none."""
    return getattr(model, "_cached_continuous_batching_manager", None)
