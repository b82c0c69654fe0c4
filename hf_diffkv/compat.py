"""Private names of Transformers, by the feature that needs them, as of release 5.24.

If a release lacks a name or changes its parameters, the feature is disabled with a warning, or with an error if the
feature is requested. No other module uses such a name without checking here.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from torch import Tensor

Wrap = Callable[[Callable], Callable]
# features whose loss has been reported
_said: set[Feature] = set()


@dataclass(frozen=True)
class PrivateName:
    """A private function or attribute.

    Attributes:
        owner: module, class or function that mentions the name: "module", "module:Class.function".
        parameters: a function's parameters except self, with "..." for any that follow; None for an attribute that the
            owner has or the class's `__init__` sets.
    """

    owner: str
    name: str
    parameters: str | None = None

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2].rpartition('.')[2]}.{self.name}"

    def found(self) -> bool:
        """Returns whether the installed release has this name with these parameters."""
        owner = _resolved(self.owner)
        if self.parameters is None:
            return hasattr(owner, self.name) or _mentions(owner, self.name)
        given, wanted = parameters_of(getattr(owner, self.name, None)), self.parameters.split()
        if wanted[-1:] == ["..."]:
            return given is not None and given[: len(wanted) - 1] == wanted[:-1]
        return given == wanted


@dataclass(frozen=True)
class Feature:
    """A feature that needs private names.

    Attributes:
        lost: description of what is lost without them, and of the remedy.
        since: first release of Transformers that has them.
    """

    lost: str
    names: tuple[PrivateName, ...]
    since: tuple[int, int] = (0, 0)

    def missing(self) -> list[str]:
        """Returns missing or changed names as "Owner.name"; none if the release is older than the feature."""
        if self._is_older():
            return []
        return [str(name) for name in self.names if not name.found()]

    def available(self) -> bool:
        """Returns whether no name is missing, and warns once otherwise."""
        missing = self.missing()
        if missing and self not in _said:
            _said.add(self)
            warnings.warn(self._complaint(missing), stacklevel=3)
        return not missing

    def require(self) -> None:
        """Raises `ImportError` if a name is missing, or if the release is older than the feature."""
        if self._is_older():
            needed = ".".join(map(str, self.since))
            raise ImportError(
                f"this needs transformers>={needed}, but this is {_version()}, so {self.lost}, or upgrade transformers."
            )
        missing = self.missing()
        if missing:
            raise ImportError(self._complaint(missing))

    def _is_older(self) -> bool:
        return tuple(int(part) for part in _version().split(".")[:2]) < self.since

    def _complaint(self, missing: list[str]) -> str:
        return (
            f"transformers {_version()} changed {', '.join(missing)}, so {self.lost}; please report it with the "
            "version number."
        )


def _version() -> str:
    import transformers

    return transformers.__version__


def _resolved(owner: str) -> Any:
    """Returns the module or object `owner`, or None if it does not exist."""
    module, _, path = owner.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    return found


def _mentions(owner: Any, name: str) -> bool:
    """Returns whether the code of a function, or of a class's `__init__`, has `name` as an attribute or a string."""
    function = owner.__init__ if isinstance(owner, type) else owner
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code is not None and name in (*code.co_names, *code.co_consts)


def parameters_of(function: Any) -> list[str] | None:
    """Returns the names of a function's parameters without `self`; None if the function is None."""
    if function is None:
        return None
    return [name for name in inspect.signature(function).parameters if name != "self"]


def names_of(owner: str, *attributes: str, **functions: str) -> tuple[PrivateName, ...]:
    """Returns the private names of `owner`: attributes, and functions with their parameters."""
    of_functions = (PrivateName(owner, name, parameters) for name, parameters in functions.items())
    return (*(PrivateName(owner, name) for name in attributes), *of_functions)


# name of the cache argument: before release 5.24, and since
CACHE_NAMES = ("past_key_values", "cache")
_GENERATION_MIXIN = "transformers.generation.utils:GenerationMixin"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_SLIDING = "transformers.cache_utils:DynamicSlidingWindowLayer"

