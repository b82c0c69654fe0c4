"""Models with weights of bitsandbytes: what they compute in, and that no memory of loading stays."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_diffkv.running.bitsandbytes_weights import quantization_config
from hf_diffkv.running.models import load_model

# rows of a whole block of bitsandbytes
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, tie_word_embeddings=request.param, **SIZES)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def mapped_file(tensor: torch.Tensor) -> str:
    """Path of the file, or name, of the mapping that a tensor's memory is in; empty if it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high, rest = re.match(r"([0-9a-f]+)-([0-9a-f]+) (.*)", line).groups()
        if int(low, 16) <= tensor.data_ptr() < int(high, 16):
            return rest.split(maxsplit=4)[4] if len(rest.split(maxsplit=4)) == 5 else ""
    raise AssertionError("no mapping has this tensor")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weights", ["4bit", "8bit"])
def test_the_file_of_the_weights_is_let_go_of(folder: str, weights: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert mapped_file(plain.model.embed_tokens.weight).endswith("model.safetensors")
    model = load_model(folder, device="cpu", weights=weights)
    assert not any("safetensors" in mapped_file(parameter) for parameter in model.parameters())
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    tied = plain.lm_head.weight is plain.model.embed_tokens.weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes arranges no weights here")
def test_weights_of_4_bits_are_arranged_before_the_first_prompt(folder: str) -> None:
    model = load_model(folder, device="cpu", weights="4bit")
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14 and all(layer.weight.quant_state.packing_format_for_cpu for layer in layers)
    # saved, they are as before
    model.save_pretrained(folder + "-4bit")
    again = AutoModelForCausalLM.from_pretrained(folder + "-4bit").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=0.02)


@pytest.mark.parametrize(("dtype", "device", "native", "compute_dtype"), [
    (torch.bfloat16, "cpu", True, torch.bfloat16),
    (torch.bfloat16, "cpu", False, torch.float32),
    (torch.float16, "cpu", True, torch.float32),
    (torch.float16, "cuda:0", False, torch.float16),
    (torch.bfloat16, "cuda", False, torch.bfloat16),
])  # fmt: skip
def test_products_have_the_dtype_of_the_model_where_it_is_fast(
    dtype: torch.dtype, device: str, native: bool, compute_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: native)
    assert quantization_config("4bit", dtype, device).bnb_4bit_compute_dtype is compute_dtype


def test_the_dtype_is_that_of_the_checkpoint_unless_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsandbytes.functional.has_avx512bf16", lambda: True)
    for dtype, compute_dtype in (("auto", torch.bfloat16), ("float32", torch.float32)):
        model = load_model(folder, dtype, "cpu", weights="4bit")
        assert model.model.layers[0].mlp.up_proj.compute_dtype is compute_dtype
