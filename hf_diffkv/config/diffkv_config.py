"""`DiffKVConfig`: precisions, thresholds, window. Uses no tensors and no Transformers models."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from ..arguments import similar
from ..heads import hub
from ..precision import Precision, as_precision, is_integer
from ..replacing import save_text
from . import files as config_files
from .checks import (
    HeadPrecisions,
    Options,
    Threshold,
    as_bytes,
    as_count,
    as_head_precisions,
    as_threshold,
    checked_options,
    paired,
    payload_bits,
)
from .presets import DEFAULT_PRESET, LEVEL_FIELDS, PRESETS, SAFE, close_preset, one_level, preset_named
from .until_full import AUTO, as_until_full, check_until_full, precise_of, rungs_of, smaller_first

METADATA_BITS = (16, 32)
# arguments that choose a configuration for a model
_CHOICES = ("preset", "target_ratio")
# attributes that are not fields; the second holds the names of the given fields from `__new__` to `__post_init__`
_CALIBRATION_ATTRIBUTE = "_calibration"
_GIVEN_ATTRIBUTE = "_given"

ThresholdLike = Union[float, Sequence[float], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class DiffKVConfig:
    """Configuration of a `DiffKVCache` (algorithm: DiffKV, SOSP 2025, sections 4 and 5).

    After N tokens, a token is stored at `high` if the mean attention it has received is at least `alpha_high / N`, at
    `low` if it is at least `alpha_low / N`, and otherwise pruned.

    The defaults depend on whether any of `high`, `low`, `alpha_high`, `alpha_low`, `head_precisions`, `policy` and
    `policy_options` is given. If none is, they come from the preset "balanced", the fallback of `DiffKVCache(model)`:
    K5V4 for all tokens, a `window` of 32, `adaptive_rounding`, 16 `metadata_bits`. Otherwise those in the signature
    apply: two levels, K8V4 and K4V2, and a `window` of 64. `paper` returns the paper's configuration.

    Args:
        high: precision of tokens with high significance: a `Precision` or its name, for example "K8V4".
        low: precision of tokens with low significance; must not need more bits than `high`.
        alpha_high: threshold for the high level: one number, one per compressed layer, or one per layer and KV head.
        alpha_low: threshold for the low level, in the same forms, nowhere above `alpha_high`; 0 disables pruning.
        head_precisions: precision of each KV head in each compressed layer, used for all of the head's tokens, with at
            most two precisions per layer. A None entry applies `high`, `low` and the thresholds in that layer; None
            applies them in every layer. `with_ratio` sets this field.
        window: number of newest tokens of each request kept uncompressed in the model's dtype; at least 1.
        sinks: number of first tokens of each request that are also kept uncompressed and never pruned.
        policy: name of the rule that turns significance into levels (docs/policies.md); `alpha_high` and `alpha_low`
            apply only to `"diffkv"`.
        policy_options: options of the policy by name.
        observation_window: number of a prompt's final queries that count towards significance; None counts all. Unused
            if no level depends on significance (`selects`).
        rotate: whether keys and values are rotated by a Hadamard matrix with random signs before they are stored. This
            spreads large channels over all, so that fewer bits suffice. It costs two small products per layer and step,
            but no memory.
        center: whether the mean key of each request and KV head is subtracted from its stored keys. Layers with
            attention sinks or a softcap are not centred.
        adaptive_rounding: whether keys of up to 6 bits are rounded for the least change in logits rather than to the
            nearest code (`ops/rounding`): keys of a prompt for its queries, generated keys for the model's query
            moments, if measured. It costs no memory, except under a budget without measured moments.
        metadata_bits: 32 or 16: bits of a quantisation group's scale and zero point together, and of a stored token's
            significance and of its position. With 16, scales have a 5-bit mantissa and significance is rounded
            randomly. Neither significance nor position is stored if no level depends on significance (`selects`).
        page_bytes: maximum size of a unified page in bytes; None chooses the size near 6 KiB that wastes least.
        max_bytes: byte budget per device: a number, a size such as "3GB", or a share such as "80%" of the memory that
            is free when a cache stores its first tokens; None means no limit.
        until_full: precision of all tokens until `max_bytes` is full. After that, whole heads of a request are lowered
            to their final precision, least harmful first; once all are lowered, a `MemoryError` ends generation. "auto"
            is K8V8 if no level depends on significance and some head ends at fewer bits, else None; heads go from K8V8
            via K6V5 to a final precision of at most K5V4, and via K4V4 to fewer bits. If a precision is named, heads go
            straight to their final one, and a layer whose heads have two final precisions starts at the higher one.
            None raises thresholds and prunes tokens instead.
        cuda_graphs: whether `generate()` on a CUDA device captures a decode step once and replays it. With a
            `compile_config`, the forward is compiled first.

    Raises:
        ValueError: a value is out of range, thresholds are out of order, or a field does not exist. The message names
            the argument.
    """

    # defaults if levels are given; otherwise the default preset's replace them (`__post_init__`)
    high: Precision = Precision(8, 4)
    low: Precision = Precision(4, 2)
    alpha_high: Threshold = 1.0
    alpha_low: Threshold = 0.0
    head_precisions: HeadPrecisions | None = None
    window: int = 64
    sinks: int = 4
    policy: str = "diffkv"
    policy_options: Mapping[str, Any] = field(default_factory=Options)
    observation_window: int | None = None
    rotate: bool = True
    center: bool = True
    adaptive_rounding: bool = False
    metadata_bits: int = 32
    page_bytes: int | None = None
    max_bytes: int | str | None = None
    until_full: Precision | str | None = AUTO
    cuda_graphs: bool = True

    if TYPE_CHECKING:
        # accepted types; the fields above have the types after conversion
        def __init__(
            self,
            high: Precision | str = ...,
            low: Precision | str = ...,
            alpha_high: ThresholdLike = ...,
            alpha_low: ThresholdLike = ...,
            head_precisions: Sequence[Sequence[Precision | str] | None] | None = ...,
            window: int = ...,
            sinks: int = ...,
            policy: str = ...,
            policy_options: Mapping[str, Any] = ...,
            observation_window: int | None = ...,
            rotate: bool = ...,
            center: bool = ...,
            adaptive_rounding: bool = ...,
            metadata_bits: int = ...,
            page_bytes: int | None = ...,
            max_bytes: int | str | None = ...,
            until_full: Precision | str | None = ...,
            cuda_graphs: bool = ...,
        ) -> None: ...
    else:

        def __new__(cls, *args, **kwargs):
            # suggests the field that was probably meant, which the dataclass's constructor does not
            cls._check_names(kwargs)
            made = super().__new__(cls)
            # keeps the names, as a given value may equal the default; copying and unpickling pass none
            if args or kwargs:
                names = [field.name for field in dataclasses.fields(cls)]
                vars(made)[_GIVEN_ATTRIBUTE] = {*names[: len(args)], *kwargs}
            return made

    def __post_init__(self) -> None:
        given = vars(self).pop(_GIVEN_ATTRIBUTE, set())
        if not LEVEL_FIELDS & given:
            for name in PRESETS[DEFAULT_PRESET].keys() - given:
                object.__setattr__(self, name, PRESETS[DEFAULT_PRESET][name])
        for name in ("high", "low"):
            object.__setattr__(self, name, as_precision(name, getattr(self, name)))
        for name in ("alpha_high", "alpha_low"):
            object.__setattr__(self, name, as_threshold(name, getattr(self, name)))
        self._check_order()
        object.__setattr__(self, "head_precisions", as_head_precisions(self.head_precisions))
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", as_bytes("max_bytes", self.max_bytes))
        object.__setattr__(self, "until_full", as_until_full(self.until_full))
        for name in ("window", "observation_window", "page_bytes"):
            if getattr(self, name) is not None or name == "window":
                object.__setattr__(self, name, as_count(name, getattr(self, name)))
        for name in ("rotate", "center", "adaptive_rounding", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        object.__setattr__(self, "sinks", as_count("sinks", self.sinks, least=0))
        if not is_integer(self.metadata_bits) or self.metadata_bits not in METADATA_BITS:
            raise ValueError(f"metadata_bits={self.metadata_bits!r} is not supported; use one of {METADATA_BITS}.")
        object.__setattr__(self, "metadata_bits", int(self.metadata_bits))
        object.__setattr__(self, "policy_options", checked_options(self.policy, self.policy_options))
        if payload_bits(self.low) > payload_bits(self.high):
            raise ValueError(
                f"low={self.low.name} needs more bits per token than high={self.high.name}; swap the two precisions."
            )
        if self.head_precisions is not None and self.policy != "diffkv":
            raise ValueError(f"head_precisions leaves policy={self.policy!r} nothing to choose; leave one of them out.")
        check_until_full(self)

    @property
    def selects(self) -> bool:
        """Whether a token's level depends on its significance.

        False if all tokens of a head get the same precision regardless of the attention they receive. This requires the
        policy "diffkv" and either no `max_bytes` or tokens that are `precise` until it is full. It also requires
        `head_precisions` for all layers and heads, or an `alpha_low` of 0 everywhere and, unless both precisions are
        equal, an `alpha_high` of 0 or infinity. Such layers store neither significance nor positions and spend no work
        on them, even if other layers of the cache do (`of_layer`).
        """
        if self.policy != "diffkv" or (self.max_bytes is not None and self.precise is None):
            return True
        if self.head_precisions is not None and None not in self.head_precisions:
            return False
        pairs = paired(self.alpha_low, self.alpha_high)
        return any(low > 0 or (0 < high < math.inf and self.high != self.low) for low, high in pairs or ())

    @property
    def precise(self) -> Precision | None:
        """Precision of all tokens until `max_bytes` is full; None without a budget, or if tokens are chosen to fit."""
        return None if self.max_bytes is None else precise_of(self)

    def check_layers(self, count: int) -> None:
        """Raises `ValueError` if thresholds or precisions are given for a different number of compressed layers."""
        for name in ("alpha_high", "alpha_low", "head_precisions"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                one = "None" if name == "head_precisions" else "one number"
                raise ValueError(
                    f"{name} has {len(value)} entries but {count} layers of this model are compressed; give {one} or "
                    f"{count} of them."
                )

    def of_layer(self, index: int) -> DiffKVConfig:
        """Returns the configuration of one compressed layer.

        Returns:
            A configuration without `head_precisions`, whose thresholds are one number or one per KV head. If heads have
            precisions, `alpha_high` is 0 for heads at `high` and infinite for heads at `low`. With `precise`, all heads
            start at `until_full` and step through `precisions_in_turn`; those with an infinite `alpha_high` end at
            `low`, the others at `high`.
        """
        if self.precise is not None:
            rungs = dict(vars(rungs_of(self, index)))
            first = rungs.pop("first")
            return dataclasses.replace(self, head_precisions=None, alpha_low=0.0, until_full=first, **rungs)
        if self.max_bytes is not None and self.until_full is not None:
            # what applies to all layers is decided by the whole configuration
            return dataclasses.replace(self, until_full=None).of_layer(index)
        chosen = None if self.head_precisions is None else self.head_precisions[index]
        if chosen is None:
            alphas = {name: getattr(self, name) for name in ("alpha_high", "alpha_low")}
            if self.head_precisions is None and not any(isinstance(value, tuple) for value in alphas.values()):
                return self
            alphas = {name: value[index] if isinstance(value, tuple) else value for name, value in alphas.items()}
            return dataclasses.replace(self, head_precisions=None, **alphas)
        low, high = self._pair(chosen)
        alpha_high = tuple(0.0 if precision == high else math.inf for precision in chosen)
        fields: dict[str, Any] = {"high": high, "low": low, "alpha_high": alpha_high, "alpha_low": 0.0}
        return dataclasses.replace(self, head_precisions=None, **fields)

    def _pair(self, chosen: tuple[Precision, ...]) -> tuple[Precision, Precision]:
        """Returns a layer's low and high precision; a layer with a single one joins the first pair that has it."""
        layers = (set(layer) for layer in self.head_precisions or () if layer is not None)
        pairs = [layer for layer in layers if len(layer) == 2]
        mine = {*chosen}
        found = mine if len(mine) == 2 else next((pair for pair in pairs if mine <= pair), mine)
        order = smaller_first(found)
        return order[0], order[-1]

    def _check_order(self) -> None:
        low, high = self.alpha_low, self.alpha_high
        pairs = paired(low, high)
        if pairs is None:
            raise ValueError(
                "alpha_low and alpha_high have different lengths; give each as one number, one per layer, "
                "or one per layer and head."
            )
        for a, b in pairs:
            if a > b:
                raise ValueError(f"alpha_low={a} is above alpha_high={b}; need 0 <= alpha_low <= alpha_high.")

    @classmethod
    def lossless(cls, **kwargs: Any) -> DiffKVConfig:
        """Returns a configuration that stores all tokens exactly, in the model's dtype, and prunes none."""
        return cls.paper(**{**one_level(Precision(16, 16)), **kwargs})

    @classmethod
    def paper(cls, **kwargs: Any) -> DiffKVConfig:
        """Returns the paper's configuration, without later additions such as sinks, rotation or centring."""
        return cls(**{**SAFE, "rotate": False, "center": False, "sinks": 0, "metadata_bits": 32, **kwargs})

    @classmethod
    def preset(cls, name: str, **kwargs: Any) -> DiffKVConfig:
        """Returns the configuration of a preset, a measured trade-off between memory and quality (docs/quality.md).

        Args:
            name: "quality", "balanced" or "small", from most to least memory.
            **kwargs: fields that override the preset.

        Raises:
            ValueError: the preset or a field does not exist.
        """
        cls._check_names(kwargs)
        return cls(**{**preset_named(name), **kwargs})

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        preset: str | None = None,
        target_ratio: float | None = None,
        **kwargs: Any,
    ) -> DiffKVConfig:
        """Chooses the configuration that suits a model.

        The first of these that exists is used: the configuration saved with the model's files, a precision for each
        head if measured, the settings that the papers publish for it, or `preset("balanced")`.

        Head measurements are looked up by the weights of a loaded model, in the user's cache folder and among the
        shipped ones (docs/calibration.md). If `kwargs` set levels (precisions, thresholds, a policy), the other level
        fields are the papers', by default two levels and thresholds that never prune.

        Args:
            model: a Transformers model, its `PretrainedConfig`, or the model's name or folder as a string.
            preset: name of a preset to use instead; for measured heads, it stands for a ratio.
            target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype, instead of a
                preset. It selects the best precision for each measured head, or else the best one for all heads
                (`presets.LADDER`), and needs the model or its configuration.
            **kwargs: fields that override the choice.

        Raises:
            ValueError: `model` is none of these, the preset does not exist, or `target_ratio` cannot be met.
        """
        from .choice import choose

        cls._check_names(kwargs, _CHOICES)
        chosen, calibration = choose(model, configuration_of(model), preset, target_ratio, kwargs, cls.from_dict)
        return with_calibration(cls(**{**chosen, **kwargs}), calibration)

    def with_ratio(self, target_ratio: float) -> DiffKVConfig:
        """Returns a copy with the `head_precisions` of lowest predicted loss within a ratio, without measuring.

        They are derived from each head's loss as measured by `hf-diffkv calibrate --ratio` and kept in `calibration`.

        Args:
            target_ratio: maximum ratio of a stored token's bytes to its bytes in the model's dtype, not counting
                windows.

        Raises:
            ValueError: the configuration has no such measurements, or the ratio cannot be met.
        """
        from ..heads.allocation import fields_for

        budget = self.max_bytes is not None and self.until_full is not None
        fields, calibration = fields_for(self.calibration, target_ratio, until_full=budget)
        return with_calibration(dataclasses.replace(self, **fields), calibration)

    @property
    def calibration(self) -> dict[str, Any] | None:
        """Measurements from which `hf-diffkv calibrate` chose the configuration (docs/calibration.md), or None.

        It is not a field, so comparisons ignore it and modified copies do not have it.
        """
        return vars(self).get(_CALIBRATION_ATTRIBUTE)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DiffKVConfig:
        """Builds a configuration from plain values. Raises `ValueError` for unknown keys.

        Missing keys take their defaults. If `values` comes from `to_dict` of an earlier release with fewer fields,
        however, the missing ones reproduce that release's behaviour: `rotate` and `center` False, `sinks` 0,
        `metadata_bits` 32.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"values is a {type(values).__name__}; it must be a dict of DiffKVConfig's fields.")
        values = config_files.completed(dict(values))
        cls._check_names(values)
        return cls(**values)

    @classmethod
    def _check_names(cls, values: Mapping[str, Any], others: tuple[str, ...] = ()) -> None:
        complaint = config_files.removed_field(values)
        if complaint is not None:
            raise ValueError(complaint)
        known = [field.name for field in dataclasses.fields(cls)] + list(others)
        unknown = sorted(set(values) - set(known))
        if unknown and unknown[0] in _CHOICES:
            raise ValueError(
                f"{unknown[0]} is not a field of DiffKVConfig because it depends on the model; pass it to "
                f"DiffKVCache(model, {unknown[0]}=...), cache_config or DiffKVConfig.for_model, without a DiffKVConfig."
            )
        if unknown:
            close = [match for name in unknown for match in similar(name, known)]
            hint = f" (did you mean {', '.join(map(repr, close))}?)" if close else ""
            raise ValueError(f"unknown DiffKV config keys {unknown}{hint}; known keys are {known}.")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, omitting fields that change nothing so that earlier releases can read them."""
        values = dataclasses.asdict(self)
        if isinstance(self.until_full, Precision):
            values["until_full"] = self.until_full.full_name
        elif self.max_bytes is None:
            del values["until_full"]
        layers = values.pop("head_precisions")
        if layers is not None:
            names = [[fields and Precision(**fields).full_name for fields in layer or ()] or None for layer in layers]
            values["head_precisions"] = names
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DiffKVConfig:
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"text is not a JSON object of DiffKVConfig's fields: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"a DiffKV config must be a JSON object of its fields, not a {type(values).__name__}.")
        return cls.from_dict(values)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *, push_to_hub: bool = False, repo_id: str | None = None, **kwargs: Any
    ) -> None:
        """Writes `diffkv_config.json` into `save_directory`, which is created if missing.

        Args:
            save_directory: folder to write to.
            push_to_hub: whether to upload it too, with the folder's `diffkv_queries.safetensors` if there is one.
            repo_id: repository to upload to; None uses the folder's name.
            **kwargs: keyword arguments for `push_to_hub`.

        Raises:
            OSError: the folder is not writable, or `push_to_hub` failed.
            ValueError: `save_directory` is not a folder, or there are `kwargs` without `push_to_hub=True`.
        """
        if kwargs and not push_to_hub:
            raise ValueError(f"{', '.join(kwargs)} can only be used with push_to_hub=True.")
        folder = config_files.new_folder(save_directory)
        text = config_files.to_text(self.to_dict(), self.calibration)
        save_text(text, folder / hub.CONFIG_NAME)
        if push_to_hub:
            queries = folder / hub.QUERIES_NAME
            beside = queries if queries.is_file() else None
            hub.push(text, repo_id or folder.resolve().name, queries=beside, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads `diffkv_config.json` to a Hub repository, which is created if missing.

        Args:
            repo_id: "owner/name"; the model's own repository is a good choice.
            **kwargs: revision, token, private, create_pr, commit_message, as in Transformers.

        Returns:
            The Hub's `CommitInfo`.

        Raises:
            OSError: the Hub cannot be reached or refuses the upload; the message suggests a remedy.
        """
        return hub.push(config_files.to_text(self.to_dict(), self.calibration), repo_id, **kwargs)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, **kwargs: Any) -> DiffKVConfig:
        """Reads a configuration that `save_pretrained` or `push_to_hub` wrote.

        Args:
            name: folder, or "owner/name" of a Hub repository.
            **kwargs: options for the Hub: revision, token, cache_dir, local_files_only, as in Transformers.

        Raises:
            FileNotFoundError: the file, folder or repository does not exist.
            OSError: access to the repository is denied, the Hub cannot be reached, or its cache is not writable.
            ValueError: the file is not a configuration.
        """
        config_files.as_folder("name", name)
        # not through Path, as a Hub id keeps its slash on every platform
        repo = os.fspath(name)
        preset = None if "/" in repo or os.path.isdir(repo) else close_preset(repo)
        if preset is not None:
            raise FileNotFoundError(
                f"{repo!r} is not a folder; did you mean --preset {preset} (preset={preset!r} in Python)?"
            )
        path = hub.find(name, **kwargs)
        try:
            values, calibration = config_files.from_text(path.read_bytes())
            return with_calibration(cls.from_dict(values), calibration)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def with_calibration(config: DiffKVConfig, calibration: dict[str, Any] | None) -> DiffKVConfig:
    """Sets the calibration of a newly created `config` and returns it."""
    object.__setattr__(config, _CALIBRATION_ATTRIBUTE, calibration)
    return config


def configuration_of(model: Any) -> Any:
    """Returns the `PretrainedConfig` of a Transformers model, and other objects, such as configurations, unchanged."""
    return model if hasattr(model, "get_text_config") else getattr(model, "config", model)
