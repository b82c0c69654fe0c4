"""The serialiser for LMCache: its bytes, its errors, and a trip through LMCache where that is installed."""

from __future__ import annotations

import math
import os
import select
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_diffkv_serving.lmcache import ChunkFormat, chunk_format
from torch import Tensor

from hf_diffkv import DiffKVConfig, Precision
from hf_diffkv import lmcache as ours

LAYERS, TOKENS, HEADS, DIM = 3, 20, 2, 32
SHAPE = (2, LAYERS, TOKENS, HEADS * DIM)


def chunk(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Keys with channels that are far off and one that is large, as models have them, and values."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(SHAPE, generator=generator)
    made[0] += 4 * torch.randn(LAYERS, 1, HEADS * DIM, generator=generator)
    made[0, ..., 3] *= 10
    return made.to(dtype)


def round_trip(made: ChunkFormat, given: Tensor) -> tuple[Tensor, int]:
    """Encodes and decodes a chunk, and returns the result and the bytes of its encoding."""
    data = made.encode(given)
    assert data.dtype == torch.uint8 and data.numel() == made.size(given.shape, given.dtype)
    back = torch.full_like(given, float("nan"))
    # a buffer of LMCache may be longer
    made.decode(torch.cat([data, torch.full((7,), 0xFF, dtype=torch.uint8)]), back)
    return back, data.numel()


def rows_of(given: Tensor) -> Tensor:
    """Returns a chunk as float64 [side, layer, head, token, channel]."""
    return given.double().view(2, LAYERS, TOKENS, HEADS, DIM).transpose(2, 3)


def error(back: Tensor, given: Tensor) -> Tensor:
    """[side, layer, head], root mean square."""
    return (rows_of(back) - rows_of(given)).square().mean((-1, -2)).sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["K8V8", "K6V4", "K5V3", "K4V2"])
