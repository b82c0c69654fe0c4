"""Replays the tokens after a prompt with some heads' keys or values replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..cache.supported_models import shared_layers
from ..evaluation.methods.base import branched
from .watched import WatchedLayer, contains, decoder_blocks, run_prompt, run_tokens

# joint probability of the likely tokens at each position, most tokens considered for that, and number of other tokens
# that each sampled one stands for
LIKELY_MASS, MOST_LIKELY, OTHERS_STEP = 0.999, 8192, 16


@dataclass(frozen=True)
class Damage:
    """Replaced keys and values of a prompt in one layer.

    Attributes:
        layer: index of the compressed layer.
        keys, values: keys and values in each row, [rows, heads, tokens, dim].
    """

    layer: int
    keys: Tensor
    values: Tensor

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.keys.shape[0]


class Replay:
    """One prompt in a model that is `watching`.

    Args:
        model: model within `watching`.
        prompt: token ids of the prompt.
        following: token ids that follow the prompt in every row of a batch.
        positions: positions in `following` whose logits are wanted.
        joins: whether rows of several layers can run in one forward; None tests it on the first and last layer.

    Attributes:
        layers: compressed layers in order.
        joins: whether rows of several layers run in one forward, each from its layer on.
        tokens: tokens whose logits are computed, from `sampled_tokens`; None for the whole vocabulary.
        logits: logits with exact keys and values, [positions, tokens].
        probabilities: probabilities of these tokens, including the tokens they stand for.
    """

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        following: Sequence[int],
        positions: Sequence[int],
        joins: bool | None = None,
    ) -> None:
        self.model, self.start = model, len(prompt)
        self.following = torch.tensor([list(following)], device=model.device)
        self.positions = torch.tensor(list(positions), device=model.device)
        self._all, self.layers = run_prompt(model, prompt)
        for layer in self.layers:
            layer.shown = layer.keys, layer.values
        self._branched = list(self._all)
        # the layer whose keys and values others read must run, so blocks cannot be skipped
        shares = shared_layers(model.config.get_text_config(decoder=True))
        self._blocks = [] if shares else decoder_blocks(model, self.layers)
        self._outputs: list[Any] = []
        self.tokens: Tensor | None = None
        self.logits = self._reference()
        self.probabilities = self.logits.softmax(-1)
        self._sample_tokens()
        self.joins = bool(self._blocks) and (self._can_join() if joins is None else joins)

    def damaged(self, damages: Sequence[Damage]) -> Tensor:
        """Returns logits with a layer's prompt replaced in each row.

        Args:
            damages: replaced keys and values, of layers in ascending order.

        Returns:
            Logits of the rows of all `damages` in order, [rows, positions, tokens].
        """
        return self._from_blocks(damages) if self.joins else self._whole(damages)

    def _reference(self) -> Tensor:
        outputs: list[Any] = []
        with ExitStack() as stack:
            for block in self._blocks:
                handle = block.register_forward_hook(lambda module, given, output: outputs.append(output))
                stack.callback(handle.remove)
            logits = self._run()[0]
        # a block that runs twice has no single output
        if len(outputs) != len(self._blocks):
            self._blocks = []
        self._outputs = outputs
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
            with ExitStack() as stack:
                self._skip(stack, len(self._blocks))
                found = self._run()[0]
        except (IndexError, RuntimeError):
            found = expected[:0]
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
            self.logits, self.probabilities = found, (found + counts.log()).softmax(-1)
        else:
            # the model processes logits in a way that depends on the token
            self.tokens = None

    def _can_join(self) -> bool:
        """Tests on the first and last layer whether rows can join at their layers."""
        ends = sorted({0, len(self.layers) - 1})
        tests = [Damage(end, self.layers[end].keys, self.layers[end].values / 2) for end in ends]
        try:
            found = self._from_blocks(tests)
        except (IndexError, RuntimeError, TypeError):
            return False
        expected = self._whole(tests)
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)

    def _whole(self, damages: Sequence[Damage]) -> Tensor:
        """Runs all rows through all layers."""
        rows, before = sum(damage.rows for damage in damages), 0
        with ExitStack() as stack:
            for damage in damages:
                stack.enter_context(_showing(self.layers[damage.layer], damage, before, rows))
                before += damage.rows
            return self._run(rows)

    def _from_blocks(self, damages: Sequence[Damage]) -> Tensor:
        """Runs each row from the block of its layer on, with the exact hidden states as input."""
        blocks = [self._block_of(self.layers[damage.layer]) for damage in damages]
        rows = 0
        with ExitStack() as stack:
            self._skip(stack, blocks[0])
            joining = dict(zip(blocks, damages))
            for block in range(blocks[0], len(self._blocks)):
                damage = joining.get(block)
                if damage is not None:
                    rows += damage.rows
                    stack.enter_context(_showing(self.layers[damage.layer], damage, rows - damage.rows, rows))
                stack.enter_context(_acting(self._blocks[block], self._joining(block, damage, block == blocks[0])))
            return self._run()

    def _joining(self, index: int, damage: Damage | None, first: bool) -> Callable[..., Any]:
        """Returns a forward of a block that appends the exact hidden states for the rows of `damage`.

        The input of the first block is exact, and becomes these rows.
        """
        own = self._blocks[index].forward

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if damage is not None:
                exact = hidden_states if first else _hidden(self._outputs[index - 1])
                new = exact.expand(damage.rows, *exact.shape[1:])
                hidden_states = new if first else torch.cat([hidden_states, new])
            layer = self._branched[index] if index < len(self._branched) else None
            if layer is not None and not isinstance(layer, WatchedLayer):
                layer.reorder_cache(torch.zeros(len(hidden_states), dtype=torch.int64, device=hidden_states.device))
            return own(hidden_states, *args, **kwargs)

        return forward

    def _block_of(self, layer: WatchedLayer) -> int:
        return next(i for i, block in enumerate(self._blocks) if contains(block, layer.readers[0]))

    def _skip(self, stack: ExitStack, count: int) -> None:
        """Makes the first `count` blocks return their earlier outputs until `stack` closes."""
        for block, output in list(zip(self._blocks, self._outputs))[:count]:
            stack.enter_context(_acting(block, lambda *args, _output=output, **kwargs: _output))

    def _run(self, rows: int = 1) -> Tensor:
        """Returns logits, [rows, positions, tokens]; layers show what is set."""
        self._branched = [layer if isinstance(layer, WatchedLayer) else branched(layer) for layer in self._all]
        same = torch.zeros(rows, dtype=torch.int64, device=self.following.device)
        for layer in self._branched:
            if rows > 1 and not isinstance(layer, WatchedLayer):
                layer.reorder_cache(same)
        ids = self.following.expand(rows, -1)
        with nullcontext() if self.tokens is None else _acting(*self._head):
            return run_tokens(self.model, ids, self.start, Cache(layers=self._branched), self.positions)


@contextmanager
def _showing(layer: WatchedLayer, damage: Damage, before: int, rows: int) -> Iterator[None]:
    """Makes a layer show `damage` in its rows from `before` on, and exact keys and values in the others of `rows`."""
    exact, parts = layer.shown, []
    for tensor, replaced in zip(exact, (damage.keys, damage.values)):
        shown = tensor.repeat(rows, 1, 1, 1)
        shown[before : before + damage.rows] = replaced
        parts.append(shown)
    layer.shown = parts[0], parts[1]
    try:
        yield
    finally:
        layer.shown = exact


def _hidden(output: Any) -> Tensor:
    """Returns the hidden states within a block's output."""
    return output[0] if isinstance(output, tuple) else output


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
