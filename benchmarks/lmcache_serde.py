"""Compares LMCache's serialisers: bytes, errors of keys and values, and the model's predictions from the result.

    make lmcache
    PYTHONPATH=.:packages/serving build/envs/lmcache/bin/python benchmarks/lmcache_serde.py --model smollm2

The keys and values of a text are cut into chunks as in LMCache, then serialised and restored by each serialiser of the
installed LMCache. The model continues from the result, and its next-token probabilities are compared with those from
the original keys and values. Without a GPU, TurboQuant's kernels run in Triton's interpreter; CacheGen needs one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from hf_diffkv_serving.lmcache import ChunkFormat, chunk_format
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde.asym_k16_v8 import AsymK16V8MultiDeserializer, AsymK16V8MultiSerializer
from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer
from lmcache.v1.distributed.serde.turboquant import (
    TurboQuantDeserializer,
    TurboQuantSerdeConfig,
    TurboQuantSerializer,
    decode_kernel,
    store_kernel,
    turboquant,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from hf_diffkv import DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.evaluation.tasks.text import texts
from hf_diffkv.running.models import load_model, resolve_model

CHUNK = 256
KEY = ObjectKey(b"chunk", "model", 0)
# turboquant_k8v4 has fp8 keys as above, which the interpreter rounds differently from GPUs
TURBO = ("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
OURS = ("K8V8", "K8V4", "K6V4", "K4V4", "K4V2")
RATIOS = (0.35, 0.25)


class Naive:
    """Keeps the bytes as they are."""

    def there_and_back(self, chunk: Tensor) -> tuple[Tensor, int]:
        return chunk.clone(), chunk.nbytes


class Single:
    """A serialiser of LMCache that takes a whole chunk."""

    def __init__(self, serializer: Any, deserializer: Any) -> None:
        self._serializer, self._deserializer = serializer, deserializer

    def there_and_back(self, chunk: Tensor) -> tuple[Tensor, int]:
        size = self._serializer.estimate_serialized_size(MemoryLayoutDesc([chunk.shape], [chunk.dtype]))
        stored, back = torch.zeros(size, dtype=torch.uint8), torch.empty_like(chunk)
        written = self._serializer.serialize(memory(chunk), memory(stored), KEY)
        self._deserializer.deserialize(memory(stored), memory(back), KEY)
        return back, written


class KeysAndValues(Single):
    """A serialiser that takes keys and values separately."""

    def there_and_back(self, chunk: Tensor) -> tuple[Tensor, int]:
        layouts = tuple(MemoryLayoutDesc([side.shape], [side.dtype]) for side in chunk)
        stored = torch.zeros(self._serializer.estimate_serialized_size(layouts), dtype=torch.uint8)
        back = torch.empty_like(chunk)
        written = self._serializer.serialize(tuple(map(memory, chunk.unbind())), memory(stored), KEY)
        self._deserializer.deserialize(memory(stored), tuple(map(memory, back.unbind())), KEY)
        return back, written


class Ours:
    def __init__(self, made: ChunkFormat) -> None:
        self._format = made

    def there_and_back(self, chunk: Tensor) -> tuple[Tensor, int]:
        data, back = self._format.encode(chunk), torch.empty_like(chunk)
        self._format.decode(data, back)
        return back, data.numel()


def memory(tensor: Tensor) -> TensorMemoryObj:
    data = tensor.contiguous().view(torch.uint8).flatten()
    form = MemoryFormat.BINARY_BUFFER if tensor.dtype == torch.uint8 else MemoryFormat.KV_2LTD
    return TensorMemoryObj(data, MemoryObjMetadata(tensor.shape, tensor.dtype, 0, data.numel(), 1, fmt=form), None)


def methods(model: Any, head_dim: int) -> Iterator[tuple[str, Any]]:
    yield "naive", Naive()
    yield "fp8 (e4m3)", Single(Fp8QuantizationSerializer(), Fp8QuantizationDeserializer())
    yield "asym_k16_v8", KeysAndValues(AsymK16V8MultiSerializer(), AsymK16V8MultiDeserializer())
    for name in OURS:
        yield f"diffkv {name}", Ours(chunk_format({"head_dim": head_dim, "precision": name}))
    for ratio in RATIOS:
        with tempfile.TemporaryDirectory() as folder:
            DiffKVConfig.for_model(model, target_ratio=ratio).save_pretrained(folder)
            try:
                yield f"diffkv, heads at {ratio:.0%}", Ours(chunk_format({"head_dim": head_dim, "config": folder}))
            except ValueError as error:
                print(f"heads at {ratio:.0%}: {error}")
    # last, because the interpreter takes minutes
    for preset in TURBO:
        settings = TurboQuantSerdeConfig(preset=preset, head_dim=head_dim)
        yield preset, Single(TurboQuantSerializer(settings), TurboQuantDeserializer(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--further", type=int, default=128, help="tokens that are read on what came back")
    parser.add_argument("--text", type=Path, help="in place of a text of the standard library")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        turboquant._select_cuda_device = lambda *_: torch.device("cpu")
        store_kernel._use_fp8_e4b15 = decode_kernel._use_fp8_e4b15 = lambda *_: 0
    model = load_model(options.model, "bfloat16", None, quiet=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(options.model))
    text = options.text.read_text() if options.text else "\n\n".join(texts())
    stored = options.chunks * CHUNK
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : stored + options.further].to(model.device)
    if ids.shape[1] < stored + options.further:
        raise SystemExit(f"the text has {ids.shape[1]} tokens of {stored + options.further}; give a longer one.")
    with torch.no_grad():
        cache = model(ids[:, :stored], **passing(DynamicCache(config=model.config))).past_key_values
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        whole = torch.stack([torch.stack([merged(side) for side in sides]) for sides in zip(*layers)])
        expected = read_on(model, ids[:, stored:], whole, layers)
        print("| serialiser | bytes | of bfloat16 | error of keys | error of values | KL | other token |")
        print("|---|---|---|---|---|---|---|")
        for name, method in methods(model, layers[0][0].shape[-1]):
            found = [method.there_and_back(chunk.contiguous().cpu()) for chunk in whole.split(CHUNK, dim=2)]
            back = torch.cat([chunk for chunk, _ in found], dim=2).to(whole.device)
            size = sum(size for _, size in found)
            errors = ((back - whole).float().square().sum((1, 2, 3)) / whole.float().square().sum((1, 2, 3))).sqrt()
            logits = read_on(model, ids[:, stored:], back, layers)
            divergence = torch.nn.functional.kl_div(logits, expected, reduction="none", log_target=True).sum(-1).mean()
            other = (logits.argmax(-1) != expected.argmax(-1)).float().mean()
            print(
                f"| {name} | {size:,} | {size / whole.nbytes:.1%} | {errors[0]:.4f} | {errors[1]:.4f} | "
                f"{divergence:.4f} | {other:.1%} |",
                flush=True,
            )


def merged(side: Tensor) -> Tensor:
    """[tokens, heads * head_dim] from [1, heads, tokens, head_dim]."""
    return side[0].transpose(0, 1).flatten(1)


def read_on(model: Any, ids: Tensor, whole: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Log-probabilities float32 [tokens, vocabulary] after keys and values [2, layers, tokens, hidden]."""
    cache = DynamicCache(config=model.config)
    for index, (keys, _) in enumerate(layers):
        sides = [side.unflatten(-1, (-1, keys.shape[-1])).transpose(0, 1)[None] for side in whole[:, index]]
        cache.update(*sides, index)
    return model(ids, **passing(cache)).logits[0].float().log_softmax(-1)


if __name__ == "__main__":
    main()
