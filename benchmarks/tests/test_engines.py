"""Other projects' attention in the benchmark: what their kernels receive, checked by stand-ins of equal signature."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes attention of one request: query [query_heads, dim], key and value [tokens, heads, dim]."""
    group = query.shape[0] // key.shape[1]
    key, value = (tensor.to(query.dtype).repeat_interleave(group, dim=1) for tensor in (key, value))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query, key) * query.shape[1] ** -0.5, dim=1)
    return torch.einsum("hn,nhd->hd", weights, value)


class Wrapper:
    """Stands in for FlashInfer's wrapper, over pages [pages, heads, tokens, dim]."""

    def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "HND" and workspace.dtype == torch.uint8 and use_tensor_cores

    def plan(self, indptr, indices, last, query_heads, heads, dim, page, *, q_data_type, kv_data_type) -> None:
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32 and (last == page).all()
        self.plan_of = (indptr, indices, query_heads, heads, dim, page, kv_data_type)

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        indptr, indices, query_heads, heads, dim, page, dtype = self.plan_of
        assert query.shape[1:] == (query_heads, dim) and cache[0].dtype == dtype
        assert cache[0].shape[1:] == (heads, page, dim)
        found = []
        for one, first, last in zip(query, indptr, indptr[1:]):
            pages = indices[first:last].long()
            found.append(attend(one, *(side.view(side.shape)[pages].transpose(1, 2).flatten(0, 1) for side in cache)))
        return torch.stack(found)


def flash_attn_with_kvcache(query: Tensor, key: Tensor, value: Tensor, *, cache_seqlens: Tensor, pack_gqa: bool):
    found = [attend(q[0], k[:n], v[:n]) for q, k, v, n in zip(query, key, value, cache_seqlens)]
    return torch.stack(found)[:, None]


def unified_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
                      window_size, block_table, softcap, q_descale, k_descale, v_descale) -> None:  # fmt: skip
    assert causal and q_descale is None and window_size == (-1, -1) and softmax_scale == q.shape[-1] ** -0.5
    assert (k_descale is None) == (k.dtype == q.dtype) and max_seqlen_k == int(seqused_k.max())
    for request, pages in enumerate(block_table.long()):
        tokens = slice(0, int(seqused_k[request]))
        out[request] = attend(q[request], *(side[pages].flatten(0, 1)[tokens] for side in (k, v)))


def rows_of(script, folder: Path) -> list[dict]:
    options = ["--device", "cpu", "--tiny", "--models", "llama-3-8b", "--configs", "K8V4", "--repeats", "2"]
    return script("attention_gpu").main([*options, "--output", str(folder / "attention_gpu.jsonl")]).rows


def test_every_project_gets_what_it_takes(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The outputs are checked by the benchmark itself, against float32."""
    path = "vllm.v1.attention.ops.triton_unified_attention"
    for end in [index for index, letter in enumerate(path) if letter == "."]:
        monkeypatch.setitem(sys.modules, path[:end], ModuleType(path[:end]))
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(unified_attention=unified_attention))
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))
    interface = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", interface)
    rows = rows_of(script, tmp_path)
    found = {row["name"]: row for row in rows}
    assert not [row for row in rows if "failed" in row or "left_out" in row]
    for kind, name, _, narrow in script("engines").ENGINES:
        assert found[name]["kind"] == kind and found[name]["us"] > 0
        assert found[name]["error"] < 1e-5
        assert found[name]["bytes"] * (4 if narrow else 1) == found["reading alone"]["bytes"]


def test_what_is_not_there_or_fails_is_a_line(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def older(*args: object, **options: object) -> None:
        raise TypeError("unexpected keyword argument 'pack_gqa'")

    for name in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_with_kvcache=older))
    found = {row["name"]: row for row in rows_of(script, tmp_path)}
    assert all("not installed" in found[name]["left_out"] for name in ("FlashInfer", "FP8, FlashInfer", "vLLM, Triton"))
    assert "pack_gqa" in found["FlashAttention-3"]["failed"]
    assert found["K8V4"]["us"] > 0 and found["FP8, converted, then PyTorch"]["us"] > 0
