"""Measurements that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_diffkv.heads.allocation import allocate
from hf_diffkv.heads.lookup import SHIPPED
from hf_diffkv.heads.mark import Mark
from hf_diffkv.heads.sensitivity import Sensitivity

TABLES = sorted(SHIPPED.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables(path: Path) -> None:
    found = Sensitivity.load(path)
    values = json.loads(path.read_text())
    assert Mark.from_dict(values.pop("mark")) == found.mark and values == found.to_dict()
    assert len(found.model_digest) == len(found.documents_digest) == 16 and found.documents == 8
    coarse, fine = allocate(found, 0.2), allocate(found, 0.25)
    assert 0.19 < coarse.ratio <= 0.2 and 0.24 < fine.ratio <= 0.25 and fine.loss < coarse.loss < 0.05


def test_what_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for text in ("{", "[]", '{"keys": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="table.json"):
            Sensitivity.load(path)
    with pytest.raises(OSError):
        Sensitivity.load(tmp_path / "none.json")
