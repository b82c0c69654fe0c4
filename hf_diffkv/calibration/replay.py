"""Replays the tokens after a prompt with some heads' keys or values replaced, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from ..cache.attention import diffkv_attention, diffkv_mask
from ..cache.errors import UnsupportedModelError
from ..cache.supported_models import cache_layers, shared_layers
from ..cache.switching import set_attention
from ..compat import attention_of, forget_attention, passing
from ..config.latent import has_latents
from ..evaluation.methods.base import branched

WATCHED_NAME = "diffkv-watched"
WATCHED_TAG = "_diffkv_watched"
# joint probability of the likely tokens at each position, most tokens considered for that, and number of other tokens
# that each sampled one stands for
LIKELY_MASS, MOST_LIKELY, OTHERS_STEP = 0.999, 8192, 16


class WatchedLayer(DynamicLayer):
    """Cache layer that records a prompt's keys, values and queries, and later only shows keys and values to forwards.

    Attributes:
        queries: queries of the prompt, [1, query_heads, tokens, key_dim] for each layer that reads these keys.
        readers: attention modules that these queries came from.
        options: softcap and attention sinks given with the queries.
        shown: keys and values, [rows or 1, heads, tokens, dim], that a forward attends to in addition to its own; None
            while recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Tensor] = []
        self.readers: list[nn.Module] = []
        self.options: dict[str, Any] = {}
        self.shown: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.shown is None:
            key, value = super().update(key_states, value_states)
            key, value = key.view_as(key), value.view_as(value)
            setattr(key, WATCHED_TAG, self)
            return key, value
        rows = key_states.shape[0]
        both = zip(self.shown, (key_states, value_states))
        key, value = (torch.cat([past.expand(rows, -1, -1, -1), new], dim=2) for past, new in both)
        return key, value

    def note(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
        self.queries.append(query)
        self.readers.append(module)
        self.options = {name: options.get(name) for name in ("softcap", "s_aux")}


def watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes ordinary attention, and passes the queries to recording layers."""
    layer = getattr(key, WATCHED_TAG, None)
    if layer is not None:
        layer.note(module, query, kwargs | (kwargs.get("kwargs") or {}))
    elif query.shape[2] < key.shape[2] and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return _of_few_queries(query, key, value, attention_mask, scaling), None
    return diffkv_attention(module, query, key, value, attention_mask, scaling, **kwargs)


def _of_few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Computes attention, [rows, tokens, query_heads, value_dim], without repeating keys and values per query head.

    Query heads that share a KV head are treated as further queries of one head.
    """
    rows, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    if mask is None:
        mask = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - tokens)
    mask = mask.expand(*mask.shape[:-2], tokens, -1).repeat(*[1] * (mask.ndim - 2), group, 1)
    folded = query.reshape(rows, key.shape[1], group * tokens, -1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.view(rows, heads, tokens, -1).transpose(1, 2).contiguous()


@contextmanager
def watching(model: Any) -> Iterator[None]:
    """Makes the model use `watched_attention` within the block."""
    before = attention_of(model.config.get_text_config(decoder=True))
    AttentionInterface.register(WATCHED_NAME, watched_attention)
    AttentionMaskInterface.register(WATCHED_NAME, diffkv_mask)
    try:
        set_attention(model, WATCHED_NAME)
        yield
    finally:
        set_attention(model, before or "sdpa")
        forget_attention(WATCHED_NAME)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Makes a half-precision model compute in float32 within the block, with the same weights.

    The model then takes twice its memory. Quantised models are not changed, so their losses have more noise.
    """
    tensors = [*model.parameters(), *model.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        halves = []
    dtypes = [tensor.dtype for tensor in halves]
    try:
        for tensor in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in zip(halves, dtypes):
            tensor.data = tensor.data.to(dtype)


class Replay:
    """One prompt in a model that is `watching`.

    Args:
        model: model within `watching`.
        prompt: token ids of the prompt.
        following: token ids that follow the prompt in every row of a batch.
        positions: positions in `following` whose logits are wanted.
        rows: number of rows of a batch.

    Attributes:
        layers: compressed layers in order.
        tokens: tokens whose logits are computed, from `sampled_tokens`; None for the whole vocabulary.
        logits: logits with exact keys and values, [positions, tokens].
        probabilities: probabilities of these tokens, including the tokens they stand for.
    """

    def __init__(
        self, model: Any, prompt: Sequence[int], following: Sequence[int], positions: Sequence[int], rows: int
    ) -> None:
        self.model, self.rows, self.start = model, rows, len(prompt)
        self.following = torch.tensor([list(following)], device=model.device).expand(rows, -1)
        self.positions = torch.tensor(list(positions), device=model.device)
        self._all, self.layers = run_prompt(model, prompt)
        same = torch.zeros(rows, dtype=torch.int64, device=model.device)
        for layer in self._all:
            if isinstance(layer, WatchedLayer):
                layer.shown = layer.keys, layer.values
            else:
                layer.reorder_cache(same)
        # the layer whose keys and values others read must run, so blocks cannot be skipped
        shares = shared_layers(model.config.get_text_config(decoder=True))
        self._blocks = [] if shares else decoder_blocks(model, self.layers)
        self._outputs: list[Any] = []
        self.tokens: Tensor | None = None
        self.logits = self._reference()
        self.probabilities = self.logits.softmax(-1)
        self._sample_tokens()

    def _reference(self) -> Tensor:
        outputs: list[Any] = []
        with ExitStack() as stack:
            for block in self._blocks:
                handle = block.register_forward_hook(lambda module, given, output: outputs.append(output))
                stack.callback(handle.remove)
            logits = self._following()[0]
        # a block that runs twice has no single output
        self._outputs = outputs if len(outputs) == len(self._blocks) else []
        return logits

    def _sample_tokens(self) -> None:
        """Restricts logits to `sampled_tokens` from now on, if the model allows it."""
        head, sampled = self.model.get_output_embeddings(), sampled_tokens(self.probabilities)
        if type(head) is not nn.Linear or head.out_features != self.logits.shape[1] or sampled is None:
            return
        self.tokens, counts = sampled
        weight, bias = head.weight[self.tokens], None if head.bias is None else head.bias[self.tokens]
        self._head = head, lambda hidden: F.linear(hidden, weight, bias)
        expected = self.logits[:, self.tokens]
        try:
            with self._skipping(len(self._outputs)):
                found = self._following()[0]
        except (IndexError, RuntimeError):
            found = expected[:0]
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
            self.logits, self.probabilities = found, (found + counts.log()).softmax(-1)
        else:
            # the model processes logits in a way that depends on the token
            self.tokens = None

    def damaged(self, index: int, keys: Tensor, values: Tensor) -> Tensor:
        """Returns logits, [rows, positions, tokens], with a layer's prompt replaced in each row.

        Args:
            index: index of the compressed layer.
            keys, values: keys and values of the prompt, [rows, heads, tokens, dim].
        """
        layer = self.layers[index]
        shown, layer.shown = layer.shown, (keys, values)
        try:
            with self._from_block_of(layer):
                return self._following()
        finally:
            layer.shown = shown

    def _from_block_of(self, layer: WatchedLayer) -> AbstractContextManager[None]:
        """Makes the blocks before the layer's block return their earlier outputs."""
        first = next((i for i, block in enumerate(self._blocks) if _contains(block, layer.readers[0])), 0)
        return self._skipping(first)

    @contextmanager
    def _skipping(self, count: int) -> Iterator[None]:
        """Makes the first `count` blocks return their earlier outputs."""
        with ExitStack() as stack:
            for block, output in list(zip(self._blocks, self._outputs))[:count]:
                stack.enter_context(_acting(block, lambda *args, _output=output, **kwargs: _output))
            yield

    def _following(self) -> Tensor:
        layers = [layer if isinstance(layer, WatchedLayer) else branched(layer) for layer in self._all]
        with nullcontext() if self.tokens is None else _acting(*self._head):
            return _run(self.model, self.following, self.start, Cache(layers=layers), self.positions)


def sampled_tokens(probabilities: Tensor) -> tuple[Tensor, Tensor] | None:
    """Chooses the likely tokens of a vocabulary, and every `OTHERS_STEP`-th of the others to stand for the rest.

    Args:
        probabilities: probabilities, [positions, vocabulary].

    Returns:
        Chosen tokens, and the number of tokens that each stands for, [tokens] each; None if that saves little.
    """
    vocabulary = probabilities.shape[1]
    if vocabulary <= 2 * MOST_LIKELY:
        return None
    most, tokens = probabilities.topk(MOST_LIKELY)
    likely = torch.zeros(vocabulary, dtype=torch.bool, device=probabilities.device)
    likely[tokens[most.cumsum(-1) - most < LIKELY_MASS]] = True
    others = (~likely).nonzero()[:, 0]
    few = others[OTHERS_STEP // 2 :: OTHERS_STEP]
    chosen = torch.cat([likely.nonzero()[:, 0], few])
    if 2 * len(chosen) > vocabulary or not len(few):
        return None
    counts = torch.ones(len(chosen), device=probabilities.device)
    counts[-len(few) :] = len(others) / len(few)
    return chosen, counts


def check_measurable(model: Any) -> None:
    """Raises `UnsupportedModelError` for a model that caches latents, whose heads are not measured."""
    text_config = model.config.get_text_config(decoder=True)
    if has_latents(text_config):
        raise UnsupportedModelError(
            f"{text_config.model_type} caches latents, one row for all heads of a layer, so its heads cannot be "
            "measured; compare precisions with hf-diffkv verify (docs/latent.md)."
        )


def run_prompt(model: Any, prompt: Sequence[int]) -> tuple[list[Any], list[WatchedLayer]]:
    """Runs a prompt in a model within `watching`. Returns all layers of its cache, and the recording ones.

    Raises:
        UnsupportedModelError: the model caches latents, whose heads are not measured.
    """
    check_measurable(model)
    kinds = cache_layers(model.config.get_text_config(decoder=True))
    layers = [WatchedLayer() if type(layer) is DynamicLayer else layer for layer in kinds]
    _run(model, torch.tensor([list(prompt)], device=model.device), 0, Cache(layers=layers), 1)
    return layers, [layer for layer in layers if isinstance(layer, WatchedLayer)]


def _run(model: Any, ids: Tensor, start: int, cache: Cache, keep: int | Tensor) -> Tensor:
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)
    return model(
        input_ids=ids, position_ids=positions[None], **passing(cache), use_cache=True, logits_to_keep=keep
    ).logits.float()


def decoder_blocks(model: nn.Module, layers: Sequence[WatchedLayer]) -> list[nn.Module]:
    """Finds the decoder's blocks: the list of modules that each contain the attention of at most one layer.

    Returns:
        The blocks in order; empty if the model has no such list.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) >= len(layers):
            owners = [[i for i, block in enumerate(module) if _contains(block, layer.readers[0])] for layer in layers]
            if all(len(found) == 1 for found in owners) and sorted(owners) == owners:
                return list(module)
    return []


def _contains(block: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in block.modules())


@contextmanager
def _acting(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces the module's forward within the block."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
