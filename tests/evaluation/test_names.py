"""Methods and tasks by name: what is found, what a name means, and what is said of one that means nothing."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from hf_diffkv import DiffKVConfig, Precision
from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.methods import METHODS, get_method
from hf_diffkv.evaluation.registry import Registry
from hf_diffkv.evaluation.tasks import TASKS, get_task

FIELDS = {
    "diffkv": {},
    "diffkv:K8V4": {"high": Precision(8, 4), "low": Precision(8, 4), "alpha_high": 0.0, "alpha_low": 0.0},
    "diffkv:K4V2g2/4+2/1": {
        "high": Precision(4, 2, 2, 4), "low": Precision(4, 2, 2, 4), "alpha_high": 2.0, "alpha_low": 1.0,
    },
    "diffkv:balanced+window=16": {
        **{"high": Precision(5, 4), "low": Precision(5, 4), "alpha_high": 0.0, "alpha_low": 0.0},
        **{"metadata_bits": 16, "window": 16, "adaptive_rounding": True},
    },
    "diffkv:K8V8/K4V4": {"high": Precision(8, 8), "low": Precision(4, 4)},
    "diffkv:K8V8g1/2/K4V4g2/4": {"high": Precision(8, 8, 1, 2), "low": Precision(4, 4, 2, 4)},
    "diffkv:3/0.02": {"alpha_high": 3.0, "alpha_low": 0.02},
    "diffkv: 3/0 + window=128": {"alpha_high": 3.0, "alpha_low": 0.0, "window": 128},
    "diffkv:target_ratio=0.3+window=128": {"target_ratio": 0.3, "window": 128},
    "diffkv:high=K8V4+observation_window=64": {"high": Precision(8, 4), "observation_window": 64},
}  # fmt: skip


def test_every_module_is_found() -> None:
    assert {"dense", "diffkv", "quanto", "hqq", "fp8"} <= set(METHODS.names())
    assert {"dictionary", "key-value", "passage", "text", "trajectory", "turns", "updates"} <= set(TASKS.names())


@pytest.mark.parametrize("text", FIELDS)
def test_options_of_diffkv(text: str) -> None:
    method = get_method(text)
    config = method.config_for(LlamaConfig())
    assert config == DiffKVConfig.for_model(LlamaConfig(), **FIELDS[text])
    assert method.label == text.strip()


def test_lossless_is_not_a_preset() -> None:
    assert get_method("diffkv:lossless+window=32").config_for(LlamaConfig()) == DiffKVConfig.lossless(window=32)


def test_other_methods_have_the_sinks_that_are_theirs() -> None:
    config = LlamaConfig()
    assert get_method("leankv:high_cut=0.5").config_for(config).sinks == 0
    cut = get_method("leankv:high_cut=0.5+sinks=4").config_for(config)
    assert cut.sinks == 4 and cut.policy_options == {"high_cut": 0.5}
    assert get_method("diffkv:K8V4").config_for(config).sinks == DiffKVConfig().sinks


def test_options_of_the_others() -> None:
    assert (get_method("quanto").backend, get_method("quanto").bits) == ("quanto", 4)
    assert (get_method("quanto:2").backend, get_method("quanto:2").bits) == ("quanto", 2)
    assert (get_method("hqq:3").backend, get_method("hqq:3").bits) == ("hqq", 3)
    assert (get_method("fp8").backend, get_method("fp8").bits) == ("fp8", None)
    assert get_method(" dense ").label == "dense"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("densse", "unknown method 'densse': did you mean dense"),
        ("zzz", "choose from dense, diffkv"),
        ("", "unknown method ''"),
        ("dense:4", "has no option but float32"),
        ("diffkv:K9V9", "K9V9"),
        ("diffkv:K8", "option 'K8' of a diffkv method is none of"),
        ("diffkv:0/1", "alpha_low"),
        ("diffkv:wndow=3", "unknown option of a diffkv method 'wndow': did you mean window?"),
        ("diffkv:target_rato=0.2", "unknown option of a diffkv method 'target_rato': did you mean target_ratio?"),
        ("diffkv:pin=3", "pin was removed: sinks=N keeps the first N tokens"),
        ("diffkv:window=many", "window"),
        ("quanto:3", "one of (2, 4)"),
        ("quanto:4+2", "one of (2, 4)"),
        ("hqq:5", "one of (1, 2, 3, 4, 8)"),
        ("fp8:8", "no options"),
    ],
)
def test_a_method_that_is_none(text: str, said: str) -> None:
    with pytest.raises(EvaluationError) as caught:
        get_method(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_task_that_is_none() -> None:
    with pytest.raises(EvaluationError, match="unknown task 'trajectroy': did you mean trajectory"):
        get_task("trajectroy")


@pytest.mark.parametrize(
    ("name", "harness"),
    [
        ("gsm8k", "gsm8k"),
        ("humaneval-plus", "humaneval_plus"),
        ("longbench-repobench-p", "longbench_repobench-p"),
        ("ruler-niah-multikey-1", "niah_multikey_1"),
        ("ruler-variable-tracking", "ruler_vt"),
    ],
)
def test_a_task_that_the_harness_has(name: str, harness: str) -> None:
    with pytest.raises(EvaluationError, match=f"hf-diffkv lm-eval --model hf-diffkv .* --tasks {harness}$"):
        get_task(name)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_diffkv_evaluation.methods.transformers_caches._is_installed", lambda module: False)
    with pytest.raises(EvaluationError, match="pip install optimum-quanto"):
        get_method("quanto:4")
    # which ships with Transformers
    get_method("fp8")


def test_a_name_is_registered_once(names: None) -> None:
    registry: Registry[int] = Registry("number", "hf_diffkv.evaluation.methods")
    registry.add("one")(1)
    with pytest.raises(ValueError, match="number 'one' is registered twice"):
        registry.add("one")(2)
    assert registry.find("one") == 1
