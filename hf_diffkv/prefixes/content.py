"""Content behind placeholders in a prompt: images, video or audio, which token ids do not identify."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compat import with_parts
from .tokens import DIGEST_BYTES, digests

# outputs of a processor with an entry per token, which therefore change with every turn
ONE_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_(?!start|end|bos|eos)(\w+_)?token_(id|index)$")


class ContentKeys:
    """Names prefixes by their tokens, and by the request's content if they have placeholders.

    Args:
        model_config: configuration of the model, which lists its placeholders.
    """

    def __init__(self, model_config: Any) -> None:
        self.placeholders = sorted(set(_placeholders(model_config)))
        text_config = model_config.get_text_config(decoder=True)
        # a multimodal model whose configuration lists no placeholder may put an image anywhere
        self._anywhere = not self.placeholders and text_config is not model_config

    def names(self, ids: Tensor, content: Mapping[str, Any] | None, lengths: Iterable[int]) -> dict[int, str]:
        """Returns the name of the first n of `ids`, for every n in `lengths`.

        Args:
            ids: int64 [tokens].
            content: outputs of the processor except the ids; empty if there is no content, None if unknown.

        Raises:
            ValueError: `ids` have placeholders, and `content` is None.
        """
        first = self._first(ids)
        found = digests(ids, lengths)
        if first >= ids.numel():
            return found
        if content is None:
            raise ValueError(
                "input_ids have placeholders for images, video or sound, which other prompts have as well; pass the "
                "processor's output as content=inputs, or content={} if they stand for nothing."
            )
        behind = content_digest(content)
        return {length: _both(name, behind) if length > first else name for length, name in found.items()}

    def have_placeholders(self, ids: Tensor) -> bool:
        """Returns whether any token of `ids` may have content behind it."""
        return self._first(ids) < ids.numel()

    def _first(self, ids: Tensor) -> int:
        """Returns the position of the first token that may have content; the number of tokens if there is none."""
        if self._anywhere:
            return 0
        found = torch.isin(ids, torch.tensor(self.placeholders, dtype=torch.int64, device=ids.device)).nonzero()
        return int(found[0]) if len(found) else ids.numel()


def content_digest(content: Mapping[str, Any]) -> bytes:
    """Returns a digest of a processor's outputs, excluding those with an entry per token.

    Raises:
        ValueError: an output is not a tensor, number, string, or list of these.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(content):
        if name not in ONE_PER_TOKEN and content[name] is not None:
            digest.update(f"{name}:".encode())
            _add(digest, name, content[name])
    return digest.digest()


def _add(digest: Any, name: str, value: Any) -> None:
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _add(digest, name, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{value!r},".encode())
    else:
        raise ValueError(
            f"content[{name!r}] is a {type(value).__name__}; pass the processor's output: tensors, numbers or strings."
        )


def _both(tokens: str, content: bytes) -> str:
    return hashlib.blake2b(bytes.fromhex(tokens) + content, digest_size=DIGEST_BYTES).hexdigest()


def _placeholders(config: Any) -> Iterator[int]:
    """Yields the ids of placeholders in a configuration and its parts."""
    for name, value in (each for part in with_parts(config) for each in vars(part).items()):
        if _PLACEHOLDER.search(name) and value is not None:
            yield from value if isinstance(value, (list, tuple)) else [value]
