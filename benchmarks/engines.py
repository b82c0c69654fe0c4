"""Other projects' attention over dense caches, in bf16 and FP8, where they are installed.

Each function takes query [batch, query_heads, dim], key and value [batch, heads, tokens, dim] in the query's dtype or
FP8, and returns a call that attends; without the project it raises `ImportError`. The call owns its copy of the keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PAGE_TOKENS = 16
FP8 = torch.float8_e4m3fn

Attend = Callable[[], Tensor]


def flashinfer(query: Tensor, key: Tensor, value: Tensor) -> Attend:
    """FlashInfer's decode over pages, group by group on tensor cores."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, heads, tokens, dim = key.shape
    workspace = torch.empty(1 << 27, dtype=torch.uint8, device=key.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    count = tokens // PAGE_TOKENS
    starts, pages, last = (
        tensor.to(torch.int32)
        for tensor in (
            torch.arange(batch + 1, device=key.device) * count,
            torch.arange(batch * count, device=key.device),
            torch.full((batch,), PAGE_TOKENS, device=key.device),
        )
    )
    wrapper.plan(
        starts,
        pages,
        last,
        query.shape[1],
        heads,
        dim,
        PAGE_TOKENS,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    cache = tuple(_pages(tensor).contiguous() for tensor in (key, value))
    return lambda: wrapper.run(query, cache)


def flash_attention_3(query: Tensor, key: Tensor, value: Tensor) -> Attend:
    """FlashAttention-3 over a cache, with a group's queries packed."""
    from flash_attn_interface import flash_attn_with_kvcache

    batch, _, tokens, _ = key.shape
    cache = [tensor.transpose(1, 2).contiguous() for tensor in (key, value)]
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
    return lambda: flash_attn_with_kvcache(query[:, None], *cache, cache_seqlens=lengths, pack_gqa=True)[:, 0]


def vllm_triton(query: Tensor, key: Tensor, value: Tensor) -> Attend:
    """vLLM's unified Triton attention over pages."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    batch, heads, tokens, dim = key.shape
    cache = [_pages(tensor).transpose(1, 2).contiguous() for tensor in (key, value)]
    table = torch.arange(cache[0].shape[0], dtype=torch.int32, device=key.device).view(batch, -1)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=key.device)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
    scale = torch.ones(batch, heads, device=key.device) if key.dtype == FP8 else None
    output = torch.empty_like(query)

    def attend() -> Tensor:
        unified_attention(
            q=query,
            k=cache[0],
            v=cache[1],
            out=output,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=tokens,
            softmax_scale=dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0.0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
        )
        return output

    return attend


def converted(query: Tensor, key: Tensor, value: Tensor) -> Attend:
    """PyTorch converts FP8 to the query's dtype, then attends: the cost of FP8 without a dedicated kernel."""
    batch, heads, _, dim = key.shape

    def attend() -> Tensor:
        wide = (tensor.to(query.dtype) for tensor in (key, value))
        grouped = query.view(batch, heads, -1, dim)
        return torch.nn.functional.scaled_dot_product_attention(grouped, *wide).reshape(query.shape)

    return attend


def read(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
    """Reads exactly the same bytes, a lower bound for any attention."""
    # viewed as numbers that are cheap to sum
    flat = [tensor.view(torch.uint8).view(torch.float32) for tensor in (key, value)]
    return lambda: [tensor.sum() for tensor in flat]


# kind of the results, name, function, whether the cache is FP8
ENGINES: tuple[tuple[str, str, Callable[[Tensor, Tensor, Tensor], Attend], bool], ...] = (
    ("dense", "FlashInfer", flashinfer, False),
    ("dense", "FlashAttention-3", flash_attention_3, False),
    ("dense", "vLLM, Triton", vllm_triton, False),
    ("fp8", "FP8, FlashInfer", flashinfer, True),
    ("fp8", "FP8, vLLM, Triton", vllm_triton, True),
    # not an FP8 kernel, so not part of any target
    ("fp8 converted", "FP8, converted, then PyTorch", converted, True),
)


def _pages(tensor: Tensor) -> Tensor:
    """Views [batch, heads, tokens, dim] as [batch * pages, heads, PAGE_TOKENS, dim]."""
    return tensor.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)
