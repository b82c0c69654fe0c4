"""`DiffKVConfig`: JSON, folders, and the thresholds known for published models."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from hf_diffkv import DiffKVCache, DiffKVConfig, Precision
from hf_diffkv.config import diffkv_config as config_module
from hf_diffkv.config.layers import layer_configs, possible_precisions
from hf_diffkv.config.until_full import precisions_in_turn

CONFIGS = [
    DiffKVConfig(),
    DiffKVConfig(alpha_high=1.0),
    DiffKVConfig.lossless(window=7),
    DiffKVConfig(
        Precision(8, 4, 1, 2),
        Precision(4, 2, 2, 4),
        alpha_high=((1.0, 2.0), (3.0, 4.0)),
        alpha_low=(0.5, 0.25),
        window=3,
        sinks=7,
        observation_window=64,
        page_bytes=4096,
        max_bytes=10**9,
        policy="leankv",
        policy_options={"high_cut": np.float32(0.5), "low_cut": np.int64(0)},
    ),
    DiffKVConfig(head_precisions=[["K5V4", Precision(3, 3)], None, ["K4V3g2/1", "K4V3g2/1"]], alpha_high=(1, 2, 3)),
]


def test_what_is_taken_has_a_type_for_every_field() -> None:
    tree = ast.parse(Path(config_module.__file__).read_text())
    signature = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [arg.arg for arg in signature.args.args[1:]] == [field.name for field in dataclasses.fields(DiffKVConfig)]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "two levels", "lossless", "everything", "heads"])
def test_round_trips(config: DiffKVConfig, tmp_path: Path) -> None:
    assert DiffKVConfig.from_dict(config.to_dict()) == config
    assert DiffKVConfig.from_json(config.to_json()) == config
    config.save_pretrained(tmp_path / "new" / "folder")
    assert DiffKVConfig.from_pretrained(tmp_path / "new" / "folder") == config
    written = json.loads((tmp_path / "new" / "folder" / "diffkv_config.json").read_text())
    unknown_before = set() if config.head_precisions else {"head_precisions"}
    unknown_before |= {"until_full"} if config.max_bytes is None else set()
    assert set(written) == {field.name for field in dataclasses.fields(DiffKVConfig)} - unknown_before


FINAL = {"high": "K5V4", "low": "K5V4", "alpha_high": 0.0}
PER_HEAD = {"head_precisions": [["K5V4", "K4V3"], ["K5V4", "K5V4"]]}


@pytest.mark.parametrize(
    "fields, precise",
    [
        ({"max_bytes": "1GB"}, "K8V8"),
        ({}, None),
        ({"max_bytes": "1GB", "until_full": None}, None),
        ({"max_bytes": "1GB", "until_full": "K8V4"}, "K8V4"),
        ({"max_bytes": "1GB", "alpha_low": 0.1, "alpha_high": 0.1}, None),
        ({"max_bytes": "1GB", "high": "K8V8", "low": "K8V8"}, None),
        ({"max_bytes": "1GB", "high": "K8V4", "alpha_high": float("inf")}, "K8V8"),
        ({"max_bytes": "1GB", "policy": "leankv"}, None),
        ({"max_bytes": "1GB", "head_precisions": [["K8V8"] * 2, ["K16V16"] * 2]}, None),
        ({"max_bytes": "1GB", "head_precisions": [["K5V4", "K5V4"], None]}, "K8V8"),
    ],
    ids=str,
)
def test_what_is_stored_precisely_until_the_budget_is_full(fields: dict[str, Any], precise: str | None) -> None:
    config = DiffKVConfig(**{**FINAL, **fields})
    assert (config.precise and config.precise.name) == precise
    layer = config.of_layer(0)
    assert layer.precise == config.precise
    if precise is not None:
        # K6V5 comes between, unless a first precision is named
        turn = ["K8V8", "K6V5", "K5V4"] if precise == "K8V8" else [precise, "K5V4"]
        assert (layer.high.name, layer.low.name, layer.selects, config.selects) == (*turn[-2:], False, False)
        assert [each.name for each in precisions_in_turn(layer)] == turn
        assert precise == "K8V8" or layer.of_layer(0) == layer
    assert DiffKVConfig.from_dict(config.to_dict()) == config


INF = float("inf")


@pytest.mark.parametrize(
    "fields, rungs",
    [
        (PER_HEAD, [("K8V8 K6V5 K5V4 K4V3", (0.0, INF)), ("K8V8 K6V5 K5V4", INF)]),
        (
            {"head_precisions": [["K3V2", "K3V2"], ["K8V8", "K8V8"], ["K8V8", "K4V3"], ["K16V16", "K16V16"], None]},
            [
                *(("K8V8 K6V5 K4V4 K3V2", INF), ("K8V8 K4V3", 0.0), ("K8V8 K4V3", (0.0, INF))),
                *(("K16V16 K16V16", 0.0), ("K8V8 K6V5 K5V4", INF)),
            ],
        ),
        (
            {"high": "K8V4", "alpha_high": ((0.0, INF), (INF, INF))},
            [("K8V8 K8V4 K5V4", (0.0, INF)), ("K8V8 K6V5 K5V4", INF)],
        ),
        ({"high": "K8V4", "alpha_high": (0.0, INF)}, [("K8V8 K8V4", INF), ("K8V8 K6V5 K5V4", INF)]),
        (
            {
                "head_precisions": [
                    ["K6V5", "K3V2"],
                    ["K4V4"] * 2,
                    ["K3V4"] * 2,
                    ["K2V2"] * 2,
                    ["K4V5"] * 2,
                    ["K6V5"] * 2,
                ]
            },
            [
                *(("K8V8 K6V5 K3V2", (0.0, INF)), ("K8V8 K6V5 K4V4", INF), ("K8V8 K6V5 K4V4 K3V4", INF)),
                ("K8V8 K6V5 K4V4 K2V2", INF),
                # values would lose nothing from the middle on, and heads that end there need no other
                *(("K8V8 K4V5", INF), ("K8V8 K6V5", INF)),
            ],
        ),
        (
            {"head_precisions": [["K6V5", "K3V2"], ["K4V3", "K4V3"]], "until_full": "K8V8"},
            [("K6V5 K3V2", (0.0, INF)), ("K8V8 K4V3", INF)],
        ),
    ],
    ids=str,
)
def test_where_each_layer_begins_and_ends(fields: dict[str, Any], rungs: list[tuple[str, Any]]) -> None:
    config = DiffKVConfig(**{**FINAL, "max_bytes": "1GB", **fields})
    layers = layer_configs(config, len(rungs))
    turns = [precisions_in_turn(layer) for layer in layers]
    assert [(" ".join(each.name for each in turn), layer.alpha_high) for turn, layer in zip(turns, layers)] == rungs
    assert [turn[-2:] for turn in turns] == [(layer.high, layer.low) for layer in layers]
    assert not config.selects and not any(layer.selects for layer in layers)
    assert [layer.precise for layer in layers] == [turn[0] for turn in turns]
    # without the budget heads have their final precisions
    finals = [
        possible_precisions(layer, 2)
        for layer in layer_configs(dataclasses.replace(config, max_bytes=None, until_full="auto"), len(rungs))
    ]
    assert [possible_precisions(layer, 2) for layer in layers] == finals


def test_layers_of_two_final_precisions_begin_with_the_higher_one_beside_k8v8_by_name() -> None:
    named = DiffKVConfig(**{**FINAL, "max_bytes": "1GB", **PER_HEAD}, until_full="K8V8")
    turns = [[each.name for each in precisions_in_turn(layer)] for layer in layer_configs(named, 2)]
    assert named.precise.name == "K8V8" and turns == [["K5V4", "K4V3"], ["K8V8", "K5V4"]]
    assert DiffKVConfig.from_dict(named.to_dict()) == named


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"until_full": "K8V8"}, "until_full needs max_bytes"),
        ({"until_full": "K6V5", "max_bytes": "1GB", **PER_HEAD}, "begins with the higher one, here K5V4"),
        ({"until_full": "K8V8", "max_bytes": "1GB", "policy": "leankv"}, "needs a final precision for all tokens"),
        ({"until_full": "K4V4", "max_bytes": "1GB"}, "K4V4 must need more bits than the final precision K5V4"),
        ({"until_full": "always", "max_bytes": "1GB"}, "until_full='always'"),
    ],
    ids=str,
)
def test_what_cannot_be_precise_until_full(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffKVConfig(**{**FINAL, **fields})


def test_files_of_releases_that_pruned_for_a_budget_still_do(tmp_path: Path) -> None:
    (tmp_path / "diffkv_config.json").write_text(json.dumps({**FINAL, "max_bytes": 10**9}))
    assert DiffKVConfig.from_pretrained(tmp_path) == DiffKVConfig(**FINAL, max_bytes=10**9, until_full=None)
    DiffKVConfig(**FINAL, max_bytes=10**9).save_pretrained(tmp_path)
    assert DiffKVConfig.from_pretrained(tmp_path).until_full == "auto"


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"diffkv_config\.json.*save_pretrained"):
        DiffKVConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="JSON object"):
        DiffKVConfig.from_json("[1, 2]")


def test_two_levels_are_the_papers_on_rotated_and_centred_keys() -> None:
    config = DiffKVConfig(alpha_high=1.0)
    assert (config.high.name, config.low.name, config.window) == ("K8V4", "K4V2", 64)
    assert config.observation_window is None and config.max_bytes is None
    assert config.rotate and config.center
    assert config.sinks == 4
    assert dataclasses.replace(config, rotate=False, center=False, sinks=0) == DiffKVConfig.paper()


# what a release without `rotate`, `center` and `sinks` wrote into a file
WRITTEN_BEFORE = {
    **{"alpha_high": 3.0, "alpha_low": 0.5, "compaction_interval": 1, "max_bytes": None, "observation_window": None},
    **{"page_bytes": None, "policy": "diffkv", "window": 32},
    "high": {"k_bits": 8, "k_groups": 1, "v_bits": 4, "v_groups": 1},
    "low": {"k_bits": 4, "k_groups": 1, "v_bits": 2, "v_groups": 1},
}


@pytest.mark.parametrize("more", [{}, {"cuda_graphs": False}], ids=str)
def test_what_an_earlier_release_wrote_is_what_it_was(more: dict[str, Any], tmp_path: Path) -> None:
    written = {**WRITTEN_BEFORE, **more}
    (tmp_path / "diffkv_config.json").write_text(json.dumps(written))
    plain = DiffKVConfig.paper(alpha_high=3.0, alpha_low=0.5, window=32, **more)
    assert not plain.rotate and not plain.center and plain.sinks == 0
    assert DiffKVConfig.from_pretrained(tmp_path) == plain
    assert DiffKVConfig.from_json(json.dumps(written)) == DiffKVConfig.from_dict(written) == plain
    assert DiffKVConfig.from_dict({**written, "rotate": True, "center": True}) == dataclasses.replace(
        plain, rotate=True, center=True
    )


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        ("compaction_interval", 4, "every step compacts"),
        ("pin", [0, 8], "sinks=N"),
        ("protected_layers", 1, "alpha_high and alpha_low"),
    ],
)
def test_removed_fields_are_read_where_they_changed_nothing(name: str, value: Any, remedy: str) -> None:
    neutral = {"compaction_interval": 1, "pin": None, "protected_layers": 0}
    assert DiffKVConfig.from_dict({**WRITTEN_BEFORE, **neutral}) == DiffKVConfig.from_dict(WRITTEN_BEFORE)
    for refused in (
        lambda: DiffKVConfig.from_dict({**WRITTEN_BEFORE, name: value}),
        lambda: DiffKVConfig(**{name: value}),
    ):
        with pytest.raises(ValueError, match=f"{name} was removed: .*{remedy}"):
            refused()


def test_a_layer_has_precisions_for_all_heads_or_none() -> None:
    assert DiffKVConfig(head_precisions=[["K5V4", "K4V3"], [None, None]]).head_precisions[1] is None
    written = {**WRITTEN_BEFORE, "head_precisions": [["K8V4", None], None]}
    with pytest.raises(
        ValueError, match=r"head_precisions\[0\] .* is no longer supported; give every head .* a precision"
    ):
        DiffKVConfig.from_dict(written)


def test_fields_given_by_hand_take_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "diffkv_config.json").write_text('{"alpha_high": 3.0}')
    expected = DiffKVConfig(alpha_high=3.0)
    assert DiffKVConfig.from_pretrained(tmp_path) == DiffKVConfig.from_dict({"alpha_high": 3.0}) == expected


def test_lossless_prunes_and_quantises_nothing() -> None:
    config = DiffKVConfig.lossless()
    assert config.high.name == config.low.name == "K16V16"
    assert config.alpha_high == config.alpha_low == 0


def test_plain_values_become_precisions_and_tuples() -> None:
    config = DiffKVConfig(high=[8, 8], low={"k_bits": 4, "v_bits": 4}, alpha_high=[1], alpha_low=0)
    assert config.high == Precision(8, 8) and config.low == Precision(4, 4)
    assert config.alpha_high == (1.0,) and config.alpha_low == 0.0
    assert hash(config) == hash(DiffKVConfig.from_json(config.to_json()))


@pytest.mark.parametrize("precision", [Precision(8, 4), Precision(4, 2, 2, 4), Precision(16, 16)])
def test_precisions_by_name(precision: Precision) -> None:
    groups = (precision.k_groups, precision.v_groups)
    name = precision.name + ("g{}/{}".format(*groups) if groups != (1, 1) else "")
    assert Precision.parse(name) == precision == DiffKVConfig(high=name, low="K1V1").high


@pytest.mark.parametrize("name", ["8V4", "K8", "K8V4g2", "k8v4", "K9V4", ""])
def test_what_is_no_precision(name: str) -> None:
    with pytest.raises(ValueError, match=f"high='{name}'"):
        DiffKVConfig(high=name)


def test_a_misspelt_field() -> None:
    with pytest.raises(ValueError, match="did you mean 'alpha_high'"):
        DiffKVConfig.from_dict({"alpha_hihg": 1})


def test_numbers_of_numpy_become_plain_ones() -> None:
    precision = Precision(np.int64(8), np.int32(4))
    config = DiffKVConfig(high=precision, alpha_high=[np.float32(1.5)], window=np.int64(5), max_bytes=np.int64(10**9))
    assert config == DiffKVConfig(high=(8, 4), alpha_high=(1.5,), window=5, max_bytes=10**9)
    assert config == DiffKVConfig(high=(8, 4), alpha_high=(1.5,), window=5, max_bytes="1 gb")
    assert DiffKVConfig.from_json(config.to_json()) == config


def test_what_the_paper_does_not_do_is_off_in_its_configuration() -> None:
    for config in (DiffKVConfig.paper(window=5), DiffKVConfig.lossless(window=5)):
        assert not config.rotate and not config.center and config.sinks == 0 and config.window == 5
    assert DiffKVConfig.paper().metadata_bits == 32 and DiffKVConfig.paper(metadata_bits=16).metadata_bits == 16
    assert DiffKVConfig.paper(center=True).center and DiffKVConfig.lossless(rotate=True).rotate
    for rotate in (False, True):
        config = DiffKVConfig(rotate=rotate, center=not rotate)
        assert DiffKVConfig.from_json(config.to_json()) == config


def test_metadata_bits() -> None:
    assert DiffKVConfig(alpha_high=1.0).metadata_bits == 32
    config = DiffKVConfig(alpha_high=1.0, metadata_bits=np.int64(16))
    assert type(config.metadata_bits) is int and DiffKVConfig.from_json(config.to_json()) == config
    for bits in (8, 0, 64, 16.0, "16", True, None):
        with pytest.raises(ValueError, match=r"metadata_bits=.* is not supported; use one of \(16, 32\)"):
            DiffKVConfig(metadata_bits=bits)


@pytest.mark.parametrize("given", [None, DiffKVConfig(), 3])
def test_presets_of_what_is_no_model_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="pass the model, model.config, or the model's name"):
        DiffKVConfig.for_model(given)


def test_options_stay_as_they_are() -> None:
    config = DiffKVConfig(policy="leankv", policy_options={"high_cut": 1})
    assert config.policy_options == {"high_cut": 1.0} and type(config.policy_options["high_cut"]) is float
    with pytest.raises(TypeError, match="cannot be changed"):
        config.policy_options["high_cut"] = 0.5
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config, window=64)):
        assert copied == config and hash(copied) == hash(config)


GROUPED = (Precision(8, 4, 1, 2), Precision(4, 2, 2, 4))
PLAIN = (Precision(8, 4), Precision(4, 2))
UNCALIBRATED = (0.0, 1.0)


@pytest.mark.parametrize(
    "name, alphas, precisions",
    [
        ("meta-llama/Meta-Llama-3-8B", (0.02, 1.0), PLAIN),
        ("meta-llama/Meta-Llama-3-8B-Instruct", (0.02, 1.0), PLAIN),
        ("models/Meta-Llama-3-8B-Instruct/", (0.02, 1.0), PLAIN),
        ("meta-llama/Meta-Llama-3-70B-Instruct", (0.0, 1.0), PLAIN),
        ("Qwen/Qwen2.5-7B-Instruct", (0.04, 0.04), PLAIN),
        ("Qwen/Qwen2.5-32B", (0.0, 3.0), PLAIN),
        ("Qwen/QwQ-32B", (0.0, 3.0), GROUPED),
        ("Qwen/Qwen3-8B", UNCALIBRATED, GROUPED),
        ("Qwen/Qwen3-30B-A3B", UNCALIBRATED, GROUPED),
    ],
)
def test_thresholds_of_published_models(
    name: str, alphas: tuple[float, float], precisions: tuple[Precision, Precision]
) -> None:
    model_config = LlamaConfig()
    model_config._name_or_path = name
    for config in map(DiffKVConfig.for_model, (name, Path(name), model_config)):
        assert (config.alpha_low, config.alpha_high) == alphas
        assert (config.high, config.low) == precisions


@pytest.mark.parametrize(
    "name",
    [
        *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-3B"),
        *("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
        *("Qwen/Qwen2.5-Math-7B", "Qwen/Qwen2.5-72B", "someone/my-finetune", ""),
    ],
)
def test_other_models_take_a_preset_unless_levels_are_chosen(name: str) -> None:
    assert DiffKVConfig.for_model(name) == DiffKVConfig.preset("balanced")
    assert DiffKVConfig.for_model(name, window=128) == DiffKVConfig.preset("balanced", window=128)
    chosen = ({"alpha_high": 3.0}, {"low": "K4V4"}, {"alpha_low": 0.01}, {"policy": "leankv"})
    for fields in chosen:
        assert DiffKVConfig.for_model(name, **fields) == DiffKVConfig(**fields)
    with pytest.raises(ValueError, match="did you mean 'window'"):
        DiffKVConfig.for_model(name, windw=5)


def test_fields_override_a_preset() -> None:
    config = DiffKVConfig.for_model("Qwen/Qwen3-8B", alpha_high=2.0, low=Precision(4, 4), window=5)
    assert (config.high, config.low) == (GROUPED[0], Precision(4, 4))
    assert (config.alpha_low, config.alpha_high, config.window) == (0.0, 2.0, 5)


def test_presets_take_less_memory_in_turn() -> None:
    uniform = {
        name: DiffKVConfig.preset(name, page_bytes=4096, max_bytes=1 << 20) for name in ("quality", "balanced", "small")
    }
    assert [config.high.name for config in uniform.values()] == ["K8V4", "K5V4", "K4V3"]
    for config in uniform.values():
        # one precision: nothing falls below it, nothing is pruned
        assert config.low == config.high and (config.alpha_high, config.alpha_low) == (0.0, 0.0)
        assert config.rotate and config.center and config.metadata_bits == 16
        assert (config.page_bytes, config.max_bytes) == (4096, 1 << 20)
    assert (uniform["small"].high.k_groups, uniform["small"].high.v_groups) == (2, 1)
    assert DiffKVConfig.preset("small", window=8).window == 8


@pytest.mark.parametrize(
    "ratio, head_dim, dtype, name",
    [
        # what metadata takes weighs more in smaller heads
        *((0.41, 64, "bfloat16", "K8V4"), (0.33, 64, "bfloat16", "K6V4"), (0.30, 64, "bfloat16", "K5V4")),
        *((0.25, 64, "bfloat16", "K4V3"), (0.235, 64, "bfloat16", "K4V3"), (0.21, 64, "bfloat16", "K4V2")),
        *((0.30, 128, "bfloat16", "K5V4"), (0.28, 128, "bfloat16", "K4V4"), (0.15, 64, "float32", "K5V4")),
        *((1.0, 64, "bfloat16", "K8V8"), (0.32, 16, "bfloat16", "K4V4")),
    ],
)
def test_the_best_precision_within_a_ratio(ratio: float, head_dim: int, dtype: str, name: str) -> None:
    model_config = LlamaConfig(hidden_size=8 * head_dim, num_attention_heads=8, head_dim=head_dim, dtype=dtype)
    config = DiffKVConfig.for_model(model_config, target_ratio=ratio, page_bytes=4096)
    assert config.high == config.low and config.high.name == name and not config.selects
    assert config.page_bytes == 4096
    high = config.high
    metadata = sum(
        groups * (4 if bits == 8 else 2)
        for bits, groups in ((high.k_bits, high.k_groups), (high.v_bits, high.v_groups))
    )
    held = head_dim * (high.k_bits + high.v_bits) // 8 + metadata
    assert held <= ratio * 2 * head_dim * getattr(torch, dtype).itemsize
    assert DiffKVCache(model_config, target_ratio=ratio, page_bytes=4096).config == config


@pytest.mark.parametrize(
    "ratio, model, words",
    [
        *((value, LlamaConfig(), "must be a number above 0") for value in (0, -0.2, 1.01, 30, "0.3", True)),
        (0.1, LlamaConfig(), "is below what K4V2 needs for heads of size 128, 0.195"),
        (0.3, "someone/a-model", "pass the model or model.config"),
    ],
)
def test_ratios_that_cannot_be_met(ratio: object, model: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DiffKVConfig.for_model(model, target_ratio=ratio)


@pytest.mark.parametrize("name", ["", "Small", "tiny", None])
def test_unknown_presets_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"no preset .*'quality', 'balanced', 'small'"):
        DiffKVConfig.preset(name)
