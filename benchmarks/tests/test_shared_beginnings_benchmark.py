"""The benchmark of shared prefixes on tiny-lm with a few requests."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) < (5, 23),
    reason="this release batches otherwise",
)


def test_traffic_is_what_is_said(script) -> None:
    module = script("shared_beginnings")
    requests = module.traffic(512, 60, 0.05)
    assert requests == module.traffic(512, 60, 0.05)
    sharing = [request for request in requests if request.text >= 0]
    assert len(sharing) == 30 and {request.text for request in sharing} <= set(range(6))
    texts = {request.text: request.ids[: request.shared] for request in sharing}
    assert all(request.ids[: request.shared] == texts[request.text] for request in sharing)
    assert all(10 <= len(request.ids) - request.shared <= 40 for request in sharing)
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    slower = module.traffic(512, 60, 0.5)
    assert [request.ids for request in slower] == [request.ids for request in requests]
    assert slower[-1].at == pytest.approx(10 * requests[-1].at)


@pytest.mark.slow
def test_ways_are_measured_and_reported(script, documented, tmp_path: Path, capsys, monkeypatch) -> None:
    module = script("shared_beginnings")
    monkeypatch.setattr(module, "TEXTS", 1)
    monkeypatch.setattr(module, "LONG", (100, 120))
    output = tmp_path / "shared.jsonl"
    module.main(["--models", "tiny-lm", "--requests", "8", "--threads", "1", "--output", str(output)])
    rows = {row["way"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert list(rows) == list(module.WAYS)
    assert rows["nothing kept"]["reused_tokens"] == 0 < rows["found"]["reused_tokens"]
    assert rows["marked"]["reused_tokens"] == rows["marked"]["shared_tokens"] > 0
    assert rows["marked"]["same_answers"] == 8 and rows["marked"]["later"] == 3
    assert all(row["held_bytes"] > 0 for row in rows.values())
    report = ["--report", "--document", "--output", str(output)]
    documented(module, "shared beginnings", lambda: module.main(report))
    assert "| tiny-lm | 0.05 | marked | 100% |" in capsys.readouterr().out
