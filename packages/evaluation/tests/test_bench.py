"""`hf-diffkv bench`: what is timed, and what is said of names that mean nothing."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from hf_diffkv_evaluation.timing import timed_method

from hf_diffkv.cli import main
from hf_diffkv.evaluation.errors import EvaluationError


def found_by(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_bench_times_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["bench", "--model", "tiny-lm", "--context", "200", "--steps", "2", "--caches", "static,diffkv:lossless"]
    found = found_by(capsys, *run)
    assert found["context"] == 200 and found["environment"]["torch"] == version("torch")
    token = 6 * 2 * 2 * 64 * 2
    held = {cache["name"]: cache["bytes"] for cache in found["caches"]}
    assert list(held) == ["dense", "static", "diffkv:lossless"]
    assert held["dense"] == 200 * token
    # room for the steps, two of them to warm up, and a counter per layer at most
    assert 204 * token <= held["static"] <= 204 * token + 6 * 16
    assert held["diffkv:lossless"] > 200 * token
    for cache in found["caches"]:
        assert cache["prompt_seconds"] > 0
        assert cache["ms_quartiles"][0] <= cache["ms_per_token"] <= cache["ms_quartiles"][1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("statik", "unknown cache 'statik': did you mean static"),
        ("difkv", "unknown cache 'difkv': did you mean diffkv?"),
        ("quantoo:4", "unknown cache 'quantoo': did you mean quanto?"),
        ("diffkv:smal", "option 'smal' of a diffkv method .* did you mean small?"),
        ("diffkv:losless", "did you mean lossless?"),
    ],
)
def test_bench_knows_what_was_meant(name: str, said: str) -> None:
    with pytest.raises(EvaluationError, match=said.replace("?", r"\?")):
        timed_method(name, 10)