def test_errors_are_those_of_the_bits(name: str, dtype: torch.dtype) -> None:
    precision, given = Precision.parse(name), chunk(dtype)
    back, size = round_trip(ChunkFormat(DIM, precision), given)
    metadata = {bits: 4 if bits == 8 else 2 for bits in (precision.k_bits, precision.v_bits)}
    token = sum(DIM * bits // 8 + metadata[bits] for bits in (precision.k_bits, precision.v_bits))
    assert size == 16 + LAYERS * HEADS * (TOKENS * token + DIM * dtype.itemsize)
    rows = rows_of(given)
    rows[0] -= rows[0].mean(-2, keepdim=True)
    # a vector spread over its channels: a step of its range, at most 6 sigma here, is off by less than a half
    sigma = rows.square().mean(-1, keepdim=True).sqrt()
    for side, bits in enumerate((precision.k_bits, precision.v_bits)):
        off = (rows_of(back) - rows_of(given))[side].square().mean(-1, keepdim=True).sqrt() / sigma[side]
        step = 6 / (2**bits - 1)
        rounding = 0.02 if dtype == torch.bfloat16 else 1e-3
        assert off.max() < step / 2 + rounding
        assert off.mean() > step / 8 / math.sqrt(12)


def test_sixteen_bits_lose_nothing() -> None:
    given = chunk()
    back, size = round_trip(ChunkFormat(DIM, Precision(16, 16)), given)
    assert torch.equal(back, given) and size == 16 + given.numel() * 2
    keys, _ = round_trip(ChunkFormat(DIM, Precision(16, 4)), given)
    assert torch.equal(keys[0], given[0]) and not torch.equal(keys[1], given[1])


def test_heads_have_precisions_of_their_own(tmp_path: Path) -> None:
    many, few = Precision(8, 6), Precision(4, 3)
    heads = ((many, few), (few, many), (few, few))
    given = chunk()
    back, size = round_trip(ChunkFormat(DIM, head_precisions=heads), given)
    alone = {precision: error(round_trip(ChunkFormat(DIM, precision), given)[0], given) for precision in (many, few)}
    for layer, precisions in enumerate(heads):
        for head, precision in enumerate(precisions):
            assert torch.equal(error(back, given)[:, layer, head], alone[precision][:, layer, head])
    assert size - 16 == 2 * _of(many) + 4 * _of(few)

    DiffKVConfig(high=many, low=few, head_precisions=heads).save_pretrained(tmp_path)
    assert chunk_format({"head_dim": DIM, "config": str(tmp_path)}).head_precisions == heads


def _of(precision: Precision) -> int:
    return (ChunkFormat(DIM, precision).size(torch.Size(SHAPE), torch.bfloat16) - 16) // (LAYERS * HEADS)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    made, given = ChunkFormat(DIM), chunk()
    for shape in ((LAYERS, TOKENS, HEADS * DIM), (1, LAYERS, TOKENS, HEADS * DIM), (2, LAYERS, TOKENS, DIM + 1)):
        with pytest.raises(
            ValueError, match=r"is not \[2, layers, tokens, KV heads \* 32\]; give the model's head_dim"
        ):
            made.encode(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="set vLLM's kv_cache_dtype to auto"):
        made.encode(given.to(torch.float8_e4m3fn))
    data, back = made.encode(given), given.clone()
    with pytest.raises(ValueError, match="made with other settings"):
        ChunkFormat(DIM, Precision(6, 5)).decode(torch.cat([data, data]), back)
    with pytest.raises(ValueError, match="or another dtype"):
        made.decode(data, back.to(torch.float16))
    with pytest.raises(ValueError, match="remove it from the store"):
        made.decode(data[:-1], back)
    assert torch.equal(back, given)
    heads = ((Precision(4, 4),) * HEADS,) * (LAYERS + 1)
    with pytest.raises(ValueError, match="4 layers of 2 KV heads, but chunks have 3 of 2"):
        ChunkFormat(DIM, head_precisions=heads).encode(given)
    with pytest.raises(ValueError, match="has groups"):
        ChunkFormat(DIM, Precision(4, 4, 2))
    with pytest.raises(ValueError, match="head_dim=12 must be the model's, a multiple of 8"):
        ChunkFormat(12)
    for options in ({}, {"head_dim": 32, "bits": 4}, {"head_dim": 32, "precision": "K4V4", "config": "x"}):
        with pytest.raises(ValueError, match="must be head_dim, and precision or config"):
            chunk_format(options)
    DiffKVConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no head_precisions for all heads"):
        chunk_format({"head_dim": 32, "config": str(tmp_path)})


@pytest.mark.slow
def test_a_trip_through_lmcache(tmp_path: Path) -> None:
    pytest.importorskip("lmcache.v1.distributed.serde", reason="LMCache is not installed", exc_type=ImportError)
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor, get_registered_serde_types

    ours.register()
    ours.register()
    assert get_registered_serde_types().count("diffkv") == 1
    options: dict[str, Any] = {"head_dim": DIM, "precision": "K6V4", "max_workers": 2}
    processor = create_serde_processor(SerdeConfig("diffkv", options))
    chunks = [chunk(seed=seed) for seed in range(4)]
    layout = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])
    size = processor.estimate_serialized_size(layout)
    assert size == ChunkFormat(DIM, Precision(6, 4)).size(torch.Size(SHAPE), torch.bfloat16)
    keys = [ObjectKey(bytes([i]) * 8, "model", 0) for i in range(4)]

    def memory(tensor: Tensor) -> Any:
        return _memory(tensor)

    stored = [memory(torch.zeros(size + 64, dtype=torch.uint8)) for _ in chunks]
    task = processor.submit_serialize([memory(each) for each in chunks], stored, keys)
    assert _ended(processor.get_serialize_event_fd(), lambda: processor.query_serialize_result(task))
    assert [each.get_size() for each in stored] == [size] * 4
    back = [torch.empty_like(each) for each in chunks]
    task = processor.submit_deserialize(stored, [memory(each) for each in back], keys)
    assert _ended(processor.get_deserialize_event_fd(), lambda: processor.query_deserialize_result(task))
    for found, given in zip(back, chunks):
        assert torch.equal(found, round_trip(ChunkFormat(DIM, Precision(6, 4)), given)[0])
    # one of another shape fails, and says so
    task = processor.submit_serialize([memory(torch.zeros(4, 4, dtype=torch.bfloat16))], stored[:1], keys[:1])
    assert _ended(processor.get_serialize_event_fd(), lambda: processor.query_serialize_result(task)) is False
    processor.close()
    with pytest.raises(ValueError, match="must be head_dim"):
        create_serde_processor(SerdeConfig("diffkv", {"bits": 4}))


def _memory(tensor: Tensor) -> Any:
    """Wraps a tensor like LMCache's allocators."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    data = tensor.view(torch.uint8).flatten()
    form = MemoryFormat.BINARY_BUFFER if tensor.dtype == torch.uint8 else MemoryFormat.KV_2LTD
    metadata = MemoryObjMetadata(tensor.shape, tensor.dtype, 0, data.numel(), 1, fmt=form)
    return TensorMemoryObj(data, metadata, None)


def _ended(event: int, result: Any) -> bool:
    assert select.select([event], [], [], 60)[0]
    os.read(event, 8)
    return result()
