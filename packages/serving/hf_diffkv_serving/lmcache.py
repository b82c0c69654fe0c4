"""A serialiser for LMCache: stores what vLLM's cache offloads from the GPU as rows of this library's pages.

    python -m hf_diffkv_serving.lmcache server --l2-adapter ADAPTER

runs LMCache's own command with the serialiser registered. An ADAPTER is, for example,
'{"type": "fs_native", "base_path": "/cache", "serde": {"type": "diffkv", "head_dim": 128}}'. LMCache passes chunks of
one model, [2, layers, tokens, KV heads * head_dim], keys first. Keys lose the mean of their chunk and head. Then each
key and value is rotated by a Hadamard matrix and quantised on its own, as in `ops/quantize`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_diffkv.config import DiffKVConfig, Precision
from hf_diffkv.ops.quantize.reference import dequantize, quantize
from hf_diffkv.ops.rotation import rotation_matrix
from hf_diffkv.pages.inset import FULL_RANGE, inset_of
from hf_diffkv.pages.layout import metadata_bytes, row_bytes

SERDE_NAME = "diffkv"
# identifies the settings that made a chunk
HEADER_BYTES = 16
CHUNK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ChunkFormat:
    """Format of a stored chunk: a header, then, for each precision, the keys and then the values of its heads.

    A part has means [heads, head_dim] in the model's dtype (for quantised keys), codes [heads, tokens, bytes] and
    metadata [heads, tokens] of 2 bytes, 4 at 8 bits, none at 16. Heads are counted over all layers, in layer order.

    Attributes:
        head_dim: elements of a key.
        precision: precision of all heads if there are no `head_precisions`.
        head_precisions: precision of each KV head of each layer, as in `DiffKVConfig`.

    Raises:
        ValueError: `head_dim` is no multiple of 8, a precision has groups, or layers differ in their number of heads.
    """

    head_dim: int
    precision: Precision = Precision(6, 4)
    head_precisions: tuple[tuple[Precision, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 1 or self.head_dim % 8:
            raise ValueError(f"head_dim={self.head_dim!r} must be the model's, a multiple of 8.")
        layers = self.head_precisions or ((self.precision,),)
        if len({len(layer) for layer in layers}) > 1:
            raise ValueError(
                "head_precisions has layers of different lengths; a model for LMCache has the same heads in every "
                "layer."
            )
        for precision in {*sum(layers, ())}:
            if precision.k_groups != 1 or precision.v_groups != 1:
                raise ValueError(f"{precision.full_name} has groups; the serialiser has one for each key and value.")

    def heads(self, layers: int, kv_heads: int) -> list[tuple[Precision, list[int]]]:
        """Returns each precision with the heads that have it.

        Raises:
            ValueError: `head_precisions` has a different shape.
        """
        chosen = self.head_precisions or ((self.precision,) * kv_heads,) * layers
        if (len(chosen), len(chosen[0])) != (layers, kv_heads):
            raise ValueError(
                f"head_precisions are for {len(chosen)} layers of {len(chosen[0])} KV heads, but chunks have {layers} "
                f"of {kv_heads}; the configuration belongs to another model."
            )
        found: dict[Precision, list[int]] = {}
        for index, precision in enumerate(sum(chosen, ())):
            found.setdefault(precision, []).append(index)
        return list(found.items())

    def shape(self, shape: torch.Size, dtype: torch.dtype) -> tuple[int, int, int]:
        """Returns layers, tokens and KV heads of a chunk.

        Raises:
            ValueError: it is not a chunk of keys and values with this `head_dim`.
        """
        if len(shape) != 4 or shape[0] != 2 or shape[3] % self.head_dim:
            raise ValueError(
                f"a chunk of shape {tuple(shape)} is not [2, layers, tokens, KV heads * {self.head_dim}]; give the "
                "model's head_dim. Latent attention and other layouts have no serialiser here."
            )
        if dtype not in CHUNK_DTYPES:
            raise ValueError(f"a chunk of {dtype} is not one of {CHUNK_DTYPES}; set vLLM's kv_cache_dtype to auto.")
        return int(shape[1]), int(shape[2]), int(shape[3]) // self.head_dim

    def size(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Returns the exact bytes of a chunk. Raises `ValueError` like `shape` and `heads`."""
        layers, tokens, kv_heads = self.shape(shape, dtype)
        total = HEADER_BYTES
        for part in self._parts(layers, kv_heads):
            token = row_bytes(part.bits, self.head_dim, dtype.itemsize) + metadata_bytes(part.bits, 2)
            total += len(part.heads) * (tokens * token + part.centered * self.head_dim * dtype.itemsize)
        return total

    def _parts(self, layers: int, kv_heads: int) -> list[_Part]:
        """Returns the parts in the order in which they are stored. Raises `ValueError` like `heads`."""
        chosen = self.heads(layers, kv_heads)
        return [_Part(heads, side, bits) for p, heads in chosen for side, bits in enumerate((p.k_bits, p.v_bits))]

    def digest(self, dtype: torch.dtype) -> bytes:
        """Returns a digest of all settings and a chunk's dtype, HEADER_BYTES long."""
        layers = self.head_precisions or ((self.precision,),)
        names = [[precision.full_name for precision in layer] for layer in layers]
        text = json.dumps([1, self.head_dim, self.head_precisions is None, names, str(dtype)])
        return hashlib.sha256(text.encode()).digest()[:HEADER_BYTES]

    def encode(self, chunk: Tensor) -> Tensor:
        """Encodes a chunk as uint8 [size]. Raises `ValueError` like `size`."""
        layers, tokens, kv_heads = self.shape(chunk.shape, chunk.dtype)
        by_head = chunk.reshape(2, layers, tokens, kv_heads, self.head_dim).movedim(3, 2).flatten(1, 2)
        matrix = self._matrix(chunk)
        parts = [torch.frombuffer(bytearray(self.digest(chunk.dtype)), dtype=torch.uint8).to(chunk.device)]
        for part in self._parts(layers, kv_heads):
            vectors = by_head[part.side, part.heads].float()
            if part.centered:
                mean = vectors.mean(1, keepdim=True).to(chunk.dtype)
                parts.append(_bytes(mean))
                vectors = vectors - mean.float()
            rows = vectors if part.bits == 16 else vectors @ matrix
            inset = inset_of(part.bits, self.head_dim) if part.side else FULL_RANGE
            packed = quantize(rows, part.bits, 1, chunk.dtype, metadata_bytes=metadata_bytes(part.bits, 2), inset=inset)
            parts += [_bytes(piece) for piece in packed if piece is not None]
        return torch.cat(parts)

    def decode(self, data: Tensor, chunk: Tensor) -> None:
        """Fills a chunk from what `encode` returned for one of the same shape and dtype.

        Raises:
            ValueError: too few bytes, or bytes from other settings. The chunk is left unchanged.
        """
        layers, tokens, kv_heads = self.shape(chunk.shape, chunk.dtype)
        size = self.size(chunk.shape, chunk.dtype)
        if data.numel() < size:
            raise ValueError(f"a stored chunk has {data.numel()} bytes of {size}; remove it from the store.")
        if bytes(data[:HEADER_BYTES].tolist()) != self.digest(chunk.dtype):
            raise ValueError("a stored chunk was made with other settings or another dtype; give each its own store.")
        by_head = torch.empty(2, layers * kv_heads, tokens, self.head_dim, dtype=chunk.dtype, device=chunk.device)
        matrix, reader = self._matrix(chunk), _Reader(data.to(chunk.device), HEADER_BYTES)
        for part in self._parts(layers, kv_heads):
            count, bits = len(part.heads), part.bits
            mean = reader.take((count, 1, self.head_dim), chunk.dtype).float() if part.centered else 0.0
            codes = reader.take((count, tokens, row_bytes(bits, self.head_dim, chunk.dtype.itemsize)), torch.uint8)
            metadata = None
            if bits < 16:
                narrow = metadata_bytes(bits, 2) == 2
                numbers, dtype = ((1,), torch.int16) if narrow else ((1, 2), torch.float16)
                metadata = reader.take((count, tokens, *numbers), dtype)
            vectors = dequantize(codes, metadata, bits, 1, chunk.dtype)
            by_head[part.side, part.heads] = ((vectors if bits == 16 else vectors @ matrix.mT) + mean).to(chunk.dtype)
        chunk.copy_(by_head.unflatten(1, (layers, kv_heads)).movedim(2, 3).flatten(3))

    def _matrix(self, chunk: Tensor) -> Tensor:
        return rotation_matrix(self.head_dim, torch.float32, chunk.device)


