"""A prompt whose layers are looked at one at a time: what follows it, with some heads' keys or values replaced."""

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
from ..cache.supported_models import cache_layers, shared_layers
from ..cache.switching import set_attention
from ..compat import attention_of, forget_attention, passing
from ..evaluation.methods.base import branched

WATCHED_NAME = "diffkv-watched"
WATCHED_TAG = "_diffkv_watched"
# probability that the likely tokens have together at each position, how many are looked at for that, and of how many
# others each one that is computed stands for all
LIKELY_MASS, MOST_LIKELY, OTHERS_STEP = 0.999, 8192, 16


class WatchedLayer(DynamicLayer):
    """Keeps a prompt's keys, values and queries; from then on shows them, or `shown`, to forwards and keeps nothing.

    Attributes:
        queries: of the prompt, [1, query_heads, tokens, key_dim] for each layer that reads these keys.
        readers: the modules that these came from.
        options: softcap and attention sinks, as they came with the queries.
        shown: keys and values [rows or 1, heads, tokens, dim] that a forward attends to beside its own.
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
    """Ordinary attention; layers that watch get the queries."""
    layer = getattr(key, WATCHED_TAG, None)
    if layer is not None:
        layer.note(module, query, kwargs | (kwargs.get("kwargs") or {}))
    elif query.shape[2] < key.shape[2] and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return _of_few_queries(query, key, value, attention_mask, scaling), None
    return diffkv_attention(module, query, key, value, attention_mask, scaling, **kwargs)


def _of_few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention [rows, tokens, query_heads, value_dim] whose keys and values are not repeated for each query head.

    Query heads that share a KV head are queries of one head.
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
    """The model attends by `watched_attention` within the block."""
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
    """A half-precision model computes in float32 within the block, with the same weights; others stay as they are.

    The model takes twice its memory then. Quantised models stay as they are: their losses have more noise.
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
        prompt, following: token ids; the second ones are run behind the first, in every row of a batch.
        positions: of `following`, whose logits are wanted.
        rows: of the batch.

    Attributes:
        layers: compressed layers, in order.
        tokens: those that logits are of, as of `sampled_tokens`; None for the whole vocabulary.
        logits: [positions, tokens], with keys and values as they are.
        probabilities: of these tokens, with those that they stand for.
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
        # what readers share is made in the layer that they read, which has to run
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
        # a block that runs twice has no one output
        self._outputs = outputs if len(outputs) == len(self._blocks) else []
        return logits

    def _sample_tokens(self) -> None:
        """From now on computes the logits of `sampled_tokens` alone, if the model allows it."""
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
            # what the model does with logits depends on the token
            self.tokens = None

    def damaged(self, index: int, keys: Tensor, values: Tensor) -> Tensor:
        """Logits [rows, positions, tokens] where a layer's prompt is another in each row.

        Args:
            index: of the compressed layer.
            keys, values: [rows, heads, tokens, dim].
        """
        layer = self.layers[index]
        shown, layer.shown = layer.shown, (keys, values)
        try:
            with self._from_block_of(layer):
                return self._following()
        finally:
            layer.shown = shown

    def _from_block_of(self, layer: WatchedLayer) -> AbstractContextManager[None]:
        """Blocks before the one that has the layer give what they gave before."""
        first = next((i for i, block in enumerate(self._blocks) if _contains(block, layer.readers[0])), 0)
        return self._skipping(first)

    @contextmanager
    def _skipping(self, count: int) -> Iterator[None]:
        """The first blocks give what they gave before."""
        with ExitStack() as stack:
            for block, output in list(zip(self._blocks, self._outputs))[:count]:
                stack.enter_context(_acting(block, lambda *args, _output=output, **kwargs: _output))
            yield

    def _following(self) -> Tensor:
        layers = [layer if isinstance(layer, WatchedLayer) else branched(layer) for layer in self._all]
        with nullcontext() if self.tokens is None else _acting(*self._head):
            return _run(self.model, self.following, self.start, Cache(layers=layers), self.positions)


def sampled_tokens(probabilities: Tensor) -> tuple[Tensor, Tensor] | None:
    """The likely tokens of a vocabulary, and every `OTHERS_STEP`-th of the others, which stands for as many.

    Args:
        probabilities: [positions, vocabulary].

    Returns:
        Tokens, and how many tokens each stands for, [tokens] each; None where that saves little.
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


def run_prompt(model: Any, prompt: Sequence[int]) -> tuple[list[Any], list[WatchedLayer]]:
    """Runs a prompt in a model that is `watching`: the layers of its cache, and those of them that are watched."""
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
    """The decoder's blocks in order: the list of modules each of which has at most one of the layers' attentions.

    Empty where the model has no such list.
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
    """The module has another forward."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
