"""`hf-diffkv generate --save-cache` and `--load-cache`: a later run goes on without reading the prompt again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama.modeling_llama import LlamaModel

from hf_diffkv.cli import main
from hf_diffkv.running.models import TINY_LM

FACTS = (TINY_LM.parents[1] / "prompts" / "recall.txt").read_text().rsplit("?", 1)[0] + "?ice="
NEXT = "?ash="
GENERATE = ["generate", "--model", "tiny-lm", "--max-new-tokens", "6", "--json"]


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward computes in this process."""
    found: list[int] = []
    forward = LlamaModel.forward

    def noting(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        found.append(input_ids.shape[1])
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", noting)
    return found


def test_the_second_run_computes_the_new_tokens_alone(
    tmp_path: Path, lengths: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [*GENERATE, "--no-compare"]
    assert main([*whole, FACTS, "--then", NEXT]) == 0
    in_one = json.loads(capsys.readouterr().out)
    assert main([*whole, FACTS, "--save-cache", str(tmp_path)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert max(lengths) > 1000
    lengths.clear()
    assert main([*whole, NEXT, "--load-cache", str(tmp_path)]) == 0
    second = json.loads(capsys.readouterr().out)
    # the last token that was written has not been run yet
    assert max(lengths) == len(NEXT) + 1
    assert [*first["answers"], *second["answers"]] == in_one["answers"]
    assert second["text"] == second["answers"][0] and second["config"] == in_one["config"]
    assert second["runs"]["DiffKV"]["cache_bytes"] == in_one["runs"]["DiffKV"]["cache_bytes"]


def test_the_dense_cache_reads_it_all_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, FACTS, "--no-compare", "--save-cache", str(tmp_path), "--lossless"]) == 0
    capsys.readouterr()
    assert main([*GENERATE, NEXT, "--load-cache", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"]["same_text"]
    seen = {run["seen_tokens"] for run in found["runs"].values()}
    assert len(seen) == 1 and seen.pop() > 1000


def test_wrong_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, NEXT, "--load-cache", str(tmp_path)]) == 2
    assert "talk.json: No such file or directory" in capsys.readouterr().err
    assert main([*GENERATE, NEXT, "--load-cache", str(tmp_path), "--preset", "small"]) == 2
    assert "--load-cache has its own configuration; leave cache options out." in capsys.readouterr().err


@pytest.mark.parametrize("damage", [{"ids": 5}, {"ids": "abc"}, {"ids": [[1, 2]]}, {"ids": [1.5]}, {"first": 7}])
def test_a_damaged_talk(damage: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talk.json").write_text(json.dumps({"ids": [1, 2], "first": "a", **damage}))
    assert main([*GENERATE, NEXT, "--load-cache", str(tmp_path)]) == 2
    assert "talk.json is not a saved conversation." in capsys.readouterr().err
