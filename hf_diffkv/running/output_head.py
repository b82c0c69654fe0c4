"""An output head for CPUs: all logits from 4-bit weights, the largest of them from exact weights.

bitsandbytes leaves output heads in 16 bits. With few layers and a large vocabulary, reading such a head takes a fifth
to a third of a decode step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..heads.recognition import state_of

# logits computed with exact weights; more hardly change the distribution (docs/notes/quality-studies.md)
CANDIDATES = 1024
# in a smaller vocabulary there is little to save
SMALLEST_VOCABULARY = 16 * CANDIDATES
# rows that bitsandbytes rearranges at once, for which it unpacks them to 32-bit integers
PART_ROWS = 16384
# from bitsandbytes: elements per scale, which must divide a row, and rows per block
SCALED_ELEMENTS, BLOCK_ROWS = 64, 32


class FourBitHead(nn.Linear):
    """Output head that multiplies one hidden state by 4-bit weights, then by the candidates' exact weights.

    It keeps the parameters of the head that it replaces, so tied embeddings stay tied and saved models stay the same.
    Several hidden states at once, gradients and other devices use the exact weights.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        self.train(head.training)
        self._quantise()

    def _quantise(self) -> None:
        parts = self.weight.detach().split(PART_ROWS)
        # in a tuple they are not registered as modules, so that only exact weights are saved and moved
        self._rough = tuple(map(_in_4_bits, parts))
        self._made_from = state_of(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns logits, [..., vocabulary], of hidden states [..., in_features]."""
        one = hidden_states.numel() == self.in_features and hidden_states.device.type == "cpu"
        if not one or self.training or hidden_states.requires_grad or torch.compiler.is_compiling():
            return super().forward(hidden_states)
        if state_of(self.weight) != self._made_from:
            self._quantise()
        logits = torch.cat([part(hidden_states) for part in self._rough], dim=-1)[..., : self.out_features]
        if self.bias is not None:
            logits = logits + self.bias
        candidates = logits.flatten().topk(CANDIDATES, sorted=False).indices
        bias = None if self.bias is None else self.bias[candidates]
        exact = functional.linear(hidden_states.flatten(), self.weight[candidates], bias)
        return logits.flatten().index_copy(0, candidates, exact).view_as(logits)


def _in_4_bits(weight: Tensor) -> nn.Module:
    """Returns a layer with a 4-bit copy of rows, [rows, in_features], padded with zeros to a whole block."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    padded = functional.pad(weight, (0, 0, 0, -len(weight) % BLOCK_ROWS))
    layer = Linear4bit(weight.shape[1], len(padded), bias=False, compute_dtype=weight.dtype, device="meta")
    layer.weight = Params4bit(padded, requires_grad=False, blocksize=SCALED_ELEMENTS, quant_type="nf4", module=layer)
    layer = layer.to("cpu").eval()
    arrange(layer, weight.dtype)
    return layer


@torch.no_grad()
def arrange(layer: nn.Module, dtype: torch.dtype) -> None:
    """Rearranges the weights of a bitsandbytes layer for CPUs with AVX512-BF16, as its first product would."""
    layer(torch.zeros(1, layer.in_features, dtype=dtype))


def quantize_head(model: Any) -> bool:
    """Gives a causal language model on a CPU a `FourBitHead`, which makes its decode steps faster.

    bitsandbytes must be installed.

    Returns:
        Whether the head was replaced. It must be a plain `nn.Linear` on a CPU, with a vocabulary of at least 16,384 and
        a multiple of 64 elements per row, and the processor must have AVX512-BF16, without which bitsandbytes unpacks
        all weights at every step.
    """
    from bitsandbytes.functional import has_avx512bf16

    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.device.type != "cpu" or not has_avx512bf16():
        return False
    if head.out_features < SMALLEST_VOCABULARY or head.in_features % SCALED_ELEMENTS:
        return False
    model.set_output_embeddings(FourBitHead(head))
    return True
