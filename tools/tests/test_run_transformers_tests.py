"""The runner of Transformers' tests, on a checkout with only a handful of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

TESTS = """
import torch, unittest
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from hf_diffkv import DiffKVCache

class LlamaModelTest(unittest.TestCase):
    def generate(self, **options):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, bos_token_id=1, eos_token_id=None, **sizes)).eval()
        options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, **options}
        return model.generate(torch.arange(8)[None], **options)

    def test_generates(self):
        assert self.generate().sequences.shape == (1, 11)

    def test_wants_a_dynamic_cache(self):
        assert type(self.generate().past_key_values) is DynamicCache, "another cache"

    def test_wants_this_cache(self):
        assert isinstance(self.generate().past_key_values, DiffKVCache)

    def test_its_own_cache(self):
        cache = DynamicCache()
        assert self.generate(past_key_values=cache).past_key_values is cache

    def test_fails_anyway(self):
        assert False

    @unittest.skip("not here")
    def test_skipped(self):
        pass
"""


@pytest.mark.slow
def test_tests_are_sorted_by_what_the_cache_does_to_them(tool: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "test_modeling_llama.py").write_text(TESTS)
    before, after = (tool.run(tmp_path, "llama", baseline, 300, "") for baseline in (True, False))
    assert tool.compare(before, after) == {
        "passed": ["test_generates"],
        "passed without a cache": ["test_its_own_cache"],
        "failed": ["test_wants_a_dynamic_cache"],
        "mended": ["test_wants_this_cache"],
        "failed anyway": ["test_fails_anyway"],
        "skipped": ["test_skipped"],
    }
    assert "another cache" in after["test_wants_a_dynamic_cache"]["reason"]
    assert before["test_generates"]["attended"] == 0
    assert after["test_generates"]["attended"] == 6  # three forwards of two layers


@pytest.mark.slow
def test_a_folder_that_is_no_checkout(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="transformers checkout"):
        tool.run(tmp_path, "llama", True, 300, "")
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "test_modeling_llama.py").write_text("import nothing_like_it")
    with pytest.raises(RuntimeError, match="nothing_like_it"):
        tool.run(tmp_path, "llama", True, 300, "")
