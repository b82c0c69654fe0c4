"""Caches saved by an earlier version are read as they were written, and written identically again.

The caches in tests/data/saved_caches were made by release 0.1.0 at commit bb212bb, in format 4 of saved caches
(`tools/compare_caches.py samples`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PretrainedConfig

from hf_diffkv import CacheFileError, DiffKVCache

SAVED = Path(__file__).parents[1] / "data" / "saved_caches"
# its policy is "share", which was removed
REMOVED_POLICY = "share_with_model_sinks"
JSON_NAME, TENSORS_NAME = "diffkv_cache.json", "diffkv_cache.safetensors"


def taken_here(
    name: str, folder: Path, change: Callable[[dict[str, Any]], None] = lambda content: None
) -> PretrainedConfig:
    """Copies a saved cache to `folder`; returns its model's configuration.

    The contents of a Transformers configuration, and so its fingerprint, differ between releases; the copy gets the
    fingerprint of the installed release.
    """
    shutil.copytree(SAVED / name, folder)
    model_config = AutoConfig.from_pretrained(folder)
    content = json.loads((folder / JSON_NAME).read_text())
    content["model"] = DiffKVCache(model_config).model_fingerprint
    change(content)
    del content["checksum"]
    content["checksum"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / JSON_NAME).write_text(json.dumps(content, indent=2) + "\n")
    return model_config


@pytest.mark.oldest
@pytest.mark.parametrize("name", sorted({path.name for path in SAVED.iterdir()} - {REMOVED_POLICY}))
def test_a_cache_saved_before(name: str, tmp_path: Path) -> None:
    model_config = taken_here(name, tmp_path / "old")
    cache = DiffKVCache.from_pretrained(tmp_path / "old", model_config)
    cache.check_integrity()
    expected = load_file(tmp_path / "old" / "tokens.safetensors")
    for layer_idx in cache.compressed_layers():
        keys, values, stored = cache.dequantize(layer_idx)
        assert torch.equal(cache.levels(layer_idx), expected.pop(f"{layer_idx}.levels"))
        torch.testing.assert_close(keys[stored], expected.pop(f"{layer_idx}.keys"), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values[stored], expected.pop(f"{layer_idx}.values"), rtol=1e-6, atol=1e-6)
        if cache.config.selects:
            assert torch.equal(cache.significance(layer_idx)[stored], expected.pop(f"{layer_idx}.significance"))
    assert not expected
    cache.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / TENSORS_NAME).read_bytes() == (tmp_path / "old" / TENSORS_NAME).read_bytes()
    # the weights it was made with are recorded if the model is given
    old, new = (json.loads((tmp_path / folder / JSON_NAME).read_text()) for folder in ("old", "new"))
    for content in (old, new):
        del content["weights"], content["checksum"]
    # fields removed since then
    for name in ("compaction_interval", "pin", "protected_layers"):
        old["config"].pop(name, None)
    assert new == old


def test_a_cache_with_thresholds_beside_precisions_says_so(tmp_path: Path) -> None:
    def split(content: dict[str, Any]) -> None:
        content["config"]["head_precisions"] = [["K8V4", None], [None, "K4V2"]]

    model_config = taken_here("paper", tmp_path / "old", split)
    with pytest.raises(CacheFileError, match=r"head_precisions\[0\] .* is no longer supported; give every head"):
        DiffKVCache.from_pretrained(tmp_path / "old", model_config)


@pytest.mark.oldest
def test_a_cache_with_a_removed_policy_says_so(tmp_path: Path) -> None:
    model_config = taken_here(REMOVED_POLICY, tmp_path / "old")
    with pytest.raises(CacheFileError, match="policy='share' was removed"):
        DiffKVCache.from_pretrained(tmp_path / "old", model_config)
