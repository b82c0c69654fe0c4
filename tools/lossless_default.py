"""A pytest plugin that replaces whatever cache `generate()` would make with a lossless `DiffKVCache`.

It writes the outcome of every test, and the number of forwards through a `DiffKVCache`, to the file
`HF_DIFFKV_RESULTS`. With `HF_DIFFKV_BASELINE=1` it only writes and replaces nothing.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers.generation.utils import GenerationMixin

from hf_diffkv import DiffKVConfig
from hf_diffkv.cache.layer import DiffKVLayer
from hf_diffkv.compat import passed

LOSSLESS = DiffKVConfig.lossless(window=4, alpha_high=1.0).to_dict()
BASELINE = os.environ.get("HF_DIFFKV_BASELINE") == "1"
# written by name, so that a test lost in a crash is seen to be missing
RESULTS = Path(os.environ.get("HF_DIFFKV_RESULTS", "results.jsonl"))

_attended = 0


def _counting(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _attended
        _attended += 1
        return method(*args, **kwargs)

    return call


def _lossless(method: Any) -> Any:
    @functools.wraps(method)
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        left_open = (
            generation_config.cache_implementation is None
            and passed(model_kwargs) is None
            and generation_config.use_cache is not False
            and not self.config.is_encoder_decoder
        )
        if left_open:
            generation_config.cache_implementation, generation_config.cache_config = "diffkv", LOSSLESS
        try:
            return method(self, generation_config, model_kwargs, *args, **kwargs)
        finally:
            if left_open:
                generation_config.cache_implementation = generation_config.cache_config = None

    return prepare


def pytest_configure(config: pytest.Config) -> None:
    DiffKVLayer.attend = _counting(DiffKVLayer.attend)
    if not BASELINE:
        GenerationMixin._prepare_cache_for_generation = _lossless(GenerationMixin._prepare_cache_for_generation)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global _attended
    _attended = 0
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed" and report.when == "setup":
        reason = ""
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.strip().split("\n")[0] if crash else str(report.longrepr).strip().split("\n")[-1]
        row = {"test": item.nodeid, "outcome": report.outcome, "attended": _attended, "reason": reason[:300]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
