"""What a user can choose: precisions, thresholds, window. No tensors, no Transformers models."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from ..precision import Precision, as_precision, is_integer
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
    splits,
)
from .presets import DEFAULT_PRESET, LEVEL_FIELDS, PRESETS, SAFE, preset_named

METADATA_BITS = (16, 32)
# attributes that are no fields; the second holds the names of the given fields from `__new__` to `__post_init__`
_CALIBRATION_ATTRIBUTE = "_calibration"
_GIVEN_ATTRIBUTE = "_given"

ThresholdLike = Union[float, Sequence[float], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class DiffKVConfig:
    """Every choice of a `DiffKVCache` (algorithm: DiffKV, SOSP 2025, sections 4 and 5).

    A token whose mean received attention is at least `alpha_high / N` (N: tokens seen) is kept at `high`, from
    `alpha_low / N` on at `low`, below that it is pruned.

    Levels are chosen by giving any of `high`, `low`, `alpha_high`, `alpha_low`, `head_precisions`, `policy` and
    `policy_options`. If none is given, the defaults are those of the preset "balanced", which `DiffKVCache(model)`
    takes too: K5V4 for all tokens, `window` 32, `adaptive_rounding`, `metadata_bits` 16. If one is given, the other
    fields have the defaults of the signature: two levels, K8V4 and K4V2, and a `window` of 64.
    `paper` makes the paper's configuration.

    Args:
        high: precision of important tokens: a `Precision`, or its name, for example "K8V4".
        low: precision of less important tokens; may not need more bytes than `high`.
        alpha_high: threshold of the high level: one number, one per compressed layer, or one per layer and KV head.
        alpha_low: threshold of the low level, in the same forms; 0 never prunes. At most `alpha_high` everywhere.
        head_precisions: for each compressed layer the precision of each KV head, which all tokens of it have, of two
            precisions in a layer at most; None for a head, or a whole layer, that `high`, `low` and thresholds are for.
            None instead of all this is such layers only. `with_ratio` chooses it.
        window: newest tokens of each request kept uncompressed in the model's dtype; at least 1.
        sinks: first tokens of each request kept likewise, beside the window, and never pruned.
        policy: name of the rule that turns significance into levels (docs/policies.md); `alpha_high` and `alpha_low`
            are for `"diffkv"` only.
        policy_options: options of that policy, by name.
        observation_window: number of a prompt's last queries that significance is taken from; None takes all. Nothing
            is taken where no token is chosen by it (`selects`).
        rotate: keys and values are held rotated by a Hadamard matrix with random signs, which spreads channels of
            large magnitude over all: fewer bits do. Costs no memory, and two small products per layer and step.
        center: keys are held less the mean key of their request and KV head. Layers with attention sinks or a
            softcap are not centred.
        adaptive_rounding: keys of up to 6 bits are rounded so that logits change least, instead of each element to the
            nearest (`ops/rounding`): those that a forward of several tokens stores for its queries, generated ones for
            the model's where these were measured. Costs no memory.
        metadata_bits: bits of the scale and zero point of a quantisation group, of the significance and of the position
            of a stored token: 32 each, or 16, with scales of 5 bits of mantissa and sums that are rounded at random.
            Tokens have neither significance nor position where none is chosen by it (`selects`).
        page_bytes: largest size of a unified page in bytes; None chooses the best filled size near 6 KiB.
        max_bytes: byte budget per device, as a number or a size such as "3GB"; None is unlimited.
        cuda_graphs: whether `generate()` on a CUDA device captures a decode step once and replays it; its
            `compile_config` has the forward compiled beforehand.

    Raises:
        ValueError: a value outside its range, thresholds out of order, or a field that there is none of. The message
            names the argument.
    """

    # defaults beside chosen levels; without these the default preset's replace them (`__post_init__`)
    high: Precision = Precision(8, 4)
    low: Precision = Precision(4, 2)
    alpha_high: Threshold = 1.0
    alpha_low: Threshold = 0.0
    head_precisions: HeadPrecisions | None = None
    window: int = 64
    sinks: int = 4
    policy: str = "diffkv"
    policy_options: Mapping[str, Any] = Options()
    observation_window: int | None = None
    rotate: bool = True
    center: bool = True
    adaptive_rounding: bool = False
    metadata_bits: int = 32
    page_bytes: int | None = None
    max_bytes: int | None = None
    cuda_graphs: bool = True

    if TYPE_CHECKING:
        # what is taken; the fields above have the types it becomes
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
            cuda_graphs: bool = ...,
        ) -> None: ...
    else:

        def __new__(cls, *args, **kwargs):
            # names the field that may have been meant, as the constructor does not
            cls._check_names(kwargs)
            made = super().__new__(cls)
            # a given value may equal the default, so names are kept; copies and pickles give none
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
            raise ValueError(f"head_precisions leave policy={self.policy!r} nothing to choose; leave one of them out.")

    @property
    def is_split(self) -> bool:
        """Whether in some layer heads that have a precision stand beside others whose tokens thresholds level."""
        return any(splits(layer) for layer in self.head_precisions or ())

    @property
    def selects(self) -> bool:
        """Whether what becomes of a token depends on its significance.

        False where all tokens of a head end at one precision whatever they receive: the policy is "diffkv", nothing is
        pruned (`alpha_low` is 0 everywhere, no `max_bytes`), and `alpha_high` is 0 or infinite everywhere or both
        precisions are the same, or `head_precisions` has all layers. Such layers keep neither sums nor positions of
        stored tokens, and do no work for them, also beside others of the same cache (`of_layer`).
        """
        if self.policy != "diffkv" or self.max_bytes is not None:
            return True
        if self.head_precisions is not None and None not in self.head_precisions and not self.is_split:
            return False
        pairs = paired(self.alpha_low, self.alpha_high)
        return any(low > 0 or (0 < high < math.inf and self.high != self.low) for low, high in pairs or ())

    def check_layers(self, count: int) -> None:
        """Raises `ValueError` where thresholds or precisions are given for another number of compressed layers."""
        for name in ("alpha_high", "alpha_low", "head_precisions"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != count:
                one = "None" if name == "head_precisions" else "one number"
                raise ValueError(
                    f"{name} has {len(value)} entries but {count} layers of this model are compressed; give {one} or "
                    f"{count} of them."
                )

    def of_layer(self, index: int) -> DiffKVConfig:
        """What holds for one compressed layer, whose heads are one group (`head_groups`).

        Returns:
            A configuration without `head_precisions`, with thresholds that are one number or one per KV head. Where
            heads have precisions, thresholds are 0 for those at `high` and infinite for those at `low`.
        """
        chosen = None if self.head_precisions is None else self.head_precisions[index]
        if chosen is None:
            alphas = {name: getattr(self, name) for name in ("alpha_high", "alpha_low")}
            alphas = {name: value[index] if isinstance(value, tuple) else value for name, value in alphas.items()}
            return dataclasses.replace(self, head_precisions=None, **alphas)
        precisions = tuple(precision for precision in chosen if precision is not None)
        low, high = self._pair(precisions)
        alpha_high = tuple(0.0 if precision == high else math.inf for precision in precisions)
        fields: dict[str, Any] = {"high": high, "low": low, "alpha_high": alpha_high, "alpha_low": 0.0}
        return dataclasses.replace(self, head_precisions=None, **fields)

    def _pair(self, chosen: tuple[Precision, ...]) -> tuple[Precision, Precision]:
        """Low and high precision of a layer; one whose heads are alike joins the first pair that has theirs."""
        layers = ({p for p in layer if p is not None} for layer in self.head_precisions or () if layer is not None)
        pairs = [layer for layer in layers if len(layer) == 2]
        mine = {*chosen}
        found = mine if len(mine) == 2 else next((pair for pair in pairs if mine <= pair), mine)
        order = sorted(found, key=lambda precision: (payload_bits(precision), dataclasses.astuple(precision)))
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
        """A configuration that stores everything as it is in the model's dtype and prunes nothing."""
        full = Precision(16, 16)
        return cls.paper(**{"high": full, "low": full, "alpha_high": 0.0, "alpha_low": 0.0, **kwargs})

    @classmethod
    def paper(cls, **kwargs: Any) -> DiffKVConfig:
        """What the paper describes, without what was added to it: no sinks, keys and values as the model has them."""
        cls._check_names(kwargs)
        return cls(**{**SAFE, "rotate": False, "center": False, "sinks": 0, "metadata_bits": 32, **kwargs})

    @classmethod
    def preset(cls, name: str, **kwargs: Any) -> DiffKVConfig:
        """A measured choice between memory and quality (docs/quality.md has the figures of each).

        Args:
            name: "quality", "balanced" or "small", from the most memory to the least.
            **kwargs: fields that override the choice.

        Raises:
            ValueError: another name.
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
        """What suits a model: the configuration that is saved beside its files; a precision for each head where these
        were measured; the published settings of a model of the papers; else `preset("balanced")`.

        What heads lose is found by the weights of a loaded model, in the user's cache folder or among what ships
        (docs/calibration.md). Where `kwargs` choose levels (precisions, thresholds, a policy), the rest is the
        paper's: two levels and thresholds that never prune.

        Args:
            model: a Transformers model, its `PretrainedConfig`, or the model's name or folder as a string.
            preset: another one; with measured heads it is a ratio.
            target_ratio: instead, bytes of a stored token over its bytes in the model's dtype, at most: the best
                precision for each measured head, else the best one for all (`presets.LADDER`); needs the model or its
                configuration.
            **kwargs: fields that override the choice.

        Raises:
            ValueError: `model` is something else, no such preset, or a `target_ratio` that cannot be met.
        """
        from .choice import choose

        cls._check_names(kwargs)
        chosen, calibration = choose(model, configuration_of(model), preset, target_ratio, kwargs)
        return with_calibration(cls(**{**chosen, **kwargs}), calibration)

    def with_ratio(self, target_ratio: float) -> DiffKVConfig:
        """The same with the `head_precisions` of least predicted loss within a ratio; nothing is measured.

        They follow from what `hf-diffkv calibrate --ratio` measured of each head, which `calibration` holds.

        Args:
            target_ratio: bytes of a stored token over its bytes in the model's dtype, at most; windows come on top.

        Raises:
            ValueError: a configuration without these measurements, or a ratio that cannot be met.
        """
        from .allocation import fields_for

        fields, calibration = fields_for(self.calibration, target_ratio)
        return with_calibration(dataclasses.replace(self, **fields), calibration)

    @property
    def calibration(self) -> dict[str, Any] | None:
        """What `hf-diffkv calibrate` chose it by (docs/calibration.md), where it was read from such a file; else None.

        No field: it takes no part in comparisons, and a changed copy does not have it.
        """
        return vars(self).get(_CALIBRATION_ATTRIBUTE)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DiffKVConfig:
        """Builds a config from plain values; unknown keys raise `ValueError`.

        Keys that are missing have their defaults. Only where `values` is what `to_dict` of a release wrote that knew
        fewer fields, these fields are what that release did: `rotate` and `center` False, `sinks` 0, `metadata_bits`
        32.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"values is a {type(values).__name__}; it must be a dict of DiffKVConfig's fields.")
        values = config_files.completed(dict(values))
        cls._check_names(values)
        return cls(**values)

    @classmethod
    def _check_names(cls, values: Mapping[str, Any]) -> None:
        complaint = config_files.removed_field(values)
        if complaint is not None:
            raise ValueError(complaint)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            close = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
            hint = f" (did you mean {', '.join(map(repr, close))}?)" if close else ""
            raise ValueError(f"unknown DiffKV config keys {unknown}{hint}; known keys are {known}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; without `head_precisions` where there are none, which earlier releases read."""
        values = dataclasses.asdict(self)
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
        except ValueError as error:
            raise ValueError(f"text is not a JSON object of DiffKVConfig's fields: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"a DiffKV config must be a JSON object of its fields, not a {type(values).__name__}.")
        return cls.from_dict(values)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *, push_to_hub: bool = False, repo_id: str | None = None, **kwargs: Any
    ) -> None:
        """Writes `diffkv_config.json` into `save_directory` (made if missing).

        Args:
            push_to_hub: whether to upload it as well, with the folder's `diffkv_queries.safetensors` if it has one.
            repo_id: where to; the folder's name without.
            **kwargs: of `push_to_hub`.

        Raises:
            OSError: the folder cannot be written, or what `push_to_hub` raises.
        """
        if kwargs and not push_to_hub:
            raise ValueError(f"{', '.join(kwargs)}: only with push_to_hub=True.")
        folder = config_files.new_folder(save_directory)
        text = config_files.to_text(self.to_dict(), self.calibration)
        (folder / config_files.CONFIG_NAME).write_text(text)
        if push_to_hub:
            queries = folder / config_files.QUERIES_NAME
            beside = queries if queries.is_file() else None
            config_files.push(text, repo_id or folder.resolve().name, queries=beside, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads `diffkv_config.json` to a repository of the Hub, made if missing.

        Args:
            repo_id: "owner/name"; beside a model's own files is a good place.
            **kwargs: revision, token, private, create_pr, commit_message, as in Transformers.

        Returns:
            The Hub's `CommitInfo`.

        Raises:
            OSError: the Hub cannot be reached or refuses; the message says what to do.
        """
        return config_files.push(config_files.to_text(self.to_dict(), self.calibration), repo_id, **kwargs)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, **kwargs: Any) -> DiffKVConfig:
        """Reads what `save_pretrained` or `push_to_hub` wrote.

        Args:
            name: a folder, or "owner/name" of a repository of the Hub.
            **kwargs: for the Hub: revision, token, cache_dir, local_files_only, as in Transformers.

        Raises:
            FileNotFoundError: there is no such file, folder or repository.
            OSError: the repository may not be read or the Hub not be reached.
            ValueError: the file is no configuration.
        """
        path = config_files.find(name, **kwargs)
        try:
            values, calibration = config_files.from_text(path.read_text())
            return with_calibration(cls.from_dict(values), calibration)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def with_calibration(config: DiffKVConfig, calibration: dict[str, Any] | None) -> DiffKVConfig:
    """`config`, fresh from its constructor, with what it was chosen by."""
    object.__setattr__(config, _CALIBRATION_ATTRIBUTE, calibration)
    return config


def configuration_of(model: Any) -> Any:
    """The `PretrainedConfig` of a Transformers model; anything else, a configuration above all, as it is."""
    return model if hasattr(model, "get_text_config") else getattr(model, "config", model)