GENERATE = Feature(
    'generate() does not take cache_implementation="diffkv"; pass a DiffKVCache(model.config) and call '
    "model.set_attn_implementation('diffkv')",
    names_of(_GENERATION_MIXIN, _prepare_cache_for_generation="generation_config model_kwargs ..."),
)
SETTING_BACK = Feature(
    "generate() leaves models on the 'diffkv' attention, and does not check that they use the cache they are given; "
    "call model.set_attn_implementation afterwards",
    names_of(
        _GENERATION_MIXIN,
        generate="inputs ...",
        _update_model_kwargs_for_generation="outputs model_kwargs ...",
    ),
)
OWN_CACHE = Feature(
    "generate() mistakes a cache that it made itself for one of the user's, and checks for the end of a text more "
    "often",
    names_of(f"{_GENERATION_MIXIN}._prepare_cache_for_generation", "_is_user_defined"),
)
PROMPTS = Feature(
    "generate() does not compare a prompt with the tokens that a cache holds; pass prompts that continue them",
    names_of(
        _GENERATION_MIXIN,
        _prefill="input_ids generation_config model_kwargs ...",
        prepare_inputs_for_generation="input_ids next_sequence_length ...",
    ),
)
MASK_LENGTH = Feature(
    "generate() does not compare prompts without padding with the length of a cache; pass prompts that continue it",
    names_of(f"{_GENERATION_MIXIN}.generate", "_mask_length"),
    since=(5, 23),
)
GRAPHS = Feature(
    "decode steps on a CUDA device are not captured, which is slower",
    (
        *names_of(_GENERATION_MIXIN, _valid_auto_compile_criteria="model_kwargs generation_config"),
        *names_of(_MODEL, get_compiled_call="compile_config"),
    ),
)
SLIDING_GRAPHS = Feature(
    "decode steps of models with sliding windows are not captured, which is slower",
    names_of(
        _SLIDING,
        "cumulative_length",
        "record_past",
        update="key_states value_states ...",
        get_seq_length="",
        get_mask_sizes="query_length",
    ),
)
ATTENTION = Feature(
    "a model's attention is unknown, and not restored after it was switched to 'diffkv'; call "
    "model.set_attn_implementation",
    names_of("transformers.configuration_utils:PreTrainedConfig", "_attn_implementation"),
)
SWITCHING = Feature(
    "models whose attention cannot be switched are not refused when a cache is made for them",
    names_of(_MODEL, "_can_set_attn_implementation"),
)
UNREGISTERING = Feature(
    "hf_diffkv.unregister() leaves its attention functions registered",
    (
        *names_of("transformers:AttentionInterface", "_global_mapping"),
        *names_of("transformers:AttentionMaskInterface", "_global_mapping"),
    ),
)
STATEFUL = Feature(
    "several questions about one text are asked one after another, which is slower",
    names_of(_MODEL, "_is_stateful"),
)
BATCHING_BY_NAME = Feature(
    'continuous batching does not take cache_implementation="diffkv"; leave it out',
    names_of(
        _GENERATION_MIXIN,
        init_continuous_batching="generation_config ...",
        generate_batch="inputs generation_config ...",
    ),
)


class Wrapped:
    """Wrapped methods of Transformers' classes, and their originals."""

    def __init__(self) -> None:
        self.originals: dict[tuple[type, str], Callable] = {}

    def wrap(self, owner: type, name: str, wrap: Wrap) -> None:
        """Replaces a method of `owner` or its base class with `wrap(method)`."""
        owner = next(base for base in owner.__mro__ if name in vars(base))
        method = self.originals[owner, name] = getattr(owner, name)
        wrapper: Any = wraps(method)(wrap(method))
        wrapper._diffkv = True
        setattr(owner, name, wrapper)

    def undo(self) -> None:
        """Restores all methods, except any that other libraries have wrapped; our wrapper then passes calls on."""
        for (owner, name), method in self.originals.items():
            if getattr(getattr(owner, name), "_diffkv", False):
                setattr(owner, name, method)
        self.originals.clear()