class _Part(NamedTuple):
    """The keys (side 0) or values (1) of some heads."""

    heads: list[int]
    side: int
    bits: int

    @property
    def centered(self) -> bool:
        return self.side == 0 and self.bits < 16


class _Reader:
    """Reads tensors from a row of bytes."""

    def __init__(self, data: Tensor, start: int) -> None:
        self._data, self._start = data, start

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = dtype.itemsize
        for dimension in shape:
            count *= dimension
        part = self._data[self._start : self._start + count]
        self._start += count
        # a part may begin at an address that does not suit its dtype
        return part.clone().view(dtype).view(shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


def chunk_format(options: dict[str, Any]) -> ChunkFormat:
    """Reads the chunk format from the options under "serde" in LMCache's configuration.

    Args:
        options: `head_dim`, and either `precision`, such as "K6V4", or `config`, a folder with a `DiffKVConfig` that
            has `head_precisions` for all layers.

    Raises:
        ValueError: unknown options, or options that exclude each other.
    """
    given = {name: value for name, value in options.items() if name != "max_workers"}
    unknown = set(given) - {"head_dim", "precision", "config"}
    if unknown or "head_dim" not in given or {"precision", "config"} <= set(given):
        raise ValueError(f"serde options {sorted(given)} must be head_dim, and precision or config.")
    if "config" not in given:
        return ChunkFormat(int(given["head_dim"]), Precision.parse(str(given.get("precision", "K6V4"))))
    config = DiffKVConfig.from_pretrained(str(Path(str(given["config"]))))
    chosen = config.head_precisions or (None,)
    if any(layer is None or None in layer for layer in chosen):
        raise ValueError(f"config={given['config']!r} has no head_precisions for all heads; give precision instead.")
    layers = tuple(tuple(precision for precision in layer or () if precision is not None) for layer in chosen)
    return ChunkFormat(int(given["head_dim"]), config.low, layers)


def register() -> None:
    """Registers "diffkv" with LMCache. A second call does nothing.

    Raises:
        ImportError: LMCache is not installed, or is too old for such serialisers (0.5 has them).
    """
    try:
        from lmcache.v1.distributed.serde import (
            AsyncSerdeProcessor,
            Deserializer,
            Serializer,
            get_registered_serde_types,
            register_serde_factory,
        )
    except ImportError as error:
        raise ImportError(f"the serialiser needs LMCache 0.5 or newer ({error}): pip install lmcache.") from error

    class DiffKVSerializer(Serializer):
        """Turns chunks into bytes."""

        def __init__(self, made: ChunkFormat) -> None:
            self._format = made

        def serialize(self, src: Any, dst: Any, key: Any) -> int:
            data = self._format.encode(src.tensor)
            dst.tensor.flatten()[: data.numel()].copy_(data)
            return data.numel()

        def estimate_serialized_size(self, layout_desc: Any) -> int:
            shapes = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
            return sum(self._format.size(shape, dtype) for shape, dtype in shapes)

    class DiffKVDeserializer(Deserializer):
        """Turns them back into chunks."""

        def __init__(self, made: ChunkFormat) -> None:
            self._format = made

        def deserialize(self, src: Any, dst: Any, key: Any) -> None:
            self._format.decode(src.tensor.flatten(), dst.tensor)

    def make(options: dict[str, Any]) -> Any:
        made = chunk_format(options)
        workers = int(options.get("max_workers", 1))
        return AsyncSerdeProcessor(DiffKVSerializer(made), DiffKVDeserializer(made), max_workers=workers)

    if SERDE_NAME not in get_registered_serde_types():
        register_serde_factory(SERDE_NAME, make)


def main() -> None:
    """Runs LMCache's own command with the serialiser registered."""
    register()
    from lmcache.cli.main import main as lmcache

    lmcache()


if __name__ == "__main__":
    main()