@cache
def cache_argument() -> str:
    """Returns the name of this release's cache argument of a model or `generate()`; the other may work too."""
    from transformers.generation.utils import GenerationMixin

    taken = parameters_of(inspect.unwrap(GenerationMixin.prepare_inputs_for_generation)) or []
    return next((name for name in reversed(CACHE_NAMES) if name in taken), CACHE_NAMES[0])


def passing(given: Any) -> dict[str, Any]:
    """Returns a cache as a keyword argument for a model or `generate()`."""
    return {cache_argument(): given}


def passed(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among arguments, possibly under the name that older model code uses, or None."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def attention_of(model_config: Any) -> str | None:
    """Returns the attention implementation in a configuration, or None if it is unknown."""
    return model_config._attn_implementation if ATTENTION.available() else None


def has_attention(model_config: Any, name: str) -> bool:
    """Returns whether a configuration has the attention implementation `name`; False if that is unknown."""
    return getattr(model_config, "_attn_implementation", None) == name


def is_stock_attention(name: str | None) -> bool:
    """Returns whether an attention implementation is Transformers' own, judging by its name."""
    return name is not None and (name in ("eager", "sdpa", "flex_attention") or "flash" in name)


def attentions_of(model: Any) -> list[tuple[Any, str | None]]:
    """Returns the configurations of `model` and its parts with their attention implementations, parts after owners."""
    owners = (model, *(part for part in model.modules() if hasattr(getattr(part, "config", None), "sub_configs")))
    found: dict[int, Any] = {}
    for owner in owners:
        # the last position counts, as a configuration seen before may be part of another one
        for config in with_parts(owner.config):
            found.pop(id(config), None)
            found[id(config)] = config
    return [(config, attention_of(config)) for config in found.values()]


def with_parts(config: Any) -> Iterator[Any]:
    """Yields a configuration and those of its parts."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from with_parts(getattr(config, name))


def set_attentions(attentions: list[tuple[Any, str | None]]) -> None:
    """Restores the attention implementations that `attentions_of` returned."""
    if ATTENTION.available():
        for config, name in attentions:
            # also sets its parts, which come later
            config._attn_implementation = name


def can_switch(model: Any) -> bool:
    """Returns whether the attention of `model` can be switched; True if that is unknown."""
    # configurations do not say
    if not hasattr(model, "set_attn_implementation"):
        return True
    return not SWITCHING.available() or model._can_set_attn_implementation()


def is_stateful(model: Any) -> bool:
    """Returns whether a model has, or may have, a state besides keys and values."""
    return not STATEFUL.available() or getattr(model, "_is_stateful", False)


def forget_attention(*names: str) -> None:
    """Undoes the registration of attention and mask functions."""
    if UNREGISTERING.available():
        from transformers import AttentionInterface, AttentionMaskInterface

        for interface in (AttentionInterface, AttentionMaskInterface):
            for name in names:
                interface._global_mapping.pop(name, None)


def disown(cache: Any) -> None:
    """Makes `generate()` treat a given cache like one that it created itself."""
    if OWN_CACHE.available():
        cache._is_user_defined = False


def text_length(arguments: Mapping[str, Any], generation_config: Any = None) -> int | None:
    """Returns the number of tokens in the whole text of a call, including cached ones.

    Args:
        arguments: arguments of the model, with a mask or position ids.
        generation_config: configuration of the `generate()` call, or None.

    Returns:
        The number of tokens; None if it cannot be determined.
    """
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    # newer releases drop a mask without padding but note its length
    noted = getattr(generation_config, "_mask_length", None) if mask is None else None
    shapes = (given.shape for given in (mask, positions) if isinstance(given, Tensor) and given.ndim < 4)
    return next((shape[-1] for shape in shapes), None) if noted is None else noted


def is_paused_here(manager: Any) -> bool:
    """Returns whether this thread has paused a continuous batching manager; releases before 5.24 cannot pause it."""
    asked = getattr(getattr(manager, "background_thread_status", None), "is_pause_requested", None)
    return asked is not None and asked(local=True)


def kept_manager(model: Any) -> Any:
    """Returns the continuous batching manager that a model keeps for its next call, or None."""
    return getattr(model, "_cached_continuous_batching_manager", None)
